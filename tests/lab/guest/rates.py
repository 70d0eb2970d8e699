"""Rates between two guests: HAWK's reads, pulled and pushed, and perftest's programs in turn, so that all meet the same
weather.

Shown with `scripts/vm-lab run rates -- -s`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections.abc import Iterator

import pytest

from hawk.bench.verbs import rate
from hawk.transports.testing import SharedArena
from hawk.transports.verbs import VerbsConfig, VerbsTransport
from tests.lab.guest.meet import Meeting
from tests.lab.guest.perf import perftest
from tests.lab.guest.rdma import node

SIZES = (64 << 10, 256 << 10, 1 << 20)
NBYTES = 16 << 20
RUNS = 5
QUEUE_PAIRS = 1
"""As perftest has it here: with two it ended by an error over Soft-RoCE."""

PORT = 18710
LIMIT = 120.0


@pytest.fixture(scope="module")
def meeting() -> Iterator[Meeting]:
    with Meeting() as made:
        yield made


def _show(size: int, rows: dict[str, list[float]]) -> None:
    for name in ("ib_read_bw", "ib_write_bw"):
        for way in ("hawk", "hawk, pushed"):
            rows[f"{way} / {name}"] = [a / b for a, b in zip(rows[way], rows[name], strict=True)]
    for name, values in rows.items():
        print(
            f"{size:>8} {name:<24} median {statistics.median(values):8.2f}, {min(values):.2f} to {max(values):.2f}"
        )


async def test_rates(meeting: Meeting) -> None:
    found: dict[int, dict[str, list[float]]] = {size: {} for size in SIZES}
    port = PORT
    for size in SIZES:
        arena = SharedArena(NBYTES)
        settings = VerbsConfig(message=2 * size, queue_pairs=QUEUE_PAIRS)
        ways = {"hawk": settings, "hawk, pushed": dataclasses.replace(settings, direction="push")}
        transports, links = {}, {}
        for way, config in ways.items():
            transport = transports[way] = VerbsTransport(config)
            await transport.start()
            transport.serve(arena.region)
            key = transport.grant(0, NBYTES).key.hex()
            theirs = meeting.exchange({"endpoint": transport.endpoint, "key": key})
            if node() == 2:
                link = await transport.connect(theirs["endpoint"], timeout=LIMIT)
                links[way] = link, bytes.fromhex(theirs["key"])
        for _ in range(RUNS):
            for way, (link, key_of) in links.items():
                read = await rate(link, key_of, size, NBYTES)
                found[size].setdefault(way, []).append(NBYTES / read.seconds / 1e6)
                found[size].setdefault(f"{way}, CPU s/GiB", []).append(read.cpu / NBYTES * 2**30)
            await asyncio.to_thread(meeting.exchange)
            for program in ("ib_read_bw", "ib_write_bw"):
                port += 1
                said = await asyncio.to_thread(perftest, meeting, program, size, NBYTES // size, port)
                found[size].setdefault(program, []).append(said)
        if links:
            _show(size, found[size])
            assert [transports[way].counts()["read-pushed"] for way in ways] == [0, 2 * RUNS]
        for link, _ in links.values():
            await link.close()
        await asyncio.to_thread(meeting.exchange)
        for transport in transports.values():
            await transport.close()
        arena.close()
