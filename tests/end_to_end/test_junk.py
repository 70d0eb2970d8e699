"""Strangers and liars on the control port and the data port: refused, counted, and forgotten."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import zmq
from zmq.utils import z85

from hawk.control.frames import PROTOCOL_VERSION, Header, Kind, encode_body, encode_header, new_generation
from hawk.control.messages import Accepted, Consumed, Fetch, Hello, Poll, Release
from hawk.memory.region import Segments
from hawk.transports.tcp import TcpTransport
from tests.end_to_end import caches as c
from tests.end_to_end.conftest import Decoders
from tests.end_to_end.harness import AgentProcess, Site
from tests.end_to_end.scene import Scene, scene


@pytest.fixture
async def s(prefill: AgentProcess, decoders: Decoders) -> AsyncIterator[Scene]:
    async with scene(prefill, decoders.get("tcp", "direct")) as made:
        yield made


def address(agent: AgentProcess) -> tuple[str, int]:
    host, _, port = agent.control.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def until_closed(sock: socket.socket) -> None:
    """Returns when the far side hangs up, however politely."""
    sock.settimeout(30)
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 20,
        bytes(64),
        os.urandom(4096),
        b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00NULL" + bytes(48),
    ],
    ids=["http", "zeros", "random", "zmtp-null"],
)
async def test_raw_bytes_on_the_control_port(s: Scene, junk: bytes) -> None:
    for _ in range(8):
        with socket.create_connection(address(s.prefill), timeout=10) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(junk)
                until_closed(sock)


# -- by ZeroMQ -------------------------------------------------------------------------------------------


class Sockets:
    """Makes sockets and closes them: one that is dropped unclosed warns."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._made: list[zmq.Socket] = []

    def dealer(self) -> zmq.Socket:
        self._made.append(self._context.socket(zmq.DEALER))
        return self._made[-1]

    def close(self) -> None:
        # Monitors as well, wherever a test failed: ending a context waits for ever for a socket left open.
        self._context.destroy(linger=0)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets()
    yield made
    made.close()


def dealer(sockets: Sockets, site: Site, agent: AgentProcess, name: str) -> zmq.Socket:
    """A socket to the control port, with the keys of `name`."""
    sock = sockets.dealer()
    sock.rcvtimeo = 10_000
    sock.curve_publickey = site.keys[name].public.encode()
    sock.curve_secretkey = site.keys[name].secret.encode()
    sock.curve_serverkey = site.keys[agent.name].public.encode()
    sock.connect(agent.control)
    return sock


def handshake_fails(sock: zmq.Socket, address: str) -> None:
    """Connects; returns when ZeroMQ has told that the far side refused us."""
    # Before connecting: what happened earlier, a monitor does not tell.
    monitor = sock.get_monitor_socket()
    monitor.rcvtimeo = 20_000
    bad = {
        zmq.EVENT_HANDSHAKE_FAILED_AUTH,
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        zmq.EVENT_DISCONNECTED,
    }
    try:
        sock.connect(address)
        while True:
            number, _ = struct.unpack("=HI", monitor.recv_multipart()[0])
            assert number != zmq.EVENT_HANDSHAKE_SUCCEEDED
            if number in bad:
                return
    finally:
        sock.disable_monitor()
        monitor.close(linger=0)


async def test_zmtp_without_a_key(s: Scene, sockets: Sockets) -> None:
    handshake_fails(sockets.dealer(), s.prefill.control)


async def test_a_key_that_nobody_knows(s: Scene, shared_site: Site, sockets: Sockets) -> None:
    public, secret = zmq.curve_keypair()
    sock = sockets.dealer()
    sock.curve_publickey, sock.curve_secretkey = public, secret
    sock.curve_serverkey = shared_site.keys["p0"].public.encode()
    handshake_fails(sock, s.prefill.control)
    assert len(z85.decode(public)) == 32


def header(kind: Kind = Kind.MESSAGE, version: int = PROTOCOL_VERSION, generation: int = 0) -> bytes:
    return encode_header(Header(version, kind, generation or new_generation(), 0))


