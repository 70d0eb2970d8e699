"""Memory of Tenstorrent chips: DRAM banks as channels, reached by the chip's own driver.

    Reservation   what the owner of the chip's allocator has set aside
    Tenstorrent   a memory over it: `kind = "tenstorrent"`
    Chip          what the driver says of a chip
    Mover, Pusher what programs of the chip can do for it

Importing this imports no device library; what needs one says which extra brings it.
"""

from hawk.memory.tenstorrent.chip import Bank, Chip
from hawk.memory.tenstorrent.memory import Tenstorrent
from hawk.memory.tenstorrent.options import TenstorrentConfig
from hawk.memory.tenstorrent.programs import Mover, Pusher
from hawk.memory.tenstorrent.reservation import Reservation

MEMORY = Tenstorrent
"""What this folder adds to the kinds of memory."""

__all__ = ["Bank", "Chip", "Mover", "Pusher", "Reservation", "Tenstorrent", "TenstorrentConfig"]
