"""Layouts and codecs a second time, from their public descriptions: numpy only, nothing of HAWK is imported."""
