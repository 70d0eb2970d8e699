"""HAWK inside other systems.  Nothing here is imported by the rest of HAWK."""
