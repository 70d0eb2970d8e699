"""One writer for each byte of a chip: a lock on that range of the chip's device file, which every process sees.

The kernel keeps such locks by open file and gives them up when that is closed, so also when the process ends, however
it ends; children that it forked close their copy of the file at once.  The device file itself is locked and not one
beside it, for all who can use the chip can open it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from hawk.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hawk.memory.tenstorrent.reservation import Reservation

_FLOCK = "hhqqi4x"
"""`struct flock`: kind, whence, start, length, process."""

TRIES = 8
"""How often a range is asked for that others hold and give up again meanwhile."""


_held: weakref.WeakSet[Claim] = weakref.WeakSet()


class Claim:
    """A range of a chip that no other process, and no other claim of this one, may have; until `close`.

    path   the chip's device file
    field  names the memory in errors

    Raises `InvalidArgument` where another has a part of it, which names the process where this user may know it.
    Where the file cannot be opened nothing is claimed: whoever writes to the chip meets the same, and says so.
    """

    def __init__(self, path: str, reservation: Reservation, field: str) -> None:
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return
        _held.add(self)
        wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, reservation.address, reservation.nbytes, 0)
        taken = ""
        for _ in range(TRIES):
            try:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, wanted)
                return
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    self.close()  # a file that takes no locks
                    return
            taken = self._taken(wanted)
            if taken:
                break
        self.close()
        raise InvalidArgument(
            "another process has a part of this reservation",
            field=f"memory.{field}.address",
            got=f"{reservation.address:#x} to {reservation.end:#x}",
            expected=f"none of {taken or 'what it has'}",
            hint="End it, or reserve anew in the engine and give each agent a range of its own",
        )

    def _taken(self, wanted: bytes) -> str:
        """The range that stands in the way, and who has it; nothing where it was given up meanwhile."""
        kind, _, start, length, _ = struct.unpack(_FLOCK, fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, wanted))
        if kind == fcntl.F_UNLCK:
            return ""
        at = os.fstat(self._fd)
        # A length of 0 is all there is: so locks whoever locks a file.
        end = start + length - 1 if length else "EOF"
        mark = f"{os.major(at.st_dev):02x}:{os.minor(at.st_dev):02x}:{at.st_ino} {start} {end}"
        text = f"{start:#x} to " + (f"{start + length:#x}" if length else "the end")
        holders = sorted(set(_holders(mark)))
        return f"{text}, which {' and '.join(holders)} has" if holders else text

    def close(self) -> None:
        """Gives the range up.  Safe to call twice."""
        if self._fd >= 0:
            # A child that is being forked may not have closed its copy yet.
            with contextlib.suppress(OSError):
                fcntl.fcntl(
                    self._fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
                )
        self.forget()

    def forget(self) -> None:
        """Closes this process' copy of the file, which gives nothing up that another process has with it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _after_fork_in_child() -> None:
    for claim in list(_held):
        claim.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _holders(mark: str) -> Iterator[str]:
    """Processes with a lock that is written so, of those that this user may look into."""
    for fdinfo in Path("/proc").glob("[0-9]*/fdinfo"):
        with contextlib.suppress(OSError):
            for file in fdinfo.iterdir():
                with contextlib.suppress(OSError):
                    lines = file.read_text().splitlines()
                    if any(line.startswith("lock:") and line.endswith(mark) for line in lines):
                        name = (fdinfo.parent / "comm").read_text().strip()
                        yield f"process {fdinfo.parent.name} ({name})"
                        break
