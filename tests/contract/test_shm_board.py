"""Small reads over shm: without a word to the server, and with the same promises."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import mmap
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from hawk.errors import AccessDenied, TransferFailed
from hawk.memory.region import Segments
from hawk.transports._lanes import Lanes
from hawk.transports.base import Grant
from hawk.transports.shm import ShmConfig, ShmTransport, _board, _wire
from hawk.transports.shm._client import ShmLink
from hawk.transports.testing import SharedArena, Targets
from tests.child import child

pytestmark = pytest.mark.skipif(_board.core() is None, reason="the board needs the C core")

ARENA = 1 << 20
SEGMENTS = Segments.of([(0, 0, 100, 3000), (0, 3000, 8192, 2000)])
QUICK = ShmConfig(grace=0.05)


@contextlib.asynccontextmanager
async def both(
    config: ShmConfig = QUICK,
) -> AsyncIterator[tuple[ShmTransport, ShmLink, SharedArena]]:
    """A server with an arena, and a link to it."""
    arena, transport, reader = SharedArena(ARENA), ShmTransport(config), ShmTransport()
    await transport.start()
    try:
        transport.serve(arena.region)
        link = await reader.connect(transport.endpoint, timeout=20)
        assert isinstance(link, ShmLink)
        yield transport, link, arena
    finally:
        await reader.close()
        await transport.close()
        arena.close()


async def read(link: ShmLink, grant: Grant, arena: SharedArena) -> None:
    targets = Targets([5000])
    await link.read(grant.key, SEGMENTS, targets.regions, timeout=20)
    targets.check(SEGMENTS, arena.region.array)


def no_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    async def carry(*_: object) -> None:
        raise AssertionError("the server was asked")

    monkeypatch.setattr(Lanes, "carry", carry)


@contextlib.contextmanager
def page(transport: ShmTransport) -> Iterator[tuple[socket.socket, mmap.mmap]]:
    """A reader's connection and its page, by hand."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(20)
        sock.connect(transport.endpoint["path"])
        token = bytes.fromhex(transport.endpoint["token"])
        sock.send(_wire.HELLO.pack(_wire.HELLO_MAGIC, _wire.BOARD_VERSION, token))
        message, fds, _, _ = socket.recv_fds(sock, 64, 4)
        if message != _wire.VERDICT.pack(
            _wire.OK
        ):  # a refused HELLO may come to nobody (EPIPE), or be answered
            raise ConnectionRefusedError(message)
        board, own = fds
        with pytest.raises(PermissionError):
            mmap.mmap(board, _board.BOARD_BYTES)
        with mmap.mmap(own, _board.PAGE_BYTES) as words:
            os.close(board)
            os.close(own)
            yield sock, words


def enter(words: mmap.mmap, grant: Grant) -> None:
    words[:8] = _board.mark(grant.key).to_bytes(8, "little")


async def test_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with both() as (transport, link, arena):
        grant = transport.grant(0, ARENA)
        no_asking(monkeypatch)
        for _ in range(3):
            await read(link, grant, arena)
        assert await transport.revoke(grant)


async def test_what_the_board_refuses_the_server_gives_a_reason_for() -> None:
    async with both() as (transport, link, arena):
        short, gone = transport.grant(0, 4096), transport.grant(0, ARENA)
        assert await transport.revoke(gone)
        for grant in (short, gone, Grant(bytes(32), 0, ARENA)):
            with pytest.raises(AccessDenied):
                await read(link, grant, arena)
        again = transport.grant(0, ARENA)
        assert again.key[-2:] == gone.key[-2:], "the slot was given back"
        with pytest.raises(AccessDenied):
            await read(link, gone, arena)
        await read(link, again, arena)


async def test_more_grants_than_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_board, "SLOTS", 2)
    async with both() as (transport, link, arena):
        grants = [transport.grant(0, ARENA) for _ in range(4)]
        for grant in grants:
            await read(link, grant, arena)
        for grant in grants:
            assert await transport.revoke(grant)
        for _ in range(4):
            grant = transport.grant(0, ARENA)
            assert int.from_bytes(grant.key[-2:]) < 2
            await transport.revoke(grant)


async def test_a_reader_inside_holds_the_range_until_it_leaves() -> None:
    async with both() as (transport, link, arena):
        grant, other = transport.grant(0, ARENA), transport.grant(0, ARENA)
        with page(transport) as (_, words):
            enter(words, grant)
            assert not await transport.revoke(grant)
            assert not await transport.revoke(grant)
            assert await transport.revoke(other), "nobody is inside of that one"
            with pytest.raises(AccessDenied):
                await read(link, grant, arena)
            assert transport.grant(0, ARENA).key[-2:] != grant.key[-2:], "the slot is not free yet"
            asyncio.get_running_loop().call_later(0.01, words.write, bytes(8))
            assert await transport.revoke(grant)


