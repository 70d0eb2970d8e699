"""What a reading side's engine has registered, for as long as it is there."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from hawk.memory.region import Region
from hawk.observe.log import get as get_log
from hawk.transports._engine._seam import EngineFailed

if TYPE_CHECKING:
    from hawk.memory.region import U8
    from hawk.transports._engine._seam import Engine

log = get_log("hawk.transports.engine")


class Kept:
    """The memory that a lane's engine knows: the regions of its reads, and its own buffers.

    news    something was registered that the peer has not been told of
    said    why the engine did not take what it refused last
    """

    def __init__(self) -> None:
        self._owners: dict[int, tuple[weakref.ref[U8 | Region], int, int]] = {}
        self._refused: dict[tuple[int, int], weakref.ref[U8 | Region]] = {}
        self.news = False
        self.said = ""

    def knows(self, engine: Engine, memory: U8 | Region) -> bool:
        """Registers memory that it has not seen; False for memory that the engine does not take.

        What is known goes with the array, or with the region where that is a GPU's and has none.
        """
        owner = memory.array if isinstance(memory, Region) and memory.gpu < 0 else memory
        known = self._owners.get(id(owner))
        if known is not None and known[0]() is owner:
            return True
        gpu = -1
        if isinstance(owner, Region):
            address, nbytes, gpu = owner.address, owner.nbytes, owner.gpu
        else:
            address, nbytes = int(owner.__array_interface__["data"][0]), int(owner.nbytes)
        # Whose owner is gone may have lain where this one lies.
        for name in [name for name, (ref, _, _) in self._owners.items() if ref() is None]:
            _, *gone = self._owners.pop(name)
            # Another one over the same bytes goes on using what the engine knows of them.
            if not any(gone == others for _, *others in self._owners.values()):
                engine.forget(*gone)
        self._refused = {place: ref for place, ref in self._refused.items() if ref() is not None}
        if (address, nbytes) in self._refused:
            return False
        try:
            engine.register(address, nbytes, gpu)
        except EngineFailed as error:
            # Not every kind of memory can be registered with every engine; by way of the buffers all is reached.
            self._refused[address, nbytes] = weakref.ref(owner)
            self.said = str(error)
            log.warning("the engine does not take a region", nbytes=nbytes, reason=str(error))
            return False
        self._owners[id(owner)] = (weakref.ref(owner), address, nbytes)
        self.news = True
        return True
