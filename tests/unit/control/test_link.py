import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from hawk.control.channel import SILENT
from hawk.control.link import Beat, Peer, State
from hawk.control.sockets import Limits
from hawk.errors import (
    Busy,
    ControlError,
    PeerLost,
    PeerUnreachable,
)
from tests.unit.control.ends import SLOW, Ends, Text


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


async def test_who_is_there_and_says_nothing_is_told_from_nobody(ends: Ends, address: str) -> None:
    server = ends.server(address)
    server._receive.stop()  # a program that is busy: its connections are made without it
    channel = ends.channel(server.address)
    async with asyncio.timeout(30):
        while channel.reason != SILENT:
            await asyncio.sleep(0)
    with pytest.raises(PeerUnreachable, match=SILENT):
        await channel.up(0.01)
    server._receive.start()
    await channel.up(30)


async def test_a_connection_that_came_before_anyone_looked_is_known(ends: Ends, address: str) -> None:
    server = ends.server(address)
    server._receive.stop()
    endpoint = ends.make_sockets(insecure=True).dealer(server.address)
    async with asyncio.timeout(30):
        while (
            not endpoint.raw.getsockopt(zmq.EVENTS) & zmq.POLLOUT
        ):  # nothing can be sent before the handshake
            await asyncio.sleep(0)
        channel = ends.channel(endpoint, beat=SLOW)
        while "shook hands" not in channel.story():
            await asyncio.sleep(0)
    assert channel.reason == SILENT


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


async def test_who_does_not_come_to_reading_takes_nobody_for_silent(ends: Ends, address: str) -> None:
    """Each message takes the server longer than a beat, and twelve peers take turns at being read."""
    import time

    server = ends.server(address, beat=Beat(interval=0.01, timeout=0.05))
    heard: list[str] = []

    def slow(_: bytes, __: object, message: Text) -> None:
        time.sleep(0.02)
        heard.append(message.text)

    server._handler = slow
    channels = [ends.channel(server.address, beat=SLOW) for _ in range(12)]
    for channel in channels:
        await channel.up(30)
    for channel in channels:
        for _ in range(3):
            channel.send(Text(channel.endpoint.raw.routing_id.hex()))
    async with asyncio.timeout(30):
        while len(heard) < 36:
            await asyncio.sleep(0)
            told = [ends.events.get_nowait()[0] for _ in range(ends.events.qsize())]
            assert "gone" not in told
    assert len(set(heard)) == 12


async def test_a_connection_that_ended_is_noticed_long_before_silence_is(ends: Ends, address: str) -> None:
    server = ends.server(address, beat=Beat(interval=0.05, timeout=3600.0))
    channel = ends.channel(server.address)
    await channel.up(30)
    channel.close()
    _, _, error = await ends.next("gone")
    assert "not connected" in str(error)
    assert server.peers == {}
