"""Strangers at a CURVE router: none gets a message through, and the server and an authorised peer go on."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from hawk.control.channel import SILENT
from hawk.control.frames import Codec, Header
from hawk.control.keys import KeyPair
from hawk.control.link import Beat, Channel, Peer, Server
from hawk.control.sockets import Limits, Sockets
from hawk.control.zap import MOST_NAMED, ZAP_ADDRESS
from hawk.errors import AccessDenied, ConfigError, HawkError, PeerLost, PeerUnreachable

MakeSockets = Callable[..., Sockets]
NewKey = Callable[[str], KeyPair]


class Text(msgspec.Struct, tag=True):
    text: str


CODEC: Codec[Text] = Codec(msgspec.msgpack.Decoder(Text))
QUICK = Beat(interval=0.05, timeout=2.0)


class House:
    """A CURVE server that notes what comes, and a way to make channels to it."""

    def __init__(self, make_sockets: MakeSockets, new_key: NewKey) -> None:
        self.make_sockets = make_sockets
        self.key = new_key("d0")
        self.sockets = make_sockets(keys=self.key, limits=Limits(handshake=0.3))
        self.sockets.authorise({})
        self.got: asyncio.Queue[tuple[bytes, str]] = asyncio.Queue()
        self.bad: asyncio.Queue[HawkError] = asyncio.Queue()
        self.gone: asyncio.Queue[tuple[Peer, PeerLost]] = asyncio.Queue()
        self.server: Server[Text] = Server(
            self.sockets.router("tcp://127.0.0.1:0"),
            CODEC,
            self._take,
            on_bad=lambda _, error: self.bad.put_nowait(error),
            on_gone=lambda peer, error: self.gone.put_nowait((peer, error)),
            zap=self.sockets.zap,
            beat=QUICK,
        )
        self.server.start()
        self.channels: list[Channel[Text]] = []

    def _take(self, identity: bytes, header: Header, message: Text) -> None:
        self.got.put_nowait((identity, message.text))

    def channel(
        self, key: KeyPair, server_key: str | None = None, *, limits: Limits | None = None
    ) -> Channel[Text]:
        sockets = self.make_sockets(keys=key, limits=limits)
        made: Channel[Text] = Channel(
            sockets.dealer(self.server.address, server_key=server_key or self.key.public),
            CODEC,
            lambda *_: None,
            on_lost=lambda _: None,
            on_restarted=lambda *_: None,
            peer="d0",
            beat=QUICK,
        )
        made.start()
        self.channels.append(made)
        return made

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.server.close()


async def _says(house: House, channel: Channel[Text], text: str) -> bytes:
    """Sends a text and waits until the server has it; returns the identity it came from."""
    async with asyncio.timeout(30):
        await channel.up(30)
        channel.send(Text(text))
        identity, got = await house.got.get()
    assert got == text
    return identity


async def test_an_authorised_peer_is_known_by_its_name(make_sockets: MakeSockets, new_key: NewKey) -> None:
    house = House(make_sockets, new_key)
    key = new_key("p0")
    house.sockets.authorise({"p0": key.public, "p1": new_key("p1").public})
    identity = await _says(house, house.channel(key), "hello")
    assert house.server.peers[identity].name == "p0"
    assert house.sockets.zap is not None
    assert house.sockets.zap.admitted == 1
    assert not house.sockets.zap.denied
    house.close()


def _refused(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "hawk.control.zap"]


async def test_a_refused_key_is_named_once_and_only_so_many_are(
    make_sockets: MakeSockets,
    new_key: NewKey,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = House(make_sockets, new_key)
    zap, key = house.sockets.zap, new_key("p0")
    assert zap is not None
    now = 100.0
    monkeypatch.setattr("hawk.control.zap.time", SimpleNamespace(monotonic=lambda: now))
    with caplog.at_level(logging.WARNING, "hawk.control.zap"):
        channel = house.channel(key)
        with pytest.raises(PeerUnreachable):
            await channel.up(0.5)
        for _ in range(3):
            zap._warn(key.public, "127.0.0.1")
        (said,) = _refused(caplog)
        assert key.public in said
        assert "security.peers_file" in said
        for number in range(MOST_NAMED + 9):
            zap._warn(f"key {number}", "127.0.0.1")
        said = _refused(caplog)
        assert len(said) == MOST_NAMED + 1
        assert said[-1].startswith("many keys")
        now += 61.0
        zap._warn(key.public, "127.0.0.1")
        assert key.public in _refused(caplog)[-1]
    house.close()


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        # A ZMTP 3.1 greeting for NULL, and a READY command after it.
        b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\x00" + bytes(31) + b"\x04\x06\x05READY",
        # A ZMTP 3.1 greeting for CURVE, and a message instead of a HELLO.
        b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\x00" + bytes(31) + b"\x01\x04HAWK" * 100,
        b"\x01\x00" * 1000,
    ],
)
async def test_junk_on_the_port(make_sockets: MakeSockets, new_key: NewKey, junk: bytes) -> None:
    house = House(make_sockets, new_key)
    key = new_key("p0")
    house.sockets.authorise({"p0": key.public})
    port = int(house.server.address.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(junk)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
        # The server gives up on whoever shakes no hand within its handshake interval.
        async with asyncio.timeout(30):
            while await reader.read(4096):
                pass
    writer.close()
    await _says(house, house.channel(key), "still here")
    assert house.got.empty()
    assert house.bad.empty()
    house.close()


async def test_a_client_without_curve(make_sockets: MakeSockets, new_key: NewKey) -> None:
    house = House(make_sockets, new_key)
    key = new_key("p0")
    house.sockets.authorise({"p0": key.public})
    plain = make_sockets(insecure=True)
    stranger: Channel[Text] = Channel(
        plain.dealer(house.server.address),
        CODEC,
        lambda *_: None,
        on_lost=lambda _: None,
        on_restarted=lambda *_: None,
        beat=QUICK,
    )
    stranger.start()
    house.channels.append(stranger)
    # Also one that queues its message before there is a connection.
    raw = plain.context.socket(zmq.DEALER)
    raw.linger = 0
    raw.connect(house.server.address)
    raw.send_multipart([b"HAWK", b"x"])
    with pytest.raises(PeerUnreachable):
        await stranger.up(1.0)
    await _says(house, house.channel(key), "still here")
    assert house.got.empty()
    assert house.bad.empty()
    raw.close()
    house.close()


async def test_a_key_that_is_not_on_the_list(make_sockets: MakeSockets, new_key: NewKey) -> None:
    house = House(make_sockets, new_key)
    key, unknown = new_key("p0"), new_key("x0")
    house.sockets.authorise({"p0": key.public})
    stranger = house.channel(unknown)
    with pytest.raises(PeerUnreachable, match="does not accept our key"):
        await stranger.up(1.0)
    # Who does not wait is told at once, and what to do about it.
    with pytest.raises(PeerUnreachable, match=r"does not accept our key.*security\.peers_file of"):
        await house.channel(unknown).up(60.0, patient=False)
    await _says(house, house.channel(key), "still here")
    assert house.sockets.zap is not None
    assert house.sockets.zap.denied["unknown-key"] >= 1
    assert house.got.empty()
    assert house.bad.empty()
    # Put on the list, the same channel comes in without being made anew.
    house.sockets.authorise({"p0": key.public, "x0": unknown.public})
    await _says(house, stranger, "let in")
    house.close()


async def test_a_server_with_another_key_is_not_talked_to(make_sockets: MakeSockets, new_key: NewKey) -> None:
    house = House(make_sockets, new_key)
    key = new_key("p0")
    house.sockets.authorise({"p0": key.public})
    channel = house.channel(key, server_key=new_key("other").public)
    with pytest.raises(PeerUnreachable):
        await channel.up(0.5)
    house.close()


async def test_a_server_that_does_not_come_to_looking_at_keys_is_there_and_silent(
    make_sockets: MakeSockets, new_key: NewKey
) -> None:
    """With keys no handshake ends without the server's loop, so it is not taken for one with another key."""
    house = House(make_sockets, new_key)
    key = new_key("p0")
    house.sockets.authorise({"p0": key.public})
    assert house.sockets.zap is not None
    house.sockets.zap._loop.stop()
    channel = house.channel(key, limits=Limits(handshake=0.2))
    async with asyncio.timeout(30):
        while channel.trouble != SILENT:
            await asyncio.sleep(0)
    assert "shook hands" not in channel.story()
    with pytest.raises(PeerUnreachable, match=SILENT):
        await channel.up(0.01)
    house.sockets.zap._loop.start()
    await _says(house, channel, "it looks now")
    house.close()


