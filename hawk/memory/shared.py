"""Memory that two processes can share: a sealed memfd, mapped, with every page there before it is used.

`alloc` is what a client of HAWK calls for a cache that its agent shall reach; `map_fd` is how the agent maps
what came over a Unix socket.  Both promise the same: whatever can go wrong with the pages goes wrong there, as
a typed error, and not later as a SIGBUS in the middle of a copy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import socket
import stat
from array import array
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import BadFrame, HawkMemoryError, InvalidArgument, OutOfMemory, RegistrationFailed
from hawk.memory.available import available_memory
from hawk.memory.mapping import MADV_POPULATE_READ, MADV_POPULATE_WRITE, Mapping
from hawk.memory.region import Region
from hawk.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from hawk.memory.region import U8

HEADROOM = 32 << 20
"""Bytes that an allocation leaves to everything else; taking the last page is how a process gets killed."""

MAX_FDS = 64
"""Descriptors that one message may carry; the kernel's own bound is 253."""

_MFD_NOEXEC_SEAL = 0x0008
"""A Linux number that Python 3.11 has no name for (include/uapi/linux/memfd.h)."""

_FD_BYTES = array("i").itemsize
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LACK = frozenset({errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EDQUOT})


class SharedBuffer:
    """Shared bytes: a numpy array over a mapped memfd, and its descriptor to pass on.

    array   `uint8[nbytes]`
    fd      the memfd, owned by this buffer

    `close` closes the descriptor at once and drops this object's hold on the mapping.  Arrays that the caller
    still has stay valid: the pages are unmapped when the last of them is gone, so closing early can neither
    crash nor leak.  Another process that mapped the descriptor keeps its own mapping in the same way.

    A buffer that is not closed but forgotten lives on in its arrays, descriptor included: they can be registered.
    """

    def __init__(self, fd: int, mapping: Mapping, name: str) -> None:
        self.name = name
        self.nbytes = mapping.nbytes
        self._mapping: Mapping | None = mapping
        self._array: U8 | None = np.asarray(mapping)
        mapping.keep(fd)

    @property
    def array(self) -> U8:
        """The bytes, `uint8[nbytes]`.  Raises `InvalidArgument` once closed."""
        if self._array is None:
            raise InvalidArgument("the shared buffer is closed", field=self.name)
        return self._array

    @property
    def fd(self) -> int:
        """The memfd.  Raises `InvalidArgument` once closed."""
        if self._mapping is None:
            raise InvalidArgument("the shared buffer is closed", field=self.name)
        return self._mapping.fd

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._mapping is None

    def region(self, name: str | None = None) -> Region:
        """The whole buffer as a `Region`; it stays readable while it is held, closed buffer or not."""
        return Region(name=name or self.name, array=self.array, fd=self.fd)

    def close(self) -> None:
        """Closes the descriptor and lets go of the mapping.  Safe to call twice."""
        mapping, self._mapping, self._array = self._mapping, None, None
        if mapping is not None:
            mapping.drop_fd()

    def __enter__(self) -> SharedBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"fd={self.fd}"
        return f"SharedBuffer({self.name!r}, nbytes={self.nbytes}, {state})"


def alloc(nbytes: int, *, name: str = "hawk", huge_pages: bool = False) -> SharedBuffer:
    """Allocates `nbytes` of zeroed shared memory, every page of it there and none of it able to go away.

    The memfd cannot shrink, grow or lose these seals.  `huge_pages` hints the kernel to use huge pages; off by
    default, since compacting memory for them can stall the allocation.  Blocking: a GiB can take a second.

    Raises
    ------
    OutOfMemory
        the machine or the control group has not that much left; nothing was allocated.
    InvalidArgument
        `nbytes` is no positive integer.
    """
    nbytes = _positive(nbytes, "nbytes")
    require_memory(nbytes, name)
    fd = -1
    try:
        fd = _memfd(name)
        # ftruncate first: under strict overcommit it refuses at once what fallocate would fill page by page.
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        mapping = Mapping(fd, nbytes, writable=True)
        if huge_pages:
            mapping.advise(mmap.MADV_HUGEPAGE)  # a hint; kernels without it say EINVAL
        problem = mapping.advise(MADV_POPULATE_WRITE)
        if problem == errno.EINVAL:  # before Linux 5.14
            np.asarray(mapping)[:: mmap.PAGESIZE] = 0
        elif problem:
            raise OSError(problem, os.strerror(problem))
    except OSError as e:
        if fd >= 0:
            os.close(fd)
        if e.errno in _LACK or e.errno in (errno.EFAULT, errno.EAGAIN):
            raise _out_of_memory(nbytes, name, e.strerror or str(e)) from e
        raise HawkMemoryError(
            "the system refused shared memory",
            field=name,
            got=e.strerror,
            hint="Look at the limits on open files and on memfd in this container" if fd < 0 else None,
        ) from e
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return SharedBuffer(fd, mapping, name)


def require_memory(nbytes: int, name: str) -> None:
    """Raises `OutOfMemory` unless `nbytes` and some headroom are available to this process now."""
    if nbytes > available_memory() - HEADROOM:
        raise _out_of_memory(nbytes, name, "not enough memory is available")


