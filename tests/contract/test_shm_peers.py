"""What shm lets a peer have, and how it knows that a reader has left."""

import asyncio
import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import socket
import stat
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from hawk.errors import AccessDenied, InvalidArgument, PeerUnreachable, TransportError
from hawk.memory.region import Region, Segments
from hawk.transports.base import Grant
from hawk.transports.shm import ShmConfig, ShmTransport, _wire
from hawk.transports.testing import Gate, SharedArena, Targets

ARENA = 1 << 20
SEGMENTS = Segments.of([(0, 0, 100, 5000)])
QUICK = ShmConfig(grace=0.1)


@contextlib.asynccontextmanager
async def serving(config: ShmConfig = QUICK) -> AsyncIterator[tuple[ShmTransport, Grant, SharedArena]]:
    arena, transport = SharedArena(ARENA), ShmTransport(config)
    await transport.start()
    try:
        transport.serve(arena.region)
        yield transport, transport.grant(0, ARENA), arena
    finally:
        await transport.close()
        arena.close()


@contextlib.contextmanager
def raw(transport: ShmTransport) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(20)
        sock.connect(transport.endpoint["path"])
        yield sock


def hello(transport: ShmTransport) -> bytes:
    return _wire.HELLO.pack(_wire.HELLO_MAGIC, _wire.VERSION, bytes.fromhex(transport.endpoint["token"]))


def greet(transport: ShmTransport, sock: socket.socket) -> int:
    """Says hello; the arena's descriptor."""
    sock.send(hello(transport))
    message, fds, _, _ = socket.recv_fds(sock, 64, 4)
    assert _wire.MAPPING.unpack(message) == (_wire.OK, 0, ARENA)
    (fd,) = fds
    return fd


def ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(64) == b""
    except ConnectionResetError:
        return True


async def still_serves(transport: ShmTransport, grant: Grant) -> None:
    reader = ShmTransport()
    link = await reader.connect(transport.endpoint, timeout=20)
    targets = Targets([5000])
    await link.read(grant.key, SEGMENTS, targets.regions, timeout=20)
    region = transport._grants.region
    assert region is not None
    targets.check(SEGMENTS, region.array)
    await reader.close()


async def test_the_arena_comes_read_only() -> None:
    async with serving() as (transport, _, arena):
        with raw(transport) as sock:
            fd = greet(transport, sock)
            try:
                assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
                with pytest.raises(PermissionError):
                    mmap.mmap(fd, ARENA)
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.pwrite(fd, b"x", 0)
                view = mmap.mmap(fd, ARENA, prot=mmap.PROT_READ)
                assert view[:100] == bytes(arena.region.array[:100])
                view.close()
            finally:
                os.close(fd)


@pytest.mark.parametrize("junk", [b"junk", bytes(28), bytes(64), b"GET / HTTP/1.1\r\n\r\n", None])
async def test_who_does_not_say_hello_gets_no_descriptor(junk: bytes | None) -> None:
    async with serving(ShmConfig(handshake_timeout=0.2)) as (transport, grant, _):
        with raw(transport) as sock:
            if junk is not None:
                sock.send(junk)
            message, fds = b"", []
            with contextlib.suppress(ConnectionResetError):
                message, fds, _, _ = socket.recv_fds(sock, 64, 4)
            assert message == b""
            assert fds == []
        await still_serves(transport, grant)


async def test_junk_after_the_hello_ends_the_connection() -> None:
    async with serving() as (transport, grant, _):
        for junk in (b"x", bytes(_wire.REQUEST.size), _wire.REQUEST.pack(_wire.LEAVE, 0, 0, bytes(32))):
            with raw(transport) as sock:
                os.close(greet(transport, sock))
                sock.send(junk)
                assert ended(sock)
        await still_serves(transport, grant)


async def test_a_reader_inside_holds_the_range_until_it_leaves_or_dies() -> None:
    async with serving() as (transport, grant, _):
        other = transport.grant(0, ARENA)
        with raw(transport) as sock:
            os.close(greet(transport, sock))
            sock.send(_wire.REQUEST.pack(_wire.ENTER, 0, 4096, grant.key))
            assert sock.recv(64) == _wire.VERDICT.pack(_wire.OK)
            assert await transport.revoke(other), "it is inside another one"
            assert not await transport.revoke(grant)
            sock.send(b"junk is no goodbye")
            assert not await transport.revoke(grant)
            sock.send(_wire.REQUEST.pack(_wire.LEAVE, 0, 0, bytes(32)))
            assert sock.recv(64) == _wire.VERDICT.pack(_wire.DENIED)
            assert await transport.revoke(grant)

            third = transport.grant(0, ARENA)
            sock.send(_wire.REQUEST.pack(_wire.ENTER, 0, 4096, third.key))
            assert sock.recv(64) == _wire.VERDICT.pack(_wire.OK)
            revoking = asyncio.get_running_loop().create_task(transport.revoke(third))
            await asyncio.sleep(0)
        assert await revoking, "its connection has ended"


async def test_hanging_up_on_a_reader_is_no_proof_that_it_left() -> None:
    async with serving() as (transport, grant, _):
        with raw(transport) as sock:
            os.close(greet(transport, sock))
            sock.send(_wire.REQUEST.pack(_wire.ENTER, 0, 4096, grant.key))
            assert sock.recv(64) == _wire.VERDICT.pack(_wire.OK)
            await transport.close()
            assert ended(sock)
            assert not await transport.revoke(grant)


async def test_only_so_many_connections() -> None:
    async with serving(ShmConfig(max_connections=2)) as (transport, _, _):
        with raw(transport) as one, raw(transport) as two:
            os.close(greet(transport, one))
            os.close(greet(transport, two))
            reader = ShmTransport()
            with pytest.raises(PeerUnreachable):
                await reader.connect(transport.endpoint, timeout=20)
            await reader.close()


