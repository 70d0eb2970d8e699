"""Rates between two guests: HAWK's reads, pulled and pushed, and perftest's programs in turn, so that all meet the same
weather.

Shown with `scripts/vm-lab run rates -- -s`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import subprocess
import time
from collections.abc import Iterator

import pytest

from hawk.bench.verbs import rate
from hawk.transports.testing import SharedArena
from hawk.transports.verbs import VerbsConfig, VerbsTransport
from tests.lab.guest.meet import Meeting
from tests.lab.guest.pair import listening
from tests.lab.guest.rdma import DEVICE, address, gid_index, node, open_device

SIZES = (64 << 10, 256 << 10, 1 << 20)
NBYTES = 16 << 20
RUNS = 5
QUEUE_PAIRS = 1
"""On both sides of the comparison; with two, perftest ended by an error over Soft-RoCE."""

PORT = 18710
LIMIT = 120.0


@pytest.fixture(scope="module")
def meeting() -> Iterator[Meeting]:
    with Meeting() as made:
        yield made


def perftest(meeting: Meeting, program: str, size: int, port: int) -> float:
    """MB/s that the program says of `NBYTES` bytes from one guest to the other, as the client has it."""
    context, _ = open_device()
    command = [program, "-d", DEVICE, "-x", str(gid_index(context)), "-p", str(port), "-F"]
    command += ["-s", str(size), "-q", str(QUEUE_PAIRS), "-n", str(NBYTES // size // QUEUE_PAIRS)]
    context.close()
    if node() == 1:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
            while not listening(port):
                assert server.poll() is None, server.communicate()[0]
                time.sleep(0.05)
            meeting.tell("listening")
            said, _ = server.communicate(timeout=LIMIT)
            assert server.returncode == 0, said
        return 0.0
    assert meeting.hear() == "listening"
    done = subprocess.run([*command, address(1)], capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [line.split() for line in done.stdout.splitlines() if line.strip().startswith(str(size))]
    return float(row[3]) * 2**20 / 1e6  # the mean, in its megabytes of 2^20


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
                said = await asyncio.to_thread(perftest, meeting, program, size, port)
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