def _out_of_memory(nbytes: int, name: str, why: str) -> OutOfMemory:
    return OutOfMemory(
        f"cannot allocate {approximate_size(nbytes)} of shared memory: {why}",
        field=name,
        asked=nbytes,
        available=available_memory(),
        headroom=HEADROOM,
        hint="Ask for less, free memory, or raise the container's memory limit",
    )


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    label = name.replace("\0", "")[:200]
    try:
        # Systems that forbid executable memfds accept only this; kernels before 6.3 do not know it.
        return os.memfd_create(label, flags | _MFD_NOEXEC_SEAL)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return os.memfd_create(label, flags)


def map_fd(fd: int, nbytes: int, *, writable: bool = True, name: str = "mapped") -> SharedBuffer:
    """Maps the first `nbytes` of a memfd that another process made, after checking that touching it is safe.

    The descriptor stays the caller's; the buffer holds a duplicate of its own.  Blocking: it maps all pages.

    Raises
    ------
    RegistrationFailed
        the descriptor is no memfd, is smaller than `nbytes`, can be shrunk by whoever holds it, has pages that
        were never allocated, or does not allow the access asked for.  Touching it could raise SIGBUS.
    InvalidArgument
        `nbytes` is no positive integer.
    """
    nbytes = _positive(nbytes, "nbytes")
    try:
        own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    except (OSError, ValueError, TypeError, OverflowError) as e:
        raise _refused(name, "the descriptor is not open", got=fd) from e
    try:
        _validate(own, nbytes, writable, name)
        try:
            mapping = Mapping(own, nbytes, writable)
        except OSError as e:
            raise _refused(name, "the descriptor cannot be mapped", got=e.strerror) from e
        problem = mapping.advise(MADV_POPULATE_WRITE if writable else MADV_POPULATE_READ)
        if problem not in (0, errno.EINVAL):  # EINVAL: before Linux 5.14, where the first touch maps them
            raise _refused(name, "its pages cannot be mapped", got=os.strerror(problem))
    except BaseException:
        os.close(own)
        raise
    return SharedBuffer(own, mapping, name)


def _validate(fd: int, nbytes: int, writable: bool, name: str) -> None:
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        raise _refused(name, "the descriptor is no memfd", got=stat.filemode(mode))
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as e:
        raise _refused(name, "the descriptor is a file that cannot be sealed, not a memfd") from e
    if not seals & fcntl.F_SEAL_SHRINK:
        raise _refused(
            name,
            "the memfd can be shrunk while it is in use",
            got=f"seals {seals:#x}",
            expected=f"F_SEAL_SHRINK ({fcntl.F_SEAL_SHRINK:#x}) set",
        )
    info = os.fstat(fd)  # only now that the size can no longer fall
    if info.st_size < nbytes:
        raise _refused(
            name, "the memfd is too small", got=f"{info.st_size} bytes", expected=f"{nbytes} bytes"
        )
    if info.st_blocks * 512 < nbytes:
        raise _refused(
            name,
            "pages of the memfd were never allocated",
            got=f"{info.st_blocks * 512} bytes allocated",
            expected=f"{nbytes} bytes",
        )
    if writable and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise _refused(
            name, "the descriptor does not allow writing", expected="a descriptor opened read-write"
        )


def _refused(name: str, why: str, got: object = None, expected: object = None) -> RegistrationFailed:
    return RegistrationFailed(
        why,
        field=name,
        got=got,
        expected=expected,
        hint="Allocate the memory with hawk.alloc, which seals and fills it",
    )


def send_fds(sock: socket.socket, payload: bytes, fds: Sequence[int]) -> None:
    """Sends `payload` with descriptors beside it in one message over a Unix socket.

    `payload` must not be empty: a stream socket carries descriptors only with a byte.  A stream socket that
    takes only a part of the payload has taken all descriptors; the rest of the payload follows without any.
    """
    if not payload:
        raise InvalidArgument("descriptors need at least one byte to travel with", field="payload")
    if len(fds) > MAX_FDS:
        raise InvalidArgument(
            "too many descriptors in one message", field="fds", got=len(fds), expected=f"at most {MAX_FDS}"
        )
    sent = socket.send_fds(sock, [payload], list(fds))
    if sent < len(payload):
        sock.sendall(payload[sent:])


def recv_fds(sock: socket.socket, max_bytes: int, max_fds: int = MAX_FDS) -> tuple[bytes, list[int]]:
    """Receives one message of at most `max_bytes` with at most `max_fds` descriptors.

    Returns the payload (empty at end of file) and the descriptors, which are the caller's and close on exec.
    Raises `BadFrame` when the peer sent more than allowed; every descriptor that came is closed then.
    """
    max_fds = min(max_fds, MAX_FDS)
    # Not socket.recv_fds: it drops its flags argument, and the descriptors would leak into child processes.
    payload, ancillary, flags, _ = sock.recvmsg(
        max_bytes, socket.CMSG_LEN(max_fds * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
    )
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += array("i", data[: len(data) // _FD_BYTES * _FD_BYTES])
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(fds) > max_fds:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        what = "descriptors" if flags & socket.MSG_CTRUNC else "bytes"
        raise BadFrame(
            f"a message carries too many {what}", expected=f"at most {max_bytes} bytes, {max_fds} descriptors"
        )
    return payload, fds


def _positive(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value <= 0:
        raise InvalidArgument(
            "not a size in bytes", field=what, got=repr(value), expected="a positive integer"
        )
    return int(value)
