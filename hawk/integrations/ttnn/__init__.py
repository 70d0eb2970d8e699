"""HAWK and ttnn, the tensor library of Tenstorrent's chips: fetched requests as its tensors, its memory as HAWK's.

`HostTensors` are ttnn host tensors over the bytes that a fetch fills; `PagedCache` is the paged cache of a model on a
chip or a mesh; `reserve` sets memory of every bank aside; `BankMover` moves bytes inside it on the chip.  docs/ttnn.md
has a decode loop.  Importing this needs no ttnn; using it does (the extra `ttnn`, Python 3.12).
"""

from hawk.integrations.ttnn.host import HostTensors
from hawk.integrations.ttnn.mover import BankMover
from hawk.integrations.ttnn.paged import PagedCache
from hawk.integrations.ttnn.reserving import reserve

__all__ = ["BankMover", "HostTensors", "PagedCache", "reserve"]
