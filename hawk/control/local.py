"""Unix sockets of an agent: their folder, their names, and whether one is still somebody's.

Everything here is for one machine and one user.  A socket file outlives the process that made it, so each path
is guarded by a lock file beside it: the kernel drops the lock when its holder dies, however it dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import weakref
from pathlib import Path

from hawk.errors import ConfigError, ControlError

LONGEST_PATH = 107
"""Bytes of `sun_path` in a Unix socket address, less the final zero."""
SIDECAR_SUFFIX = ".fd"
_LOCK_SUFFIX = ".lock"
_BACKLOG = 128


def socket_path(address: str, *, field: str = "agent.local") -> Path:
    """The path in an `ipc://` address.

    Raises `ConfigError` if it is relative, in the abstract namespace (which knows no permissions), or so long
    that it, or the descriptor socket beside it, fits no Unix socket address.
    """
    path = address.removeprefix("ipc://")
    if path == address or not path.startswith("/"):
        raise ConfigError(
            "a local address is an absolute path",
            field=field,
            got=address,
            expected="ipc:///FOLDER/NAME.sock",
        )
    length = len(os.fsencode(path)) + len(SIDECAR_SUFFIX)
    if length > LONGEST_PATH or "\0" in path:
        raise ConfigError(
            "the path is too long for a Unix socket",
            field=field,
            got=f"{length} bytes, {SIDECAR_SUFFIX} included: {path}",
            expected=f"{LONGEST_PATH} bytes at most",
            hint="Choose a shorter folder or name",
        )
    return Path(path)


def private_folder(folder: Path, *, field: str = "agent.local") -> None:
    """Makes `folder` with mode 0700 (and what is missing above it), or checks the one that is there.

    Raises `ConfigError` if others may write into it, or own it: they could put a socket of theirs in our place.
    """
    try:
        if not folder.parent.exists():
            private_folder(folder.parent, field=field)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(
            f"the folder cannot be used: {error.strerror}",
            field=field,
            got=folder,
            hint="Make it, owned by the agent's user and with mode 0700, or choose another",
        ) from error
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError("this is no folder", field=field, got=folder)
    if mode & 0o022 or status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            "others may write into the folder of the local socket",
            field=field,
            got=f"{folder} with mode {mode:04o}, owner {status.st_uid}",
            expected=f"mode 0700, owner {os.geteuid()}",
            hint="Give the socket a folder of its own, or run chmod on this one",
        )


class LocalListener:
    """A listening Unix socket at `path`, mode 0600, that this process alone holds.  Make it with `listen`."""

    def __init__(self, path: Path, sock: socket.socket, lock: int, inode: tuple[int, int]) -> None:
        self.path = path
        self.socket = sock
        self._lock = lock
        self._inode = inode
        self._given = -1
        _held_here.add(self)

    def give(self) -> int:
        """The descriptor of the socket, for who closes it from now on, and says so by `closing`."""
        self._given = self.socket.detach()
        return self._given

    def closing(self) -> None:
        """The descriptor that was given away is about to be closed, and may be another's soon."""
        self._given = -1

    def _drop_in_child(self) -> None:
        """Closes the child's copies only: the socket listens, and the path is held, for as long as one is open."""
        self.socket.close()
        for descriptor in (self._given, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._given = self._lock = -1

    def hide(self) -> None:
        """Takes the socket's file from its path, so that nobody can connect; raises `OSError`."""
        os.rename(self.path, hidden(self.path))

    def show(self) -> None:
        """Puts the file back; raises `OSError`."""
        os.rename(hidden(self.path), self.path)

    def close(self) -> None:
        """Closes the socket (unless its descriptor was given away), removes its file, lets the path go."""
        self.socket.close()
        if self._lock < 0:
            return
        # The order matters: the file goes while the lock still keeps a successor from making its own.
        for name in (self.path, hidden(self.path)):
            try:
                status = os.lstat(name)
                if (status.st_dev, status.st_ino) == self._inode:
                    os.unlink(name)
            except OSError:
                pass  # it is under the other name, or somebody removed it; the path is free either way
        _unlock(self.path, self._lock)
        self._lock = -1


_held_here: weakref.WeakSet[LocalListener] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # A child that outlives an agent of its parent would keep the next one from the path.
    for listener in list(_held_here):
        with contextlib.suppress(OSError):
            listener._drop_in_child()
    _held_here.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def hidden(path: Path) -> Path:
    """Where the socket's file is while nobody may connect."""
    return path.with_name(f".{path.name}")


def listen(path: Path, kind: socket.SocketKind, *, field: str = "agent.local") -> LocalListener:
    """A listening socket of type `kind` at `path`, in a private folder.

    The file that a dead agent left is replaced.  Raises `ControlError` if a live process listens there, and
    `ConfigError` for a folder that is not private or a file that is no socket.
    """
    private_folder(path.parent, field=field)
    lock = _lock(path, field)
    try:
        _clear(path, field)
        # What a process left that was killed while nobody was let in; its lock was free.
        hidden(path).unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            sock.bind(os.fspath(path))
            # Nobody can connect before `listen`, so there is no moment at which the mode is too wide.
            os.chmod(path, 0o600)
            status = os.lstat(path)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        _unlock(path, lock)
        raise ControlError(
            f"cannot listen at the address: {error.strerror}", field=field, got=path
        ) from error
    except BaseException:
        _unlock(path, lock)
        raise
    return LocalListener(path, sock, lock, (status.st_dev, status.st_ino))


def _in_use(path: Path, field: str) -> ControlError:
    return ControlError(
        "the address is in use by a live process",
        field=field,
        got=path,
        hint="Stop the other agent, or give this one a path of its own",
    )


def _lock(path: Path, field: str) -> int:
    name = f"{path}{_LOCK_SUFFIX}"
    while True:
        try:
            lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot make {name}: {error.strerror}",
                field=field,
                got=_described(path.parent),
                expected=f"a folder of user {os.geteuid()}, mode 0700",
                hint="Give the socket a folder of its own, or leave agent.local out",
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder removes the file before it lets go: what we locked may have no name any more.
            ours, named = os.fstat(lock), os.stat(name)
        except BlockingIOError:
            os.close(lock)
            raise _in_use(path, field) from None
        except FileNotFoundError:
            os.close(lock)
            continue
        if (ours.st_dev, ours.st_ino) == (named.st_dev, named.st_ino):
            return lock
        os.close(lock)


def _described(folder: Path) -> str:
    """A folder, whose it is and with which mode, as far as this can be seen."""
    try:
        status = folder.stat()
    except OSError:
        return str(folder)
    return f"{folder} of user {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"


def _unlock(path: Path, lock: int) -> None:
    # The folder may have been removed under us; the lock itself ends with its descriptor.
    with contextlib.suppress(OSError):
        os.unlink(f"{path}{_LOCK_SUFFIX}")
    os.close(lock)


def _clear(path: Path, field: str) -> None:
    """Removes a socket file that nobody listens at any more."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(
            "there is a file that is no socket, and it is not replaced",
            field=field,
            got=path,
            hint="Move it away, or choose another path",
        )
    # A listener that does not take our lock (not an agent) is told by connecting: only the file of a closed
    # socket refuses.  Another socket type, a full backlog and a lack of rights all mean that someone is there.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        result = probe.connect_ex(os.fspath(path))
    if result not in (errno.ECONNREFUSED, errno.ENOENT):
        raise _in_use(path, field)
    path.unlink(missing_ok=True)
