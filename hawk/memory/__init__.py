"""Memories own addresses: host memory, emulated and real devices, shared buffers and the arena."""
