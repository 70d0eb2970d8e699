"""Mapping a channel of the agent's memory into its client: a memfd, or a device's window by dma-buf."""

from __future__ import annotations

import errno
import fcntl
import os

from hawk.errors import RegistrationFailed
from hawk.memory.mapping import MADV_POPULATE_WRITE, Mapping
from hawk.memory.shared import SharedBuffer, map_fd


def map_window(fd: int, nbytes: int, *, writable: bool = True, name: str = "window") -> SharedBuffer:
    """Maps the first `nbytes` of what an agent handed over; as `map_fd`, and dma-bufs too.

    The bytes of a device stay there for as long as the agent does: a process that touches them after the agent
    has ended may get SIGBUS, which no check beforehand can rule out.  So only what comes from one's own agent is
    mapped by this, never what comes from a client.

    Raises `RegistrationFailed` for a descriptor that is neither, is too small, or cannot be mapped.
    """
    if not is_dmabuf(fd):
        return map_fd(fd, nbytes, writable=writable, name=name)
    size = os.lseek(fd, 0, os.SEEK_END)
    if size < nbytes:
        raise RegistrationFailed(
            "the dma-buf is too small", field=name, got=f"{size} bytes", expected=f"{nbytes} bytes"
        )
    try:
        own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError as e:
        raise RegistrationFailed("the dma-buf cannot be kept", field=name, got=e.strerror) from e
    try:
        mapped = Mapping(own, nbytes, writable)
        problem = mapped.advise(MADV_POPULATE_WRITE)
        if problem not in (0, errno.EINVAL):  # EINVAL: a window without pages; the first touch maps it
            raise OSError(problem, os.strerror(problem))
    except OSError as e:
        os.close(own)
        raise RegistrationFailed("the dma-buf cannot be mapped", field=name, got=e.strerror) from e
    return SharedBuffer(own, mapped, name)


def is_dmabuf(fd: int) -> bool:
    """Whether an open descriptor is a dma-buf."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("/dmabuf:")
    except OSError:
        return False
