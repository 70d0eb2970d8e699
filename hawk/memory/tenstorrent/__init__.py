"""Memory of Tenstorrent chips: DRAM banks as channels, reached by the chip's own driver.

Importing this imports no device library; what needs one says which extra brings it.
"""

from hawk.memory.tenstorrent.reservation import Reservation

__all__ = ["Reservation"]
