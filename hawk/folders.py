"""Temporary folders that outlive no crash for long: the next process that makes one removes those of the dead.

A folder's owner holds a lock on the folder itself, which the kernel drops when the owner dies, however it dies.
A sweep removes only what it could lock, so the living keep theirs; and who makes a folder looks, once it holds
the lock, whether a sweep was quicker.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType


class TemporaryFolder:
    """A fresh folder with mode 0700, `BASE/PREFIXxxxxxxxx`; leaving the block, or `close`, removes it.

    `prefix` is of one kind of folder alone: those of the same kind and user whose owners died are removed first.
    `base` None is the system's folder for temporary files.  Raises `OSError`.
    """

    def __init__(self, prefix: str, base: str | Path | None = None) -> None:
        base = Path(base or tempfile.gettempdir())
        sweep(prefix, base)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
            try:
                self._lock = _locked(self.path)
            except OSError:
                # A file system without locks: the folder serves all the same, and no sweep can take it for dead.
                if self.path.is_dir():
                    self._lock = -1
                    return
                continue
            if self._lock >= 0:
                return
            # A sweep saw the folder before it had an owner, and takes it away.

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the folder and all in it.  Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def sweep(prefix: str, base: Path) -> None:
    """Removes this user's folders `BASE/PREFIX*` that no living process owns; what cannot be removed stays."""
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_if_dead(Path(entry.path))


def _remove_if_dead(folder: Path) -> None:
    if folder.lstat().st_uid != os.geteuid():
        return
    lock = _locked(folder)
    if lock < 0:
        return
    try:
        # Whoever listens there lives, with or without a lock: say, what the owner had started.
        if not any(_listens(path) for path in folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _locked(folder: Path) -> int:
    """The locked folder's descriptor; -1 if another holds it or it is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours, named = os.fstat(lock), folder.lstat()
        if (ours.st_dev, ours.st_ino) == (named.st_dev, named.st_ino):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return -1


def _listens(path: Path) -> bool:
    """Whether a process listens at the Unix socket `path`: only the file of a closed one refuses."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        return probe.connect_ex(os.fspath(path)) not in (errno.ECONNREFUSED, errno.ENOENT)
