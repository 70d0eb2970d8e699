import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hawk.control import local
from hawk.control.local import listen, private_folder, socket_path
from hawk.errors import ConfigError, ControlError

STREAM = socket.SOCK_STREAM


def test_the_folder_is_made_private_with_all_above_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_can_write_into_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="others may write"):
        listen(folder / "s", STREAM)
    assert not list(folder.iterdir())


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="no folder"):
        private_folder(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be used"):
        private_folder(tmp_path / "file" / "below")


def test_addresses_of_local_sockets() -> None:
    assert socket_path("ipc:///run/hawk/d0.sock") == Path("/run/hawk/d0.sock")
    for bad in ("ipc://relative", "ipc://@abstract", "/run/x", "ipc://"):
        with pytest.raises(ConfigError, match="absolute path"):
            socket_path(bad)
    # 107 bytes fit a socket address, and ".fd" must fit as well.
    assert socket_path("ipc:///" + "x" * 103)
    with pytest.raises(ConfigError, match=r"108 bytes.*107 bytes at most"):
        socket_path("ipc:///" + "x" * 104)
    with pytest.raises(ConfigError, match="too long"):
        socket_path("ipc:///" + "ä" * 60)  # bytes count, not characters


def test_a_path_is_held_by_one_and_free_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = listen(path, STREAM)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ControlError, match="in use"):
        listen(path, STREAM)
    first.close()
    first.close()
    assert not list(tmp_path.iterdir())
    listen(path, STREAM).close()


def test_the_file_of_a_killed_agent_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    code = (
        "import os, pathlib, socket, sys\n"
        "from hawk.control.local import listen\n"
        "held = listen(pathlib.Path(sys.argv[1]), socket.SOCK_STREAM)\n"
        "print('up', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        with pytest.raises(ControlError, match="in use"):
            listen(path, STREAM)
        child.kill()
        child.wait()
    assert path.exists()
    held = listen(path, STREAM)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    held.close()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_live_listener_that_takes_no_lock_is_left_alone(tmp_path: Path, kind: socket.SocketKind) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ControlError, match="in use"):
            listen(path, STREAM)
        assert path.exists()
    listen(path, STREAM).close()


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        listen(path, STREAM)
    assert path.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]


def test_a_folder_that_is_another_users_is_named_with_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(local.os, "open", refused)
    with pytest.raises(ConfigError, match=r"leave agent\.local out") as caught:
        listen(tmp_path / "s", STREAM)
    assert f"of user {os.geteuid()}, mode 0700" in str(caught.value)


def test_closing_leaves_a_successors_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    held = listen(path, STREAM)
    path.unlink()
    path.write_text("another's")
    held.close()
    assert path.read_text() == "another's"


def test_a_forked_child_does_not_hold_its_dead_parents_path(tmp_path: Path) -> None:
    path = tmp_path / "s"
    code = (
        "import os, pathlib, signal, socket, sys\n"
        "from hawk.control.local import listen\n"
        "held = listen(pathlib.Path(sys.argv[1]), socket.SOCK_STREAM)\n"
        "given = held.give() if sys.argv[2] == 'given' else -1\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    print(os.getpid(), flush=True)\n"  # by the child: then it has let go of what it must not hold
        "signal.pause()\n"
    )
    for way in ("given", "kept"):
        with subprocess.Popen([sys.executable, "-c", code, str(path), way], stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            forked = int(parent.stdout.readline())
            try:
                with pytest.raises(ControlError, match="in use"):
                    listen(path, STREAM)
                parent.kill()
                parent.wait()
                listen(path, STREAM).close()
            finally:
                os.kill(forked, signal.SIGKILL)
