"""Reading small ranges without a word to the server: a board of grants, and a page for each reader's place.

Asking the server before and after a read costs four turns of threads, which for a small range is many times the copy.
So the server keeps a board that readers see, and gives each link a page of its own that it sees in turn.  A reader
writes into its page which grant it is in, looks whether that stands on the board, copies, and looks again; a revoke
takes the slot down and then looks at the pages (`hawk/retile/_guard.h` has the order of it).  The promise is the one
that the messages keep: who has not left is seen, and what was read under a grant that ended does not count.  What a
reader writes for a grant follows from its key and is not on the board, so nobody can hold up a grant that is not its.

It needs the C core on both sides, for the order of those steps; without it readers ask, as those of older versions do.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.errors import HawkError
from hawk.memory.shared import recv_fds
from hawk.transports._forks import ends_with_process
from hawk.transports._grants import KEY_BYTES
from hawk.transports.shm import _wire
from hawk.transports.shm._mapping import Mapping

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.memory.region import I64, Segments

SLOTS = 4096
"""Grants that readers can look up at a time; others are asked for."""

BOARD_BYTES = SLOTS * 24
PAGE_BYTES = 4096
_NONE = 0xFFFF

MOST_BYTES = 128 << 10
"""A copy of that size takes less time than waking a thread for it, and holds up a loop no longer."""

MOST_ROWS = 1024


def core() -> Any:
    """The C core where it is in use, else None."""
    try:
        native = importlib.import_module("hawk.retile.native")
    except ImportError:
        return None
    found = native.planner()
    return found if hasattr(found, "copy_guarded") else None


def _state(key: bytes) -> int:
    """What stands on the board for a key, which it does not tell: never 0."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) or 1


def mark(key: bytes) -> int:
    """What a reader writes into its page while it is in the grant of a key, and only its holders know: never 0."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"hawk-shm-inside").digest()) or 1


class Words:
    """Some words of a memfd, `uint64[n]`, mapped as `array` until nobody holds that any more."""

    def __init__(self, fd: int, nbytes: int, *, writable: bool = True) -> None:
        """Maps the descriptor, which stays the caller's.  Raises `OSError` unless that is safe."""
        self.array: NDArray[np.uint64] = np.asarray(Mapping(fd, 0, nbytes, writable=writable)).view(np.uint64)

    @classmethod
    def make(cls, nbytes: int, name: str) -> tuple[Words, int]:
        """Fresh ones, and their descriptor, which is the caller's to close.  Raises `OSError`."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd, nbytes), fd
        except BaseException:
            os.close(fd)
            raise


class Board:
    """The server's side; `pages` are those of readers that may be inside of something, `fd` is the board's memfd.

    Made on the event loop, which posts and takes down; pages come and go with the serving thread's connections, each
    by one step that needs no lock.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._words, self.fd = Words.make(BOARD_BYTES, "shm-board")
        self._free = list(range(SLOTS))
        self._marks = [0] * SLOTS
        self.pages: dict[object, Words] = {}

    def key(self) -> tuple[bytes, int]:
        """A fresh key and its slot, -1 where none is free."""
        slot = self._free.pop() if self._free else -1
        tail = _NONE if slot < 0 else slot
        return secrets.token_bytes(KEY_BYTES - 2) + tail.to_bytes(2), slot

    def post(self, key: bytes, slot: int, low: int, high: int) -> None:
        """The grant of `[low, high)` stands from now on."""
        self._marks[slot] = mark(key)
        self._core.post_guard(self._words.array, slot, _state(key), low, high)

    def take_down(self, slot: int) -> None:
        """Nobody comes in by this slot any more; who is inside is seen by `inside` from now on."""
        self._core.post_guard(self._words.array, slot, 0, 0, 0)

    def inside(self, slot: int) -> bool:
        """Whether a reader has not left the slot."""
        word = self._marks[slot]
        return any(int(page.array[0]) == word for page in list(self.pages.values()))

    def free(self, slot: int) -> None:
        """The slot was taken down and nobody is inside."""
        self._free.append(slot)

    def admit(self, guest: object) -> int:
        """A page for a reader: its descriptor, which is the caller's to close.  Raises `OSError`."""
        self.pages[guest], fd = Words.make(PAGE_BYTES, "shm-page")
        return fd

    def gone(self, guest: object) -> None:
        """The reader has closed its connection, or died: it is inside of nothing any more."""
        self.pages.pop(guest, None)

    def close(self) -> None:
        """Shows itself to nobody any more; every slot was taken down before, and who is inside is seen as ever."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Pass:
    """The reader's side: copies what stands on the board, in the calling thread and without waiting."""

    def __init__(self, sock: socket.socket, board: Words, page: Words, core: Any) -> None:
        self._sock = sock
        self._board, self._page = board, page
        self._core = core

    @classmethod
    def open(cls, sock: socket.socket, path: str, token: bytes, timeout: float) -> Pass | None:
        """A pass from the server at `path`; None where it gives none, for whatever reason.

        sock    a fresh one, which is the pass's from here on, or closed; whoever shuts it down ends the wait
        """
        made = core()
        deadline = time.monotonic() + timeout
        with contextlib.ExitStack() as stack:
            stack.enter_context(sock)
            if made is None:
                return None
            fds: list[int] = []
            try:
                ends_with_process(sock)
                sock.settimeout(timeout)
                sock.connect(path)
                sock.sendall(_wire.HELLO.pack(_wire.HELLO_MAGIC, _wire.BOARD_VERSION, token))
                sock.settimeout(max(deadline - time.monotonic(), 0.001))
                message, fds = recv_fds(sock, _wire.LARGEST, 4)
                if len(message) != _wire.VERDICT.size or len(fds) != 2:
                    return None
                board = Words(fds[0], BOARD_BYTES, writable=False)
                page = Words(fds[1], PAGE_BYTES)
            except (OSError, ValueError, HawkError):
                return None
            finally:
                for fd in fds:
                    os.close(fd)
            stack.pop_all()
        return cls(sock, board, page, made)

    def read(self, key: bytes, segments: Segments, bases: I64, mapping: Mapping) -> bool:
        """Copies the segments; False if the grant does not stand, or did not until the end, whatever was copied."""
        slot = int.from_bytes(key[-2:])
        if slot >= SLOTS:
            return False
        copied: bool = self._core.copy_guarded(
            self._page.array,
            self._board.array,
            slot,
            _state(key),
            mark(key),
            bases,
            segments.region,
            segments.local,
            mapping.address,
            mapping.nbytes,
            segments.remote,
            segments.nbytes,
        )
        return copied

    def close(self) -> None:
        """Ends the connection, by which the server knows that nobody is inside."""
        self._sock.close()