async def test_a_key_taken_off_the_list_ends_what_it_could_do(
    make_sockets: MakeSockets, new_key: NewKey
) -> None:
    house = House(make_sockets, new_key)
    key, other = new_key("p0"), new_key("p1")
    house.sockets.authorise({"p0": key.public, "p1": other.public})
    channel, stays = house.channel(key), house.channel(other)
    await _says(house, channel, "before")
    await _says(house, stays, "before")
    house.sockets.authorise({"p1": other.public})
    channel.send(Text("after"))
    async with asyncio.timeout(30):
        error = await house.bad.get()
        assert isinstance(error, AccessDenied)
        await _says(house, stays, "after")
        # The connection is open, but all that comes by it is refused: to the server the peer is silent.
        peer, _ = await house.gone.get()
    assert peer.name == "p0"
    assert house.got.empty()
    house.close()


async def test_an_identity_is_not_taken_over_by_another_key(
    make_sockets: MakeSockets, new_key: NewKey
) -> None:
    house = House(make_sockets, new_key)
    key, thief = new_key("p0"), new_key("p1")
    house.sockets.authorise({"p0": key.public, "p1": thief.public})
    channel = house.channel(key)
    identity = await _says(house, channel, "mine")
    raw = make_sockets().context.socket(zmq.DEALER)
    raw.linger = 0
    raw.routing_id = identity  # which nobody but p0 and the server knows
    raw.curve_publickey, raw.curve_secretkey = thief.public.encode(), thief.secret.encode()
    raw.curve_serverkey = house.key.public.encode()
    raw.connect(house.server.address)
    raw.send_multipart([b"HAWK\x01\x01" + (5).to_bytes(8, "big") + bytes(8), CODEC.encode(Text("stolen"))])
    async with asyncio.timeout(30):
        error = await house.bad.get()
    assert isinstance(error, AccessDenied)
    assert house.got.empty()
    assert house.server.peers[identity].name == "p0"
    raw.close()
    house.close()


