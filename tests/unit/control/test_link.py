import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from hawk.control.frames import Codec, Header, Kind, encode_header
from hawk.control.link import Beat, Channel, Peer, Server, State
from hawk.control.sockets import Limits, Sockets
from hawk.errors import (
    BadFrame,
    Busy,
    ControlError,
    HawkError,
    PeerLost,
    PeerUnreachable,
    VersionMismatch,
)

MakeSockets = Callable[..., Sockets]


class Text(msgspec.Struct, tag=True):
    text: str
    blob: bytes = b""


CODEC: Codec[Text] = Codec(msgspec.msgpack.Decoder(Text))
QUICK = Beat(interval=0.05, timeout=0.5)
SLOW = Beat(interval=30.0, timeout=300.0)


class Ends:
    """Servers and channels of one test, with everything they said in one queue."""

    def __init__(self, make_sockets: MakeSockets) -> None:
        self.make_sockets = make_sockets
        self.events: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.open: list[Server[Text] | Channel[Text]] = []

    def server(self, address: str, *, echo: bool = False, **kw: Any) -> Server[Text]:
        put = self.events.put_nowait

        def take(identity: bytes, header: Header, message: Text) -> None:
            if echo:
                made.send(identity, message)
            put(("server", message.text, identity, header))

        made: Server[Text] = Server(
            self.make_sockets(insecure=True).router(address),
            CODEC,
            take,
            on_bad=lambda identity, error: put(("bad", error, identity)),
            on_gone=lambda peer, error: put(("gone", peer, error)),
            **{"beat": QUICK, **kw},
        )
        made.start()
        self.open.append(made)
        return made

    def channel(self, address: str, *, limits: Limits | None = None, **kw: Any) -> Channel[Text]:
        put = self.events.put_nowait
        made: Channel[Text] = Channel(
            self.make_sockets(insecure=True, limits=limits).dealer(address),
            CODEC,
            lambda header, message: put(("channel", message.text, header)),
            on_lost=lambda error: put(("lost", error)),
            on_restarted=lambda old, new: put(("restarted", old, new)),
            on_up=lambda: put(("up",)),
            on_bad=lambda error: put(("bad-channel", error)),
            **{"peer": "d0", "beat": QUICK, **kw},
        )
        made.start()
        self.open.append(made)
        return made

    async def next(self, kind: str) -> tuple[Any, ...]:
        """The next event of a kind; others are passed over."""
        async with asyncio.timeout(30):
            while True:
                event = await self.events.get()
                if event[0] == kind:
                    return event


@pytest.fixture
async def ends(make_sockets: MakeSockets) -> AsyncIterator[Ends]:
    made = Ends(make_sockets)
    yield made
    for end in made.open:
        end.close()
        end.close()


