"""What can be made to go wrong in a fake device, and where it stops to be looked at."""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hawk.transports.verbs._device import VerbsError

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Faults:
    """Shared by all devices of a driver; may be changed at any time.

    register       errno of the n-th registration from now (0 the next), by n; each counts once
    dmabuf         errno of every registration of a dma-buf, 0 where it works
    queue          errno of every new queue pair, 0 where it works
    dead           names of devices that lose all packets and make no queue pairs
    cut            whether packets get lost: READs and WRITEs end with retries exceeded
    on_step        called by the thread that places bytes of a READ or WRITE, with those so far, before it does; it may
                   block
    starved        immediate data that came where no receive was posted
    on_register    called in the midst of every registration, by the thread that registers
    """

    register: dict[int, int] = field(default_factory=dict)
    dmabuf: int = 0
    queue: int = 0
    dead: set[str] = field(default_factory=set)
    cut: bool = False
    starved: int = 0
    on_step: Callable[[int], None] | None = None
    on_register: Callable[[], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def registering(self) -> None:
        """Raises what this registration is to fail with."""
        if self.on_register is not None:
            self.on_register()
        with self._lock:
            number = self.register.pop(0, 0)
            self.register = {n - 1: e for n, e in self.register.items() if n > 0}
        if number:
            raise VerbsError(number, "ibv_reg_mr")

    def registering_dmabuf(self) -> None:
        """Raises what this registration is to fail with."""
        if self.dmabuf:
            raise VerbsError(self.dmabuf, "ibv_reg_dmabuf_mr")

    def creating_queue(self, device: str) -> None:
        """Raises what this queue pair is to fail with."""
        if self.queue or device in self.dead:
            raise VerbsError(self.queue or errno.EIO, "ibv_create_qp")

    def loses(self, device: str) -> bool:
        """Whether this device's packets get lost."""
        return self.cut or device in self.dead


def refused(what: str) -> VerbsError:
    """A call that is out of place."""
    return VerbsError(errno.EINVAL, what)