async def test_only_sealed_shared_memory_is_served() -> None:
    transport = ShmTransport()
    with pytest.raises(InvalidArgument, match=r"region\.fd"):
        transport.serve(Region("private", np.zeros(4096, np.uint8)))
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(InvalidArgument, match="sealed"):
        transport.serve(Region("unsealed", np.zeros(4096, np.uint8), fd=fd))
    os.close(fd)


async def test_an_arena_that_begins_inside_its_memfd() -> None:
    whole = SharedArena(ARENA)
    transport, reader = ShmTransport(), ShmTransport()
    await transport.start()
    at = 4096 + 512
    transport.serve(Region("inner", whole.region.array[at : at + 8192], fd=whole.fd, fd_offset=at))
    grant = transport.grant(0, 8192)
    link = await reader.connect(transport.endpoint, timeout=20)
    targets = Targets([8192])
    segments = Segments.of([(0, 0, 0, 8192)])
    await link.read(grant.key, segments, targets.regions, timeout=20)
    targets.check(segments, whole.region.array[at : at + 8192])
    await reader.close()
    await transport.close()
    whole.close()


async def test_the_folder_is_private_and_goes_with_the_transport(short_path: Path) -> None:
    async with serving() as (transport, _, _):
        folder = Path(transport.endpoint["path"]).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert transport.endpoint["token"] not in transport.endpoint["path"]
    assert not folder.exists()
    async with serving(ShmConfig(directory=str(short_path / "mine"))) as (transport, grant, _):
        socket_file = Path(transport.endpoint["path"])
        assert socket_file.parent == short_path / "mine"
        assert stat.S_IMODE(socket_file.parent.stat().st_mode) == 0o700
        await still_serves(transport, grant)
    assert not list((short_path / "mine").iterdir())


async def test_what_a_killed_process_left_goes_and_what_the_living_have_stays(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    left = short_path / "hawk-shm-left"
    left.mkdir(0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(left / "0.sock"))
    async with serving() as (transport, grant, _):
        folder = Path(transport.endpoint["path"]).parent
        assert os.listdir(short_path) == [folder.name]
        async with serving() as (other, _, _):
            assert Path(other.endpoint["path"]).parent.parent == short_path
            await still_serves(transport, grant)
    assert not os.listdir(short_path)


async def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    transport = ShmTransport(ShmConfig(directory=str(tmp_path / "open")))
    with pytest.raises(TransportError, match="not private"):
        await transport.start()
    await transport.close()


async def test_a_path_too_long_for_a_socket_is_named(tmp_path: Path) -> None:
    transport = ShmTransport(ShmConfig(directory=str(tmp_path / ("x" * 90))))
    with pytest.raises(TransportError, match="too long"):
        await transport.start()
    await transport.close()


async def test_who_is_not_reachable_and_why() -> None:
    async with serving() as (transport, _, _):
        endpoint = transport.endpoint
        assert transport.reachable(endpoint).ok
        assert "another host" in transport.reachable({**endpoint, "boot": "x"}).reason
        assert "user" in transport.reachable({**endpoint, "uid": "12345"}).reason
        gone = {**endpoint, "mounts": "x", "path": "/nowhere/at.sock"}
        assert "container" in transport.reachable(gone).reason


_SETRESUID = {"x86_64": 117, "aarch64": 147}
NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.skipif(
    platform.machine() not in _SETRESUID, reason="knows no system call number of this machine"
)
async def test_another_user_gets_nothing() -> None:
    async with serving(ShmConfig()) as (transport, grant, _):
        found: dict[str, object] = {}

        def try_it() -> None:
            # The system call itself changes this thread alone; the thread ends with it.
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.syscall(_SETRESUID[platform.machine()], NOBODY, NOBODY, NOBODY) == 0
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.settimeout(20)
                try:
                    sock.connect(transport.endpoint["path"])
                    sock.send(hello(transport))
                    found["message"], found["fds"], _, _ = socket.recv_fds(sock, 64, 4)
                except OSError as error:
                    found["error"] = error

        async def attempt() -> None:
            found.clear()
            loop, over = asyncio.get_running_loop(), asyncio.Event()

            def run() -> None:
                try:
                    try_it()
                finally:
                    loop.call_soon_threadsafe(over.set)

            thread = threading.Thread(target=run)
            thread.start()
            await over.wait()
            thread.join()

        await attempt()
        assert isinstance(found["error"], PermissionError), "the folder lets another user in"
        # Even where the folder and the socket are open to all, the server looks at who is calling.
        path = transport.endpoint["path"]
        os.chmod(path, 0o666)
        os.chmod(os.path.dirname(path), 0o755)
        await attempt()
        assert not found.get("fds")
        assert found.get("message", b"") == b""
        await still_serves(transport, grant)


async def test_a_grant_that_ends_under_the_last_piece_fails_the_read() -> None:
    async with serving(ShmConfig(grace=0.01)) as (transport, grant, _):
        reader = ShmTransport(ShmConfig(chunk=64 << 10))
        link = await reader.connect(transport.endpoint, timeout=20)
        reader.on_step = gate = Gate()
        targets = Targets([ARENA])
        whole = Segments.of([(0, 0, 0, ARENA)])
        read = link.read(grant.key, whole, targets.regions, timeout=20)
        task = asyncio.get_running_loop().create_task(read)
        await gate.reached()
        assert not await transport.revoke(grant), "the reader is inside"
        gate.open()
        with pytest.raises(AccessDenied, match="revoked during the read"):
            await task
        assert await transport.revoke(grant)
        assert not link.broken
        await reader.close()
