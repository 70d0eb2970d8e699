"""Links: what they refuse, bound and clean up."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import zmq

from hawk.control.frames import Header, Kind, encode_header
from hawk.control.link import State
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
from tests.descriptors import fds
from tests.unit.control.ends import CODEC, SLOW, Ends, MakeSockets, Text


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
            except Busy:  # the end was not heard yet
                pass
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
    before = fds()
    for _ in range(3):
        asyncio.run(once())
    assert fds() == before


def test_errors_of_a_link_are_control_errors() -> None:
    for error in (BadFrame, Busy, PeerLost, PeerUnreachable, VersionMismatch):
        assert issubclass(error, ControlError)
        assert issubclass(error, HawkError)