@pytest.fixture(params=["tcp", "ipc"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/s"


async def test_messages_go_both_ways_with_generations(ends: Ends, address: str) -> None:
    server = ends.server(address, echo=True, own_generation=77)
    channel = ends.channel(server.address, own_generation=55)
    with pytest.raises(PeerUnreachable):
        channel.send(Text("too early"))
    await channel.up(30)
    assert channel.state is State.UP
    channel.send(Text("hello", b"\x00" * 100_000))
    _, text, identity, header = await ends.next("server")
    assert (text, header.from_generation, header.to_generation) == ("hello", 55, 77)
    _, text, header = await ends.next("channel")
    assert (text, header.from_generation, header.to_generation) == ("hello", 77, 55)
    assert server.peers[identity].generation == 55
    server.forget(identity)
    assert not server.peers


async def test_the_order_of_many_messages(ends: Ends, address: str) -> None:
    server = ends.server(address)
    channel = ends.channel(server.address)
    await channel.up(30)
    sent = 0
    while sent < 2000:
        try:
            channel.send(Text(str(sent)))
            sent += 1
        except Busy:
            await asyncio.sleep(0)
    for number in range(2000):
        assert (await ends.next("server"))[1] == str(number)


async def test_nobody_there(ends: Ends) -> None:
    channel = ends.channel("tcp://127.0.0.1:1")
    with pytest.raises(PeerUnreachable, match=r"peer=d0, address=tcp://127\.0\.0\.1:1"):
        await channel.up(0.1)
    _, error = await ends.next("lost")
    assert isinstance(error, PeerUnreachable)
    assert channel.state is State.LOST


async def test_a_killed_server_is_lost_once_and_its_successor_is_told_apart(
    ends: Ends, tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/s"
    code = (
        "import asyncio, sys, msgspec\n"
        "from hawk.control.frames import Codec\n"
        "from hawk.control.link import Server\n"
        "from hawk.control.sockets import Sockets\n"
        "async def main():\n"
        "    class Text(msgspec.Struct, tag=True): text: str\n"
        "    def nothing(*_): pass\n"
        "    codec = Codec(msgspec.msgpack.Decoder(Text))\n"
        "    Server(Sockets().router(sys.argv[1]), codec, nothing, on_bad=nothing, on_gone=nothing).start()\n"
        "    print('up', flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )

    def start() -> subprocess.Popen[bytes]:
        child = subprocess.Popen([sys.executable, "-c", code, address], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        return child

    channel = ends.channel(address, beat=Beat(interval=0.2, timeout=60))
    generations = []
    for round_ in range(2):
        with start() as child:
            await ends.next("up")
            generations.append(channel.peer_generation)
            if round_ == 0:
                child.send_signal(signal.SIGKILL)
                # The broken connection tells it; the silence alone would take a minute.
                _, error = await ends.next("lost")
                assert isinstance(error, PeerLost)
                with pytest.raises(PeerLost):
                    channel.send(Text("into the void"))
            else:
                child.kill()
    assert generations[0] != generations[1]
    told = [ends.events.get_nowait() for _ in range(ends.events.qsize())]
    assert not [event for event in told if event[0] == "lost"]


async def test_a_port_that_first_spoke_junk(ends: Ends) -> None:
    # ZeroMQ never connects again to who broke the protocol; a program that is just being replaced may have.
    met = asyncio.Event()

    async def junk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x00JUNK" + bytes(48))
        await writer.drain()
        await reader.read()
        writer.close()
        met.set()

    other = await asyncio.start_server(junk, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{other.sockets[0].getsockname()[1]}"
    channel = ends.channel(address, limits=Limits(reconnect_most=0.1), beat=SLOW)
    async with asyncio.timeout(30):
        await met.wait()
    other.close()
    await other.wait_closed()
    ends.server(address)  # asyncio's port, unlike ZeroMQ's, is free now
    await channel.up(30)


async def test_a_restart_is_told_before_the_first_message(ends: Ends, address: str) -> None:
    server = ends.server(address, own_generation=1)
    channel = ends.channel(server.address, beat=Beat(interval=0.05, timeout=60))
    await channel.up(30)
    where = server.address
    server.close()
    async with asyncio.timeout(30):
        while True:
            try:
                ends.server(where, own_generation=2, echo=True)
            except ControlError:  # ZeroMQ's thread has not closed the port yet
                await asyncio.sleep(0)
            else:
                break
    assert await ends.next("restarted") == ("restarted", 1, 2)
    assert channel.peer_generation == 2


async def test_silence_is_told_on_both_sides(ends: Ends, address: str) -> None:
    server = ends.server(address)
    channel = ends.channel(server.address)
    await channel.up(30)
    # Neither end reads any more, though the connection stands: each must find out by itself.
    other_server_loop, channel_loop = server._receive, channel._receive
    other_server_loop.stop()
    _, error = await ends.next("lost")
    assert isinstance(error, PeerLost)
    other_server_loop.start()
    await ends.next("up")
    channel_loop.stop()
    channel._timer.cancel()  # type: ignore[union-attr]
    _, peer, error = await ends.next("gone")
    assert isinstance(peer, Peer)
    assert isinstance(error, PeerLost)
    assert not server.peers


async def test_a_pause_of_ones_own_loop_is_not_the_peers_death(ends: Ends, address: str) -> None:
    import time

    beat = Beat(interval=0.05, timeout=0.3)
    server = ends.server(address, beat=beat)
    channel = ends.channel(server.address, beat=beat)
    await channel.up(30)
    time.sleep(1.0)  # noqa: ASYNC251 - the loop stands still, and that is the point
    channel.send(Text("still"))
    async with asyncio.timeout(30):
        while (event := await ends.events.get())[0] != "server":
            assert event[0] == "up"


async def test_bad_frames_are_told_and_cost_nobody_else(ends: Ends, address: str) -> None:
    server = ends.server(address, own_generation=9)
    good = ends.channel(server.address)
    await good.up(30)
    raw = ends.make_sockets(insecure=True).context.socket(zmq.DEALER)
    raw.linger = 0
    raw.routing_id = b"bad"
    raw.connect(server.address)
    head = encode_header(Header(1, Kind.MESSAGE, 5, 0))
    body = CODEC.encode(Text("x"))
    for frames in (
        [b"junk", b"junk"],
        [head],
        [head, body, body],
        [head, b"\xc1"],
        [head, body[:-1]],
        [encode_header(Header(1, Kind.PING, 5, 0)), b"\xc0"],
        [b"HAWK\x07\x01" + bytes(16), body],
        [encode_header(Header(1, Kind.MESSAGE, 5, 8)), body],
    ):
        raw.send_multipart(frames)
    kinds = [(await ends.next("bad"))[1:] for _ in range(8)]
    assert [type(error) for error, _ in kinds] == [BadFrame] * 6 + [VersionMismatch, PeerLost]
    assert {identity for _, identity in kinds} == {b"bad"}
    good.send(Text("fine"))
    assert (await ends.next("server"))[1] == "fine"
    raw.close()


async def test_a_liar_about_its_generation_is_another_peer(ends: Ends, address: str) -> None:
    server = ends.server(address, beat=SLOW)
    raw = ends.make_sockets(insecure=True).context.socket(zmq.DEALER)
    raw.linger = 0
    raw.routing_id = b"two"
    raw.connect(server.address)
    for number in (5, 6):
        raw.send_multipart([encode_header(Header(1, Kind.MESSAGE, number, 0)), CODEC.encode(Text("x"))])
    _, peer, error = await ends.next("gone")
    assert (peer.generation, type(error)) == (5, PeerLost)
    assert (await ends.next("server"))[3].from_generation == 6
    raw.close()


async def test_peers_are_bounded(ends: Ends, address: str) -> None:
    server = ends.server(address, max_peers=1, beat=SLOW)
    await ends.channel(server.address, beat=SLOW).up(30)
    second = ends.channel(server.address, beat=SLOW)
    _, error, _ = await ends.next("bad")
    assert isinstance(error, Busy)
    assert second.state is State.CONNECTING
    assert len(server.peers) == 1


async def test_a_peer_that_does_not_read_becomes_busy(ends: Ends, address: str) -> None:
    server = ends.server(address, beat=SLOW)
    channel = ends.channel(server.address, beat=SLOW, limits=Limits(receive_queue=4))
    await channel.up(30)
    channel.send(Text("here"))
    identity = (await ends.next("server"))[2]
    channel._receive.stop()

    def flood() -> None:
        for _ in range(2000):
            server.send(identity, Text("x", bytes(1 << 20)))

    with pytest.raises(Busy):
        flood()


async def test_sending_to_one_who_left(ends: Ends, address: str) -> None:
    server = ends.server(address, beat=SLOW)
    channel = ends.channel(server.address, beat=SLOW)
    await channel.up(30)
    channel.send(Text("here"))
    identity = (await ends.next("server"))[2]
    channel.close()
    with pytest.raises(ControlError, match="closed"):
        channel.send(Text("x"))
    with pytest.raises(ControlError, match="closed"):
        await channel.up(1)
    async with asyncio.timeout(30):
        while identity in server.peers:
            try:
                server.send(identity, Text("x"))
            except PeerLost:
                break
            await asyncio.sleep(0)
    assert (await ends.next("gone"))[1].identity == identity
    with pytest.raises(PeerLost):
        server.send(identity, Text("x"))


async def test_closing_a_channel_ends_its_waits(ends: Ends) -> None:
    channel = ends.channel("tcp://127.0.0.1:1", beat=SLOW)
    waiting = asyncio.create_task(channel.up(60))
    await asyncio.sleep(0)
    channel.close()
    with pytest.raises(ControlError, match="closed"):
        await waiting


@pytest.mark.parametrize(
    ("server_version", "channel_version", "spoken"), [(1, 2, 1), (2, 1, 1), (4, 4, 4), (4, 3, 3)]
)
async def test_neighbouring_versions_talk(
    ends: Ends, address: str, server_version: int, channel_version: int, spoken: int
) -> None:
    server = ends.server(address, version=server_version, echo=True)
    channel = ends.channel(server.address, version=channel_version)
    await channel.up(30)
    channel.send(Text("hello"))
    assert (await ends.next("server"))[3].version == spoken
    assert (await ends.next("channel"))[2].version == spoken


@pytest.mark.parametrize(("server_version", "channel_version"), [(1, 3), (3, 1), (1, 255)])
async def test_versions_too_far_apart_say_so(
    ends: Ends, address: str, server_version: int, channel_version: int
) -> None:
    server = ends.server(address, version=server_version)
    channel = ends.channel(server.address, version=channel_version)
    with pytest.raises(VersionMismatch, match=f"got {server_version}"):
        await channel.up(30)
    with pytest.raises(VersionMismatch):
        channel.send(Text("x"))
    _, error = await ends.next("lost")
    assert isinstance(error, VersionMismatch)


async def test_a_cancelled_wait_leaves_nothing(ends: Ends) -> None:
    channel = ends.channel("tcp://127.0.0.1:1", beat=SLOW)
    waiting = asyncio.create_task(channel.up(60))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not channel._waiters


def test_both_kinds_of_loop(runner: asyncio.Runner, make_sockets: MakeSockets, tmp_path: Path) -> None:
    async def run() -> None:
        ends = Ends(make_sockets)
        server = ends.server(f"ipc://{tmp_path}/s", echo=True)
        channel = ends.channel(server.address)
        await channel.up(30)
        channel.send(Text("hello"))
        assert (await ends.next("channel"))[1] == "hello"
        for end in ends.open:
            end.close()

    runner.run(run())


def test_links_leave_no_descriptor(tmp_path: Path) -> None:
    async def once() -> None:
        made: list[Sockets] = []

        def make(**kw: Any) -> Sockets:
            made.append(Sockets(**kw))
            return made[-1]

        ends = Ends(make)
        server = ends.server(f"ipc://{tmp_path}/s", echo=True)
        channel = ends.channel(server.address)
        await channel.up(30)
        for end in ends.open:
            end.close()
        for sockets in made:
            sockets.close()

    asyncio.run(once())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        asyncio.run(once())
    assert len(os.listdir("/proc/self/fd")) == before


def test_errors_of_a_link_are_control_errors() -> None:
    for error in (BadFrame, Busy, PeerLost, PeerUnreachable, VersionMismatch):
        assert issubclass(error, ControlError)
        assert issubclass(error, HawkError)
