"""Which descriptors this process has open, so that a test can name those that were left behind."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import select
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def descriptors() -> dict[int, str]:
    """What each open descriptor is, as the system says it: `"/path"`, `"socket:[17]"`, `"anon_inode:[eventpoll]"`.

    What nobody refers to any more is collected before: what other code left must not go between two looks.
    """
    gc.collect()
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one by which the folder was read
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def fresh(before: Mapping[int, str], after: Mapping[int, str]) -> list[str]:
    """A line for each descriptor that was not there before: its number, what it is, and the socket or file that has it.

    A mapping by Python's `mmap` has a copy of the descriptor it was made of, which goes with the last array over it.
    """
    owners = {
        each.fileno(): repr(each)
        for each in gc.get_objects()
        if issubclass(type(each), socket.socket | io.FileIO | select.epoll) and not _closed(each)
    }
    return [
        f"{fd} {what} {owners.get(fd, '')}".rstrip()
        for fd, what in sorted(after.items())
        if before.get(fd) != what
    ]


def _closed(each: socket.socket | io.FileIO | select.epoll) -> bool:
    return each.fileno() < 0 if isinstance(each, socket.socket) else each.closed