async def test_a_reader_that_died_inside_is_inside_no_more() -> None:
    async with both(ShmConfig(grace=20)) as (transport, _, _):
        grant = transport.grant(0, ARENA)
        with page(transport) as (sock, words):
            enter(words, grant)
            asyncio.get_running_loop().call_later(0.01, sock.close)
            assert await transport.revoke(grant)


async def test_junk_from_a_reader_inside_is_no_proof_that_it_left() -> None:
    async with both() as (transport, link, arena):
        grant = transport.grant(0, ARENA)
        with page(transport) as (sock, words):
            enter(words, grant)
            sock.send(b"let me out")
            await read(link, transport.grant(0, ARENA), arena)
            assert not await transport.revoke(grant)
        assert await transport.revoke(grant)


async def test_after_the_server_closed_nothing_is_read() -> None:
    async with both() as (transport, link, arena):
        grant = transport.grant(0, ARENA)
        await read(link, grant, arena)
        await transport.close()
        with pytest.raises((TransferFailed, AccessDenied)):
            await read(link, grant, arena)


async def test_a_server_without_a_board_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_board, "core", lambda: None)
    async with both() as (transport, link, arena):
        grant = transport.grant(0, ARENA)
        assert link._pass is None
        await read(link, grant, arena)
        assert await transport.revoke(grant)


def test_what_was_taken_down_meanwhile_does_not_count() -> None:
    core = _board.core()
    board, word = np.zeros(6, np.uint64), np.zeros(1, np.uint64)
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    bases = np.asarray([target.ctypes.data], np.int64)
    columns = np.zeros(1, np.int32), np.asarray([4]), np.asarray([16]), np.asarray([8])

    def copy(slot: int = 1, state: int = 7, size: int = 64) -> bool:
        region, local, remote, nbytes = columns
        found: bool = core.copy_guarded(
            word, board, slot, state, 5, bases, region, local, source.ctypes.data, size, remote, nbytes
        )
        assert word[0] == 0
        return found

    core.post_guard(board, 1, 7, 16, 24)
    assert copy()
    assert target[4:12].tolist() == source[16:24].tolist()
    assert not copy(slot=0)
    assert not copy(state=8)
    assert not copy(state=0)
    assert not copy(size=23), "past the end of the arena"
    for low, high in ((17, 24), (16, 23)):
        core.post_guard(board, 1, 7, low, high)
        assert not copy()
    core.post_guard(board, 1, 0, 0, 0)
    assert not copy()
    for slot in (2, 1 << 63):
        with pytest.raises(ValueError, match="no such slot"):
            copy(slot=slot)
        with pytest.raises(ValueError, match="no such slot"):
            core.post_guard(board, slot, 1, 0, 0)


async def test_who_does_not_know_the_key_holds_nothing_up() -> None:
    async with both() as (transport, _, _):
        grants = [transport.grant(0, ARENA) for _ in range(2)]
        with page(transport) as (_, words):
            for forged in range(1, 4):  # slots are handed out from the end
                words[:8] = (_board.SLOTS + 1 - forged).to_bytes(8, "little")
                grant = transport.grant(0, ARENA)
                assert await transport.revoke(grant)
            # What stands on the board is no proof either: everybody sees it.
            board = transport._server._board if transport._server is not None else None
            assert board is not None
            words[:8] = board._words.array[3 * int.from_bytes(grants[1].key[-2:])].tobytes()
            assert await transport.revoke(grants[1])


async def test_a_reader_inside_is_not_forgotten_when_the_server_closes() -> None:
    async with both() as (transport, _, _):
        grant = transport.grant(0, ARENA)
        with page(transport) as (_, words):
            enter(words, grant)
            await transport.close()
            assert not await transport.revoke(grant)
            await transport.start()
            other = transport.grant(0, ARENA)
            assert not await transport.revoke(grant)
            assert await transport.revoke(other)
            words[:8] = bytes(8)
            assert await transport.revoke(grant)


async def test_passes_take_no_connection_from_those_who_ask() -> None:
    async with both(ShmConfig(max_connections=2)) as (transport, _, arena):
        grant, reader = transport.grant(0, ARENA), ShmTransport()
        try:
            link = await reader.connect(transport.endpoint, timeout=20)
            assert isinstance(link, ShmLink)
            await read(link, grant, arena)
            with contextlib.suppress(ConnectionError), page(transport):
                pytest.fail("more pages than connections")
        finally:
            await reader.close()


