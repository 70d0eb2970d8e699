"""What a reading side's engine has registered, for as long as it is there."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from hawk.observe.log import get as get_log
from hawk.transports._engine._seam import EngineFailed

if TYPE_CHECKING:
    from hawk.memory.region import U8
    from hawk.transports._engine._seam import Engine

log = get_log("hawk.transports.engine")


class Kept:
    """The memory that a lane's engine knows: the regions of its reads, and its own buffers.

    news    something was registered that the peer has not been told of
    """

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[weakref.ref[U8], int, int]] = {}
        self._refused: set[tuple[int, int]] = set()
        self.news = False

    def knows(self, engine: Engine, array: U8) -> bool:
        """Registers memory that it has not seen; False for memory that the engine does not take."""
        known = self._arrays.get(id(array))
        if known is not None and known[0]() is array:
            return True
        address, nbytes = int(array.__array_interface__["data"][0]), int(array.nbytes)
        # Whose array is gone may have lain where this one lies.
        for name in [name for name, (ref, _, _) in self._arrays.items() if ref() is None]:
            _, *gone = self._arrays.pop(name)
            # Another array over the same bytes goes on using what the engine knows of them.
            if not any(gone == others for _, *others in self._arrays.values()):
                engine.forget(*gone)
        if (address, nbytes) in self._refused:
            return False
        try:
            engine.register(address, nbytes)
        except EngineFailed as error:
            # Not every kind of memory can be registered with every engine; by way of the buffers all is reached.
            self._refused.add((address, nbytes))
            log.warning("the engine does not take a region", nbytes=nbytes, reason=str(error))
            return False
        self._arrays[id(array)] = (weakref.ref(array), address, nbytes)
        self.news = True
        return True
