"""Mapping memory whose descriptor comes over a Unix socket, off the event loop."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Protocol

from hawk.memory.shared import SharedBuffer, map_fd

if TYPE_CHECKING:
    from collections.abc import Callable


class Descriptors(Protocol):
    """Where descriptors come from, each with a tag."""

    async def receive_fd(self, tag: bytes, timeout: float) -> int:
        """The descriptor that came, or comes, with `tag`; the caller closes it."""


class Mapper(Protocol):
    """`map_fd`, or another way with its parameters."""

    def __call__(self, fd: int, nbytes: int, *, writable: bool, name: str) -> SharedBuffer:
        """Maps the first `nbytes` of a descriptor that stays the caller's."""


async def map_received(
    source: Descriptors,
    tag: bytes,
    nbytes: int,
    *,
    name: str,
    timeout: float,
    writable: bool = True,
    mapper: Mapper = map_fd,
) -> SharedBuffer:
    """Maps the memory whose descriptor has `tag`; raises what `receive_fd` and `mapper` raise.

    Mapping touches every page, so a thread does it.  A cancelled wait leaves nothing open.
    """
    fd = await source.receive_fd(tag, timeout)
    mapping = asyncio.get_running_loop().run_in_executor(
        None, lambda: mapper(fd, nbytes, writable=writable, name=name)
    )
    # The thread uses the descriptor until it ends, whether or not somebody still waits for it.
    mapping.add_done_callback(_closing(fd))
    return await asyncio.shield(mapping)


def _closing(fd: int) -> Callable[[asyncio.Future[SharedBuffer]], None]:
    def close(done: asyncio.Future[SharedBuffer]) -> None:
        os.close(fd)
        if not done.cancelled():
            done.exception()  # told to whoever waits; nobody may

    return close
