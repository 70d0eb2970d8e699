"""A connection of verbs that is reset: what it broke on keeps nothing, and asyncio has nothing to say of it."""

import asyncio
import gc
import logging
import socket
import struct
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from hawk.errors import TransferFailed
from hawk.memory.region import Segments
from hawk.transports.testing import LIMIT, SharedArena, Targets
from hawk.transports.verbs import VerbsConfig, VerbsTransport
from hawk.transports.verbs.testing import FakeDriver

ARENA = 1 << 16
WHOLE = Segments.of([(0, 0, 0, ARENA)])


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def reset(writer: asyncio.StreamWriter) -> None:
    """Has the end of this connection be a reset, as it is where something was under way."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def use(direction: str, by_reader: bool) -> list[weakref.ref[Any]]:
    """Reads over a link whose connection one side resets; the memory of both sides, which are closed."""
    arena, targets = SharedArena(ARENA), Targets([ARENA])
    config = VerbsConfig(direction=direction, queue_pairs=1)
    serving, reading = (VerbsTransport(config, driver=FakeDriver()) for _ in range(2))
    await serving.start()
    await reading.start()
    serving.serve(arena.region)
    link = await reading.connect(serving.endpoint, timeout=LIMIT)
    key = serving.grant(0, ARENA).key
    await link.read(key, WHOLE, targets.regions, timeout=LIMIT)
    server = serving._server
    assert server is not None
    (session,) = server.sessions
    async with asyncio.timeout(LIMIT):
        if by_reader:
            assert link._dialogue is not None
            reset(link._dialogue._writer)
            await link.close()
        else:
            reset(session._writer)
            await session.close()
            while not link.broken:
                await asyncio.sleep(0)
            with pytest.raises(TransferFailed):
                await link.read(key, WHOLE, targets.regions, timeout=LIMIT)
        while server.sessions:
            await asyncio.sleep(0)
    memory = [weakref.ref(region.array) for region in (arena.region, *targets.regions)]
    await reading.close()
    await serving.close()
    arena.close()
    return memory


@pytest.mark.parametrize("by_reader", [True, False], ids=["the-reader", "the-server"])
@pytest.mark.parametrize("direction", ["pull", "push"])
def test_a_reset_keeps_no_memory(direction: str, by_reader: bool, caplog: pytest.LogCaptureFixture) -> None:
    assert all(found() is None for found in asyncio.run(use(direction, by_reader)))
    with caplog.at_level(logging.ERROR, "asyncio"):
        gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]
