"""tcp with TLS meets the contract, and lets nobody in, or anybody pass for another, without the right certificate."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hawk.errors import HawkError, InvalidArgument, NotViable, PeerUnreachable, TransferFailed
from hawk.memory.region import Segments
from hawk.transports import registry
from hawk.transports.tcp import TcpConfig, TcpTransport, _wire
from hawk.transports.tcp._tls import Tls
from hawk.transports.testing import SharedArena, Targets, TransportContract
from tests import certificates
from tests.contract.test_tcp import SMALL

SEGMENTS = Segments.of([(0, 0, 100, 5000), (0, 5000, 9000, 200_000)])
ARENA = 1 << 20


class TestTls(TransportContract):
    large = 12 << 20

    def make(self) -> TcpTransport:
        return TcpTransport(TcpConfig(streams=2, **SMALL, **certificates.settings()))


@contextlib.asynccontextmanager
async def serving(**config: Any) -> AsyncIterator[tuple[TcpTransport, bytes, SharedArena]]:
    arena, transport = SharedArena(ARENA), TcpTransport(TcpConfig(**config))
    await transport.start()
    try:
        transport.serve(arena.region)
        yield transport, transport.grant(0, ARENA).key, arena
    finally:
        await transport.close()
        arena.close()


async def read_by(reader: TcpTransport, endpoint: dict[str, str], key: bytes, arena: SharedArena) -> None:
    """Connects and reads; raises what that raises."""
    targets = Targets([205_000])
    try:
        link = await reader.connect(endpoint, timeout=20)
        await link.read(key, SEGMENTS, targets.regions, timeout=20)
        targets.check(SEGMENTS, arena.region.array)
    finally:
        await reader.close()


def reader(*args: str, **kwargs: Any) -> TcpTransport:
    return TcpTransport(TcpConfig(streams=1, connect_timeout=5, **certificates.settings(*args, **kwargs)))


@pytest.mark.parametrize("role", ["reader", "server"])
def test_a_connection_reset_before_the_handshake_leaves_nothing_open(role: str) -> None:
    files = certificates.settings()
    tls = Tls(files["tls_cert"], files["tls_key"], files["tls_ca"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = socket.create_connection(listener.getsockname())
        sock, _ = listener.accept()
    gone.setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )  # close resets the connection
    gone.close()
    number, call = sock.fileno(), tls.call if role == "reader" else tls.welcome
    with pytest.raises(OSError, match="the peer has left"):
        call(sock)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


async def test_agents_with_certificates_of_their_own() -> None:
    async with serving(**certificates.settings("one")) as (transport, key, arena):
        await read_by(reader("two"), transport.endpoint, key, arena)


async def test_certificates_that_are_read_again_count_for_new_connections(tmp_path: Path) -> None:
    def place(name: str, where: str = "") -> None:
        for file, into in ((f"{name}.pem", "own.pem"), (f"{name}-tls.key", "own-tls.key")):
            shutil.copy(certificates.folder() / where / file, tmp_path / into)

    place("one")
    files = {"tls_cert": tmp_path / "own.pem", "tls_key": tmp_path / "own-tls.key"}
    async with serving(**{**certificates.settings(), **files}) as (transport, key, arena):
        before = transport.endpoint
        held = reader("two")
        link = await held.connect(before, timeout=20)
        place("two")
        assert transport.endpoint == before
        assert transport.reread()()
        after = transport.endpoint
        assert {name for name in after if after[name] != before[name]} == {"tls"}
        assert not transport.reread()()
        await read_by(reader("one"), after, key, arena)
        with pytest.raises(PeerUnreachable, match="another certificate"):
            await read_by(reader("two"), before, key, arena)
        # What stands goes on.
        targets = Targets([205_000])
        await link.read(key, SEGMENTS, targets.regions, timeout=20)
        await held.close()
        # What cannot be used changes nothing.
        shutil.copy(certificates.folder() / "one.pem", tmp_path / "own.pem")
        with pytest.raises(InvalidArgument, match="tls_key"):
            transport.reread()
        assert transport.endpoint == after
        await read_by(reader("one"), after, key, arena)


async def test_who_listens_sees_neither_bytes_nor_keys() -> None:
    """A go-between that only passes on what it hears: with TLS nothing in it is ours, without it all is."""
    for config in (certificates.settings(), {}):
        async with serving(**config) as (transport, key, arena):
            heard = bytearray()
            with wiretap(int(transport.endpoint["port"]), heard) as port:
                reading = TcpTransport(TcpConfig(streams=1, **config))
                await read_by(reading, {**transport.endpoint, "port": str(port)}, key, arena)
            sent = arena.region.array[10_000:10_100].tobytes()
            token = bytes.fromhex(transport.endpoint["token"])
            assert [secret in heard for secret in (key, token, sent)] == [not config] * 3


@contextlib.contextmanager
def wiretap(port: int, heard: bytearray) -> Any:
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def pass_on(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                heard.extend(data)
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def accept() -> None:
        near, _ = listener.accept()
        with near, socket.create_connection(("127.0.0.1", port)) as far:
            back = threading.Thread(target=pass_on, args=(far, near))
            back.start()
            pass_on(near, far)
            back.join()

    threads.append(threading.Thread(target=accept))
    threads[0].start()
    yield listener.getsockname()[1]
    threads[0].join()
    listener.close()


# -- who does not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [True, False], ids=["this side", "the peer"])
async def test_tls_on_one_side_only_is_named(ours: bool) -> None:
    tls = certificates.settings()
    async with serving(**({} if ours else tls)) as (transport, _, _):
        reading = TcpTransport(TcpConfig(**(tls if ours else {})))
        verdict = reading.reachable(transport.endpoint)
        assert not verdict.ok
        assert verdict.reason.startswith("transport.tcp.tls_cert: ")
        with pytest.raises(PeerUnreachable, match=r"transport\.tcp\.tls_cert"):
            await reading.connect(transport.endpoint, timeout=5)
        with pytest.raises(NotViable, match=r"transport\.tcp\.tls_cert"):
            registry.choose(["tcp"], {"tcp": reading}, {"tcp": transport.endpoint})


@pytest.mark.parametrize("tls", [True, False], ids=["speaks TLS only", "speaks none"])
async def test_a_peer_that_is_not_what_its_endpoint_says(tls: bool) -> None:
    """An endpoint that is out of date: the connection fails, nobody hangs."""
    config = certificates.settings()
    async with serving(**(config if tls else {})) as (transport, _, _):
        endpoint = dict(transport.endpoint)
        if tls:
            del endpoint["tls"]
        else:
            endpoint["tls"] = "0" * 64
        reading = TcpTransport(TcpConfig(streams=1, **({} if tls else config)))
        with pytest.raises(PeerUnreachable):
            await reading.connect(endpoint, timeout=20)


async def test_a_reader_of_another_authority_is_refused() -> None:
    async with serving(**certificates.settings()) as (transport, key, arena):
        stranger = reader("stranger", where="other")
        with pytest.raises(PeerUnreachable) as caught:
            await stranger.connect(transport.endpoint, timeout=20)
        assert caught.value.field == "transport.tcp.tls_cert"
        assert not transport._server._connections  # type: ignore[union-attr]
        await read_by(reader("two"), transport.endpoint, key, arena)


async def test_a_reader_without_any_certificate_is_refused() -> None:
    async with serving(**certificates.settings()) as (transport, key, arena):
        context = ssl.create_default_context(cafile=certificates.folder() / "ca.pem")
        context.check_hostname = False
        address = transport.endpoint["host"], int(transport.endpoint["port"])
        token = bytes.fromhex(transport.endpoint["token"])

        def talk() -> bytes:
            with context.wrap_socket(socket.create_connection(address, timeout=20)) as sock:
                sock.sendall(_wire.HELLO.pack(_wire.HELLO_MAGIC, _wire.VERSION, token))
                return sock.recv(16)

        with pytest.raises(OSError, match=r"(?i)certificate.required|reset|EOF|pipe"):
            await asyncio.to_thread(talk)
        await read_by(reader("two"), transport.endpoint, key, arena)


async def test_a_server_of_another_authority_is_refused() -> None:
    other = certificates.settings("stranger", where="other")
    async with serving(**other) as (transport, _, _):
        with pytest.raises(PeerUnreachable) as caught:
            await reader("two").connect(transport.endpoint, timeout=20)
        assert caught.value.field == "transport.tcp.tls_ca"


async def test_a_server_of_our_authority_that_is_another_one() -> None:
    async with (
        serving(**certificates.settings("one")) as (right, _, _),
        serving(**certificates.settings("two")) as (wrong, key, arena),
    ):
        endpoint = {**right.endpoint, "port": wrong.endpoint["port"], "token": wrong.endpoint["token"]}
        with pytest.raises(PeerUnreachable, match="another certificate"):
            await reader("two").connect(endpoint, timeout=20)
        await read_by(reader("one"), wrong.endpoint, key, arena)


async def test_who_begins_no_handshake_is_dropped() -> None:
    async with serving(handshake_timeout=1.0, **certificates.settings()) as (transport, key, arena):
        address = transport.endpoint["host"], int(transport.endpoint["port"])
        loop = asyncio.get_running_loop()
        hello = _wire.HELLO.pack(_wire.HELLO_MAGIC, _wire.VERSION, bytes.fromhex(transport.endpoint["token"]))

        async def say(junk: bytes) -> None:
            with socket.socket() as sock:
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
                await loop.sock_sendall(sock, junk)
                with contextlib.suppress(ConnectionResetError):
                    # An alert may come first; no answer of ours does.
                    while data := await asyncio.wait_for(loop.sock_recv(sock, 4096), 20):
                        assert _wire.ANSWER_MAGIC not in data

        # All at once, since each may take the time that an honest handshake on a busy machine needs, too.
        await asyncio.gather(*(say(b) for b in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", hello)))
        await read_by(reader("two"), transport.endpoint, key, arena)


async def test_half_a_request_is_dropped_and_an_idle_peer_is_not() -> None:
    async with serving(handshake_timeout=0.3, stall_timeout=0.3, **certificates.settings()) as (
        transport,
        key,
        arena,
    ):
        reading = reader("two")
        link = await reading.connect(transport.endpoint, timeout=20)
        connection = link._lanes._lanes[0]._sock  # type: ignore[attr-defined]
        half = TcpTransport(TcpConfig(streams=1, **certificates.settings("two")))
        other = await half.connect(transport.endpoint, timeout=20)
        sock = other._lanes._lanes[0]._sock  # type: ignore[attr-defined]

        def begin_and_wait() -> bytes:
            sock.sendall(b"READ")
            sock.settimeout(20)
            return bytes(sock.recv(1))

        assert await asyncio.to_thread(begin_and_wait) == b""
        targets = Targets([205_000])
        await link.read(key, SEGMENTS, targets.regions, timeout=20)
        targets.check(SEGMENTS, arena.region.array)
        assert link._lanes._lanes[0]._sock is connection  # type: ignore[attr-defined]
        await reading.close()
        await half.close()


async def test_a_peer_that_takes_nothing_is_dropped() -> None:
    small = {"socket_buffer": 64 << 10, "stall_timeout": 0.2}
    async with serving(**small, **certificates.settings()) as (transport, key, _):
        reading = TcpTransport(TcpConfig(streams=1, socket_buffer=64 << 10, **certificates.settings("two")))
        link = await reading.connect(transport.endpoint, timeout=20)
        sock = link._lanes._lanes[0]._sock  # type: ignore[attr-defined]
        ranges = np.asarray([[0, ARENA]] * 8, "<i8")
        request = _wire.REQUEST.pack(_wire.REQUEST_MAGIC, len(ranges), 8 * ARENA, key)
        await asyncio.to_thread(sock.sendall, request + ranges.tobytes())
        server = transport._server
        assert server is not None
        while server._connections:
            await asyncio.sleep(0.01)
        await reading.close()


async def test_a_changed_byte_on_the_way_is_noticed() -> None:
    """Records are authenticated: what was changed under way ends the read and never lands as it is."""
    async with serving(**certificates.settings()) as (transport, key, arena):
        flipped = 0
        listener = await asyncio.start_server(lambda r, w: between(r, w), "127.0.0.1", 0)

        async def between(reader_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal flipped
            far_reader, far_writer = await asyncio.open_connection(
                "127.0.0.1", int(transport.endpoint["port"])
            )

            async def back() -> None:
                nonlocal flipped
                while data := bytearray(await far_reader.read(1 << 16)):
                    if len(data) > 8000:
                        data[5000] ^= 1
                        flipped += 1
                    writer.write(data)
                    await writer.drain()

            async def forth() -> None:
                while data := await reader_.read(1 << 16):
                    far_writer.write(data)
                    await far_writer.drain()

            tasks = [asyncio.ensure_future(back()), asyncio.ensure_future(forth())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            far_writer.close()
            writer.close()

        port = listener.sockets[0].getsockname()[1]
        with pytest.raises((TransferFailed, PeerUnreachable)):
            await read_by(reader("two"), {**transport.endpoint, "port": str(port)}, key, arena)
        assert flipped
        listener.close()


# -- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "content"),
    [
        ("tls_cert", None),
        ("tls_cert", "no certificate"),
        ("tls_key", None),
        ("tls_key", "no key"),
        ("tls_ca", None),
        ("tls_ca", "no authority"),
    ],
)
async def test_a_file_that_cannot_be_used_is_named_at_start(
    setting: str, content: str | None, tmp_path: Path
) -> None:
    bad = tmp_path / "file"
    if content is not None:
        bad.write_text(content)
        bad.chmod(0o600)
    transport = TcpTransport(TcpConfig(**{**certificates.settings(), setting: bad}))
    with pytest.raises(InvalidArgument, match=str(bad)) as caught:
        await transport.start()
    assert caught.value.field == f"transport.tcp.{setting}"
    await transport.close()


async def test_a_key_of_another_certificate_or_for_all_to_read_is_refused(tmp_path: Path) -> None:
    for key, mode in (("two-tls.key", 0o600), ("one-tls.key", 0o640)):
        copy = tmp_path / key
        copy.write_bytes((certificates.folder() / key).read_bytes())
        copy.chmod(mode)
        with pytest.raises(InvalidArgument) as caught:
            await TcpTransport(TcpConfig(**{**certificates.settings(), "tls_key": copy})).start()
        assert caught.value.field == "transport.tcp.tls_key"


def test_all_three_files_or_none() -> None:
    for absent in ("tls_cert", "tls_key", "tls_ca"):
        some = {name: path for name, path in certificates.settings().items() if name != absent}
        with pytest.raises(HawkError) as caught:
            TcpConfig(**some)  # type: ignore[arg-type]
        assert caught.value.field == f"transport.tcp.{absent}"
