"""Registrations and windows of a fake device, and who may read or write by which key."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading

from hawk.transports.verbs import _device
from hawk.transports.verbs._device import VerbsError
from hawk.transports.verbs.testing._faults import refused


class FakeRegistration:
    """See `Registration`; `memory` is where its first byte is in this process."""

    def __init__(
        self, table: Table, address: int, nbytes: int, access: int, memory: int, mapping: mmap.mmap | None
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.access = access
        self.memory = memory
        self._mapping = mapping
        self._table = table
        self.lkey = self.rkey = table.add(self)

    def close(self) -> None:
        """See `Registration.close`; EBUSY where windows are bound to it."""
        with self._table.lock:
            if any(w.memory is self for w in self._table.windows()):
                raise VerbsError(errno.EBUSY, "ibv_dereg_mr")
            self._table.remove(self.rkey)
        self._mapping = None


class FakeWindow:
    """See `Window`; `owner` is the number of the queue pair that it is bound on."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.memory: FakeRegistration | None = None
        self.address = self.nbytes = self.owner = self.access = 0
        self.rkey = table.add(self)

    def close(self) -> None:
        """See `Window.close`."""
        with self._table.lock:
            self.memory = None
            self._table.remove(self.rkey)


class Table:
    """Keys of one device (one protection domain): the upper 24 bits are an index, the lower 8 a variant."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._entries: dict[int, FakeRegistration | FakeWindow] = {}
        self._next = int.from_bytes(os.urandom(2), "little") + 1

    def add(self, entry: FakeRegistration | FakeWindow) -> int:
        """A key for the entry."""
        with self.lock:
            self._next += 1
            self._entries[self._next] = entry
            return (self._next << 8) | os.urandom(1)[0]

    def remove(self, key: int) -> None:
        """Forgets the entry of a key; raises `VerbsError` where there is none."""
        if self._entries.pop(key >> 8, None) is None:
            raise refused("closing what is closed")

    def windows(self) -> list[FakeWindow]:
        """All windows."""
        with self.lock:
            return [e for e in self._entries.values() if isinstance(e, FakeWindow)]

    def __len__(self) -> int:
        with self.lock:
            return len(self._entries)

    def counts(self) -> tuple[int, int]:
        """Registrations and windows that are open."""
        with self.lock:
            windows = len(self.windows())
            return len(self._entries) - windows, windows

    def local(self, key: int, address: int, nbytes: int) -> int | None:
        """Where in this process a piece lies that a READ is to fill; None where `key` does not allow it."""
        with self.lock:
            entry = self._entries.get(key >> 8)
            if not isinstance(entry, FakeRegistration) or entry.lkey != key:
                return None
            if not entry.access & _device.LOCAL_WRITE or not _inside(entry, address, nbytes):
                return None
            return entry.memory + address - entry.address

    def covers(self, key: int, address: int, nbytes: int, queue: int, right: int) -> bool:
        """Whether the other end of queue pair `queue` may read or write (`right`) this range by `key`."""
        return self._memory_of(key, address, nbytes, queue, right) is not None

    def read(self, key: int, address: int, nbytes: int, queue: int) -> bytes | None:
        """Bytes for a remote reader on queue pair `queue`; None where `key` does not allow it.

        Copied under the lock, so that who has taken a key away knows that nobody reads by it.
        """
        with self.lock:
            memory = self._memory_of(key, address, nbytes, queue, _device.REMOTE_READ)
            if memory is None:
                return None
            return ctypes.string_at(memory.memory + address - memory.address, nbytes)

    def write(self, key: int, address: int, data: bytes | bytearray, queue: int) -> bool:
        """Writes for the other end of queue pair `queue`, under the lock; False where `key` does not allow it."""
        with self.lock:
            memory = self._memory_of(key, address, len(data), queue, _device.REMOTE_WRITE)
            if memory is None:
                return False
            ctypes.memmove(memory.memory + address - memory.address, bytes(data), len(data))
            return True

    def local_read(self, key: int, address: int, nbytes: int) -> bytes | None:
        """Bytes of a piece that a WRITE gathers; None where `key` does not allow it."""
        with self.lock:
            entry = self._entries.get(key >> 8)
            if not isinstance(entry, FakeRegistration) or entry.lkey != key:
                return None
            if not _inside(entry, address, nbytes):
                return None
            return ctypes.string_at(entry.memory + address - entry.address, nbytes)

    def _memory_of(
        self, key: int, address: int, nbytes: int, queue: int, right: int
    ) -> FakeRegistration | None:
        with self.lock:
            entry = self._entries.get(key >> 8)
            if entry is None or entry.rkey != key or not _inside(entry, address, nbytes):
                return None
            if isinstance(entry, FakeWindow):
                return entry.memory if entry.owner == queue and entry.access & right else None
            return entry if entry.access & right else None

    def bind(
        self, window: FakeWindow, memory: FakeRegistration, address: int, nbytes: int, queue: int, access: int
    ) -> bool:
        """Binds a fresh window; False where that is not allowed."""
        with self.lock:
            if self._entries.get(window.rkey >> 8) is not window or window.memory is not None or window.owner:
                return False
            if self._entries.get(memory.rkey >> 8) is not memory or not memory.access & _device.BIND:
                return False
            if access & _device.REMOTE_WRITE and not memory.access & _device.LOCAL_WRITE:
                return False
            if not _inside(memory, address, nbytes):
                return False
            window.access = access
            window.memory, window.address, window.nbytes, window.owner = memory, address, nbytes, queue
            window.rkey = next_key(window.rkey)
            return True

    def invalidate(self, key: int, queue: int) -> bool:
        """Takes a window's key away; False where it is none of this queue pair's."""
        with self.lock:
            entry = self._entries.get(key >> 8)
            if not isinstance(entry, FakeWindow) or entry.rkey != key or entry.owner != queue:
                return False
            if entry.memory is None:
                return False
            entry.memory = None
            return True


def next_key(key: int) -> int:
    """The key that a window has once it is bound."""
    return (key & ~0xFF) | ((key + 1) & 0xFF)


def _inside(entry: FakeRegistration | FakeWindow, address: int, nbytes: int) -> bool:
    return entry.address <= address and address + nbytes <= entry.address + entry.nbytes


def map_dmabuf(fd: int, offset: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """A mapping of the file and the place of `offset` in it."""
    try:
        mapping = mmap.mmap(fd, offset + nbytes)
    except (OSError, ValueError) as error:
        raise VerbsError(errno.EINVAL, "ibv_reg_dmabuf_mr") from error
    return mapping, ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + offset