def test_two_names_for_one_key_are_refused(make_sockets: MakeSockets, new_key: NewKey) -> None:
    async def run() -> None:
        key = new_key("p0").public
        with pytest.raises(ConfigError, match="same key"):
            make_sockets(keys=new_key("d0")).authorise({"a": key, "b": key})

    asyncio.run(run())


async def test_a_request_that_is_none_is_denied(make_sockets: MakeSockets, new_key: NewKey) -> None:
    sockets = make_sockets(keys=new_key("d0"))
    sockets.authorise({})
    assert sockets.zap is not None
    asker = sockets.context.socket(zmq.DEALER)
    asker.linger = 0
    asker.connect(ZAP_ADDRESS)
    requests = [
        [b"", b"1.0", b"7", b"hawk", b"127.0.0.1", b"", b"NULL"],
        [b"", b"1.0", b"7", b"hawk", b"127.0.0.1", b"", b"PLAIN", b"user", b"password"],
        [b"", b"1.0", b"7", b"hawk", b"127.0.0.1", b"", b"CURVE", b"short"],
        [b"", b"1.0", b"7", b"other", b"127.0.0.1", b"", b"CURVE", bytes(32)],
        [b"", b"2.0", b"7", b"hawk", b"127.0.0.1", b"", b"CURVE", bytes(32)],
    ]
    for request in requests:
        asker.send_multipart(request)
    answered = 0
    async with asyncio.timeout(30):
        while answered < 4:
            await asyncio.sleep(0)
            while asker.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                assert asker.recv_multipart()[3] == b"400"
                answered += 1
    # The one with too many frames was dropped before it was looked at; its asker gives up by itself.
    assert sockets.zap.denied == {"bad-request": 4}
    asker.close()
