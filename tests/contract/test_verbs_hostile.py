"""A peer of verbs that was let in, and is hostile or broken: what it says costs the read or the link at fault alone."""

import asyncio
import contextlib
import dataclasses
import errno
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from hawk.errors import PeerUnreachable, TransferFailed
from hawk.memory.region import Segments
from hawk.transports.testing import LIMIT, SharedArena, Targets
from hawk.transports.verbs import VerbsConfig, VerbsTransport, _session, _wire
from hawk.transports.verbs._device import VerbsError
from hawk.transports.verbs.testing import LIMITS, FakeDriver
from tests.contract.test_verbs_strangers import (
    ARENA,
    SEGMENTS,
    cut_off,
    dial,
    frame,
    hello,
    honest,
    queue,
    reads,
    serving,
)

WIDE = dataclasses.replace(LIMITS, max_send_wr=256)


@contextlib.asynccontextmanager
async def answered(change: Any) -> AsyncIterator[tuple[VerbsTransport, Any, bytes]]:
    """A link whose server's answers to Enter are changed on their way."""
    async with serving() as (transport, key), honest() as reading:
        session_write = _session._wire.write

        def write(writer: asyncio.StreamWriter, message: Any) -> None:
            session_write(writer, change(message) if isinstance(message, _wire.Entered) else message)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_session._wire, "write", write)
            link = await reading.connect(transport.endpoint, timeout=LIMIT)
            yield reading, link, key


@pytest.mark.parametrize(
    "changes",
    [
        {"keys": [[1 << 32]]},
        {"keys": [[-1]]},
        {"base": (1 << 64) - 1},
        {"base": (1 << 63) - 1},
        {"base": -5},
        {"windows": [1 << 63]},
        {"windows": [-1]},
        {"windows": [512 << 10]},
        {"windows": [0, 0], "keys": [[1, 2]]},
        {"windows": [], "keys": [[]]},
        {"offset": (1 << 63)},
        {"nbytes": (1 << 63)},
        {"queues": []},
        {"keys": [[1, 2]]},
    ],
)
async def test_a_server_whose_answers_make_no_sense_fails_the_read_alone(changes: dict[str, Any]) -> None:
    lying = True

    def lie(entered: _wire.Entered) -> _wire.Entered:
        return msgspec.structs.replace(entered, **changes) if lying else entered

    async with answered(lie) as (_, link, key):
        with pytest.raises(TransferFailed, match="makes no sense"):
            await link.read(key, SEGMENTS, Targets([200_000]).regions, timeout=LIMIT)
        lying = False
        await link.read(key, SEGMENTS, Targets([5000]).regions, timeout=LIMIT)