class Pickled:
    """What would run if anybody unpickled it."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.abort, ()


HELLO = encode_body(Hello("mallory", "decode", "test", {}))


def pong(sock: zmq.Socket) -> None:
    """The agent still answers us."""
    sock.send_multipart([header(Kind.PING), encode_body([77])])
    while True:
        frames = sock.recv_multipart()
        if frames[0][5] == Kind.PONG and msgspec.msgpack.decode(frames[1]) == [77]:
            return


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"junk"],
        [pickle.dumps({"a": 1})],
        [pickle.dumps({"a": 1}), pickle.dumps({"b": 2})],
        [header(), HELLO[:-3]],
        [header(), b"\xdd\xff\xff\xff\xff"],
        [header(), b"\xc6\x40\x00\x00\x00" + bytes(16)],
        [header(), b"\x81" * 5000],
        [header(), b""],
        [header(), HELLO, HELLO],
        [header()] + [b"x"] * 100,
        [header()[:10], HELLO],
        [header(version=9), HELLO],
        [header(version=0), HELLO],
        [header()[:5] + b"\x63" + header()[6:], HELLO],
        [header(), bytes(3 << 20)],
        [header(), encode_body(Accepted(job="0" * 32, first=0, tokens=1, chunks=1, lease=1.0, note=b""))],
        [header(), encode_body(Consumed("0" * 32, 0))],
        [header(), encode_body(Poll("0" * 32, 0, []))],
        [header(), encode_body(Release("short"))],
    ],
    ids=lambda frames: None,
)
async def test_junk_by_an_authorised_key(
    s: Scene, shared_site: Site, sockets: Sockets, frames: list[bytes]
) -> None:
    sock = dealer(sockets, shared_site, s.prefill, "mallory")
    pong(sock)
    for _ in range(20):
        sock.send_multipart(frames)
    pong(sock)


async def test_bytes_that_would_run(s: Scene, shared_site: Site, sockets: Sockets) -> None:
    sock = dealer(sockets, shared_site, s.prefill, "mallory")
    sock.send_multipart([header(), pickle.dumps(Pickled())])
    sock.send_multipart([pickle.dumps(Pickled()), b""])
    pong(sock)


async def test_one_name_for_another(s: Scene, shared_site: Site, sockets: Sockets) -> None:
    """An offer for d0 is not to be had by saying so."""
    offer = await s.offer(consumer=s.hd.name)
    sock = dealer(sockets, shared_site, s.prefill, "mallory")
    generation = new_generation()
    sock.send_multipart([header(generation=generation), encode_body(Hello(s.hd.name, "decode", "test", {}))])
    fetch = Fetch(
        job="a" * 32,
        request=offer.request,
        claim="",
        target=s.spec.replace(channels=8, align=64).descr(),
        blocks=bytes(4) * 4,
        first=0,
        tokens=0,
        transport="tcp",
        chunk=1 << 20,
        credit=1 << 20,
        deadline=5.0,
    )
    sock.send_multipart([header(generation=generation), encode_body(fetch)])
    heard = []
    while len(heard) < 2:
        answer = sock.recv_multipart()
        if answer[0][5] == Kind.MESSAGE:
            heard.append(msgspec.msgpack.decode(answer[1]))
    refused, ended = heard
    # It proved that it has mallory's key, so that much it may hear.
    assert (refused["type"], refused["error"]["expected"]) == ("refused", "mallory")
    assert ended["type"] == "ended"
    assert ended["error"]["code"] == "bad-frame"
    assert (await s.hp.status()).offers == 1


async def test_a_flood_of_fetches_by_a_peer(s: Scene, shared_site: Site, sockets: Sockets) -> None:
    """Jobs for offers that are not there: each is answered, none stays."""
    sock = dealer(sockets, shared_site, s.prefill, "mallory")
    generation = new_generation()
    sock.send_multipart([header(generation=generation), HELLO])
    descr = s.spec.replace(channels=8, align=64).descr()
    names = [f"{i:032x}" for i in range(100)]
    for name in names:
        fetch = Fetch(
            job=name,
            request="not there",
            claim="0" * 32,
            target=descr,
            blocks=bytes(4),
            first=0,
            tokens=0,
            transport="tcp",
            chunk=0,
            credit=0,
            deadline=30.0,
        )
        sock.send_multipart([header(generation=generation), encode_body(fetch)])
    answered = set()
    while len(answered) < len(names):
        frames = sock.recv_multipart()
        if frames[0][5] == Kind.MESSAGE:
            message = msgspec.msgpack.decode(frames[1])
            if message["type"] == "ended":
                answered.add(message["job"])


# -- the data port ---------------------------------------------------------------------------------------


async def test_a_stranger_on_the_data_port(s: Scene) -> None:
    facts = dict(part.split("=", 1) for part in (await s.hp.status()).transports["tcp"].split(", "))
    for junk in (b"", bytes(100), os.urandom(8192)):
        with socket.create_connection((facts["host"], int(facts["port"])), timeout=10) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(junk or b"x")
                sock.shutdown(socket.SHUT_WR)
                until_closed(sock)


async def test_a_guest_without_a_key_reads_nothing(s: Scene) -> None:
    """One who has the endpoint's token but no grant, while a transfer is under way."""
    offer = await s.offer(layers_ready=1)
    async with s.hd.fetch(offer, into=s.device, blocks=[5, 6, 7, 8], timeout="20s") as job:
        async for progress in job.progress():
            if progress.nbytes:
                break
        facts = dict(part.split("=", 1) for part in (await s.hp.status()).transports["tcp"].split(", "))
        stranger = TcpTransport()
        await stranger.start()
        try:
            link = await stranger.connect(facts, timeout=10)
            target = c.KVCache.alloc(c.source_spec())
            from hawk.errors import AccessDenied
            from hawk.memory.region import Region

            region = Region("loot", target.buffers[0])
            with pytest.raises(AccessDenied):
                await link.read(bytes(32), Segments.of([(0, 0, 0, 4096)]), [region], timeout=10)
            assert not region.array.any()
            await link.close()
        finally:
            await stranger.close()
        await offer.layers_ready(c.LAYERS)
        await job
