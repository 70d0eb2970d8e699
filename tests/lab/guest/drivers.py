"""The two modules that drive hawk_npu in tests (kmod/tests/*.h): an importer of dma-bufs, and the peer-memory core."""

from __future__ import annotations

import ctypes
from typing import Any

from hawk.memory.npu_abi import S32, U32, U64, ioctl_number
from tests.lab.guest.npu import Opened

STATIC, DYNAMIC, PINNED, SLOW = range(4)
NO_P2P, DAWDLES, BOUNCES = 1, 2, 4


def structure(*fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type("Structure", (ctypes.Structure,), {"_fields_": list(fields)})


Attach = structure(
    ("fd", S32), ("how", U32), ("flags", U32), ("device", U32), ("peer2peer", U32), ("reserved", U32)
)
Map = structure(("nbytes", U64), ("entries", U32), ("faults", U32))
Copy = structure(("offset", U64), ("nbytes", U64), ("user", U64), ("write", U32), ("reserved", U32))
Status = structure(("attached", U32), ("mapped", U32), ("told", U32), ("reserved", U32))


class Importer(Opened):
    """One attachment of the importer module."""

    def __init__(self) -> None:
        super().__init__("/dev/hawk_npu_importer")

    def attach(self, fd: int, how: int, device: int = 0, flags: int = 0) -> Any:
        request = ioctl_number(3, 0, Attach, 0xB8)
        return self.ask(request, Attach(fd=fd, how=how, device=device, flags=flags))

    def map(self) -> Any:
        return self.ask(ioctl_number(2, 1, Map, 0xB8), Map())

    def write(self, offset: int, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        self._copy(offset, buffer, 1)

    def read(self, offset: int, nbytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(nbytes)
        self._copy(offset, buffer, 0)
        return buffer.raw

    def _copy(self, offset: int, buffer: Any, write: int) -> None:
        argument = Copy(offset=offset, nbytes=len(buffer), user=ctypes.addressof(buffer), write=write)
        self.ask(ioctl_number(1, 2, Copy, 0xB8), argument)

    def unmap(self) -> None:
        self.ask(0xB8 << 8 | 3)

    def detach(self) -> None:
        self.ask(0xB8 << 8 | 4)

    def status(self) -> tuple[int, int, int]:
        """Attached, mapped, how often told."""
        found = self.ask(ioctl_number(2, 5, Status, 0xB8), Status())
        return found.attached, found.mapped, found.told


Register = structure(
    ("addr", U64),
    ("nbytes", U64),
    ("device", U32),
    ("id", U32),
    ("failed", U32),
    ("entries", U32),
    ("faults", U32),
    ("page_bytes", U32),
)
Deregister = structure(("id", U32), ("order", U32))
PeerCopy = structure(("id", U32), ("write", U32), ("offset", U64), ("nbytes", U64), ("user", U64))
PeerStatus = structure(("id", U32), ("invalidated", U32), ("clients", U32), ("live", U32))
ACQUIRE, GET_PAGES, DMA_MAP = 1, 2, 3
UNMAP_PUT, PUT_UNMAP, TWICE, RELEASE_ONLY = range(4)


class PeerCore(Opened):
    """The core's side of the peer-memory interface."""

    def __init__(self) -> None:
        super().__init__("/dev/hawk_npu_peer_core")
        self.failed = 0

    def register(self, address: int, nbytes: int, device: int = 0) -> Any:
        argument = Register(addr=address, nbytes=nbytes, device=device)
        try:
            return self.ask(ioctl_number(3, 0, Register, 0xB9), argument)
        finally:
            self.failed = argument.failed

    def deregister(self, ticket: int, order: int = UNMAP_PUT) -> None:
        self.ask(ioctl_number(1, 1, Deregister, 0xB9), Deregister(id=ticket, order=order))

    def write(self, ticket: int, offset: int, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        self._copy(ticket, offset, buffer, 1)

    def read(self, ticket: int, offset: int, nbytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(nbytes)
        self._copy(ticket, offset, buffer, 0)
        return buffer.raw

    def _copy(self, ticket: int, offset: int, buffer: Any, write: int) -> None:
        argument = PeerCopy(
            id=ticket, write=write, offset=offset, nbytes=len(buffer), user=ctypes.addressof(buffer)
        )
        self.ask(ioctl_number(1, 2, PeerCopy, 0xB9), argument)

    def invalidated(self, ticket: int) -> bool:
        return bool(self.ask(ioctl_number(3, 3, PeerStatus, 0xB9), PeerStatus(id=ticket)).invalidated)
