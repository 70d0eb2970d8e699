"""How many descriptors this process has open."""

import gc
import os


def fds() -> int:
    """Open descriptors, once all that nobody refers to is gone: what another test left behind must not go meanwhile."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