async def test_a_server_that_changes_its_mind_about_a_grant_fails_the_read() -> None:
    """Its first answer has keys for no queue pair of now, its second other windows: the read ends, and soon."""
    count = 0

    def lie(entered: _wire.Entered) -> _wire.Entered:
        nonlocal count
        count += 1
        if count == 1:
            halves = [0, ARENA // 2]
            return msgspec.structs.replace(
                entered, windows=halves, keys=[[1, 2]], queues=[entered.queues[0] ^ 1]
            )
        return entered

    async with answered(lie) as (_, link, key):
        segments = Segments.of([(0, 0, ARENA - 5000, 5000)])
        with pytest.raises(TransferFailed, match="makes no sense"):
            await link.read(key, segments, Targets([5000]).regions, timeout=LIMIT)


async def test_a_reader_that_asks_twice_for_a_fresh_queue_pair_leaves_none_behind() -> None:
    async with serving() as (transport, key), honest() as reading:
        assert isinstance(transport.driver, FakeDriver)
        (device,) = transport.driver.opened
        reader, writer = await dial(transport)
        writer.write(hello(transport, [queue(), queue()]))
        writer.write(b"".join(frame(_wire.Renew(i, i % 2, queue(number=6 + i))) for i in range(12)))
        async with asyncio.timeout(LIMIT):
            for _ in range(13):  # the welcome, and an answer to each
                (length,) = struct.unpack("<I", await reader.readexactly(4))
                said = msgspec.msgpack.decode(await reader.readexactly(length))
                assert said["type"] in ("welcome", "renewed")
            assert len(device.queues) == 2
            writer.close()
            while device.queues:
                await asyncio.sleep(0)
        await reads(reading, transport, key)


async def test_a_queue_pair_that_cannot_be_destroyed_is_not_forgotten() -> None:
    async with serving() as (transport, _):
        assert isinstance(transport.driver, FakeDriver)
        (device,) = transport.driver.opened
        reader, writer = await dial(transport)
        writer.write(hello(transport))
        async with asyncio.timeout(LIMIT):
            while not device.queues:
                await asyncio.sleep(0)
            (old,) = device.queues.values()
            closing, refused = old.close, []

            def close() -> None:
                if not refused:
                    refused.append(True)
                    raise VerbsError(errno.EBUSY, "ibv_destroy_qp")
                closing()

            old.close = close
            writer.write(frame(_wire.Renew(1, 0, queue(number=9))))
            while not refused:
                await asyncio.sleep(0)
            writer.write(frame(_wire.Renew(2, 0, queue(number=9))))
            kinds = []
            for _ in range(3):
                (length,) = struct.unpack("<I", await reader.readexactly(4))
                kinds.append(msgspec.msgpack.decode(await reader.readexactly(length))["type"])
            assert kinds == ["welcome", "refused", "renewed"]
            assert old.number not in device.queues
        writer.close()


async def test_a_grant_of_too_many_windows_is_refused_and_the_link_stands() -> None:
    """Its answer would not fit into a frame: the setting that makes so many is named."""
    config = VerbsConfig(queue_pairs=32, slice=1 << 16)
    arena = SharedArena(32 << 20)
    sides = [VerbsTransport(config, driver=FakeDriver(limits=WIDE)) for _ in range(2)]
    for side in sides:
        await side.start()
    sides[0].serve(arena.region)
    link = await sides[1].connect(sides[0].endpoint, timeout=LIMIT)
    grant = sides[0].grant(0, 32 << 20)
    sides[0].expect(grant, sides[1].endpoint)
    with pytest.raises(TransferFailed, match=r"transport\.verbs\.slice"):
        await link.read(grant.key, SEGMENTS, Targets([5000]).regions, timeout=LIMIT)
    await link.read(sides[0].grant(0, 1 << 20).key, SEGMENTS, Targets([5000]).regions, timeout=LIMIT)
    for side in reversed(sides):
        await side.close()
    arena.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"port": "1" * 5000},
        {"ports": "1" * 5000},
        {"port": "٣" * 3},
        {"host": "a" * 300},
        {"host": "a..b"},
        {"host": "x\0y"},
        {"host": "\ud800"},
        {"token": "é" * 32},
    ],
)
async def test_an_endpoint_that_is_none_is_no_peer(changes: dict[str, str]) -> None:
    async with serving() as (transport, _), honest() as reading:
        endpoint = {**transport.endpoint, **changes}
        reading.reachable(endpoint)
        with pytest.raises(PeerUnreachable):
            await reading.connect(endpoint, timeout=LIMIT)


async def test_who_calls_itself_another_is_told_of_nothing() -> None:
    """Any agent that both know has the reader's token too; what was granted to that reader stays closed to it."""
    async with serving() as (transport, _), honest() as reading:
        assert isinstance(transport.driver, FakeDriver)
        (device,) = transport.driver.opened
        name = _wire.reader_id(bytes.fromhex(reading.endpoint["token"]))
        reader, writer = await dial(transport)
        writer.write(hello(transport, reader=name))
        async with asyncio.timeout(LIMIT):
            (length,) = struct.unpack("<I", await reader.readexactly(4))
            await reader.readexactly(length)
            link = await reading.connect(transport.endpoint, timeout=LIMIT)
            first, second = transport.grant(0, ARENA), transport.grant(0, ARENA)
            transport.expect(first, reading.endpoint)
            await link.read(first.key, SEGMENTS, Targets([5000]).regions, timeout=LIMIT)
            transport.expect(second, reading.endpoint)
            while not link._dialogue._announced:  # type: ignore[attr-defined]
                await asyncio.sleep(0)
            await transport.close()
            assert await cut_off(reader) == b"", "nothing was said to it"
        assert device.left == 0
        writer.close()
