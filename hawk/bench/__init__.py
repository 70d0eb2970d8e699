"""Measurements that HAWK makes of itself: `hawk bench`."""
