"""Last words are read before the connection that brought them ends."""

from __future__ import annotations

from tests.unit.control.ends import Ends, Text


async def test_what_was_said_last_is_read_before_the_end(ends: Ends, address: str) -> None:
    server = ends.server(address)
    channel = ends.channel(server.address)
    await channel.up(30)
    channel.send(Text("hello"))
    _, _, identity, _ = await ends.next("server")
    for number in range(50):
        server.send(identity, Text(str(number)))
    await server.read_by_all(30)
    server.close()
    for number in range(50):
        assert (await ends.next("channel"))[1] == str(number)


async def test_nobody_to_wait_for(ends: Ends, address: str) -> None:
    server = ends.server(address)
    await server.read_by_all(30)
    channel = ends.channel(server.address)
    await channel.up(30)
    channel.close()
    await server.read_by_all(0.05)  # bounded, though nobody answers
    assert not server._unread