def held_open(name: str) -> int:
    """Descriptors of this process for memory of that name."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += name in os.readlink(f"/proc/self/fd/{fd}")
    return found


async def test_pages_keep_no_descriptors() -> None:
    async with both() as (transport, link, arena):
        await read(link, transport.grant(0, ARENA), arena)
        async with asyncio.timeout(20):
            while held_open("shm-page") or held_open("shm-board") > 1:
                await asyncio.sleep(0)


_FORKS = """
import asyncio, json, os, signal, sys
from hawk.transports.shm import ShmTransport

async def main():
    reader = ShmTransport()
    link = await reader.connect(json.loads(sys.argv[1]), timeout=20)
    key = bytes.fromhex(sys.argv[2])
    if sys.argv[3] == "pass":
        from hawk.transports.shm import _board
        link._pass._page.array[0] = _board.mark(key)
    else:
        from hawk.transports.shm import _wire
        lane = link._lanes._lanes[0]
        assert lane._ask(lane._sock, _wire.ENTER, 0, 4096, key)
    child = os.fork()
    if child == 0:
        signal.pause()
    print(child, flush=True)
    signal.pause()

asyncio.run(main())
"""


@pytest.mark.parametrize("way", ["pass", "lane"])
async def test_a_forked_child_does_not_keep_its_dead_parent_inside(way: str) -> None:
    async with both(ShmConfig(grace=10)) as (transport, _, _):
        grant = transport.grant(0, ARENA)
        arguments = (json.dumps(dict(transport.endpoint)), grant.key.hex(), way)
        async with child(sys.executable, "-c", _FORKS, *arguments, stdout=asyncio.subprocess.PIPE) as process:
            assert process.stdout is not None
            forked = int(await process.stdout.readline())
            try:
                asked = asyncio.create_task(transport.revoke(grant))
                await asyncio.sleep(0)
                assert not asked.done()
                process.kill()
                assert await asked
            finally:
                os.kill(forked, signal.SIGKILL)


_SERVES_AND_FORKS = """
import asyncio, json, os, signal
from hawk.transports.shm import ShmTransport
from hawk.transports.testing import SharedArena

async def main():
    transport, arena = ShmTransport(), SharedArena(1 << 20)
    await transport.start()
    transport.serve(arena.region)
    print(json.dumps(transport.endpoint), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, input)
    child = os.fork()
    if child == 0:
        signal.pause()
    print(child, flush=True)
    signal.pause()

asyncio.run(main())
"""


def answers(path: str) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as new:
        new.setblocking(False)
        return new.connect_ex(path) not in (errno.ECONNREFUSED, errno.ENOENT)


async def test_a_forked_child_does_not_keep_its_dead_parents_readers() -> None:
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    async with child(sys.executable, "-c", _SERVES_AND_FORKS, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        endpoint = json.loads(await process.stdout.readline())
        reader = ShmTransport()
        try:
            link = await reader.connect(endpoint, timeout=20)
            assert isinstance(link, ShmLink)
            process.stdin.write(b"\n")
            forked = int(await process.stdout.readline())
            try:
                process.kill()
                ends = [link._lanes._lanes[0]._sock, link._pass and link._pass._sock]
                for end in ends:
                    assert isinstance(end, socket.socket)
                    assert await asyncio.to_thread(end.recv, 1) == b""
                while answers(endpoint["path"]):  # as long as the parent is about to end
                    await asyncio.sleep(0.01)
            finally:
                os.kill(forked, signal.SIGKILL)
        finally:
            await reader.close()


async def test_a_link_that_is_given_up_while_it_opens_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled when it has its pass and waits for one more word, which never comes."""
    waits, socks = asyncio.Event(), []
    loop, real = asyncio.get_running_loop(), _board.recv_fds

    def held(sock: socket.socket, *args: int) -> tuple[bytes, list[int]]:
        got = real(sock, *args)
        socks.append(sock)
        loop.call_soon_threadsafe(waits.set)
        sock.settimeout(None)
        assert sock.recv(1) == b""
        return got

    async with both() as (transport, _, _):
        monkeypatch.setattr(_board, "recv_fds", held)
        reader = ShmTransport()
        opening = asyncio.create_task(reader.connect(transport.endpoint, timeout=20))
        await waits.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert [sock.fileno() for sock in socks] == [-1]
        await reader.close()
        assert transport._grants.board is not None
        while len(transport._grants.board.pages) > 1:
            await asyncio.sleep(0)
