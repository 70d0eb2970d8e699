"""Processes that stand still or are killed: the other side goes on, and nothing lands late."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("nixl")
pytest.importorskip("mooncake.engine")

from hawk.errors import DeadlineExceeded, TransferFailed
from hawk.memory.region import Region, Segments
from hawk.transports import registry
from hawk.transports.base import Transport
from hawk.transports.testing import SharedArena, Targets, pattern

NBYTES = 64 << 20
WAYS: dict[str, tuple[str, dict[str, object]]] = {
    "pull": ("nixl", {"tls": "tcp", "direction": "pull"}),
    "push": ("nixl", {"tls": "tcp", "direction": "push"}),
    "shared": ("nixl", {}),
    "mooncake": ("mooncake", {"stall_timeout": 3.0}),
}

SERVE = """
import asyncio, json, sys
from hawk.transports import registry
from hawk.transports.testing import SharedArena
async def main(name, settings):
    made, arena = registry.make(name, registry.configure(name, settings)), SharedArena(NBYTES)
    await made.start()
    made.serve(arena.region)
    print(json.dumps([made.endpoint, made.grant(0, NBYTES).key.hex()]), flush=True)
    await asyncio.sleep(100)
asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
""".replace("NBYTES", str(NBYTES))

READ = """
import asyncio, json, sys
import numpy as np
from hawk.memory.region import Region, Segments
from hawk.transports import registry
async def main(name, settings, endpoint, key):
    made = registry.make(name, registry.configure(name, settings))
    await made.start()
    link = await made.connect(endpoint, timeout=60.0)
    region = Region("target", np.zeros(NBYTES, np.uint8))
    while True:
        await link.read(bytes.fromhex(key), Segments.of([(0, 0, 0, NBYTES)]), [region], timeout=60.0)
        print("read", flush=True)
asyncio.run(main(sys.argv[1], *map(json.loads, sys.argv[2:5])))
""".replace("NBYTES", str(NBYTES))


def made(way: str) -> Transport:
    name, settings = WAYS[way]
    return registry.make(name, registry.configure(name, settings))


def child(code: str, way: str, *arguments: object) -> subprocess.Popen[bytes]:
    name, settings = WAYS[way]
    words = [name, json.dumps(settings), *(json.dumps(each) for each in arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    return subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, env=environment)


def heard(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def aborted(process: subprocess.Popen[bytes]) -> bool:
    """Whether a library has ended it, or does so now."""
    try:
        return process.wait(timeout=5.0) == -signal.SIGABRT
    except subprocess.TimeoutExpired:
        return False


@pytest.mark.parametrize("way", ["pull", "push", "mooncake"])
async def test_a_server_that_stands_still_ends_the_read_and_writes_nothing_later(way: str) -> None:
    server = child(SERVE, way)
    reading = made(way)
    try:
        endpoint, key = json.loads(await asyncio.to_thread(heard, server))
        await reading.start()
        link = await reading.connect(endpoint, timeout=60.0)
        array = np.zeros(NBYTES, np.uint8)
        rows = Segments.of([(0, 0, 0, NBYTES)])
        await link.read(bytes.fromhex(key), rows, [Region("target", array)], timeout=60.0)
        assert (array == pattern(NBYTES)).all()
        reading_on = asyncio.create_task(
            link.read(bytes.fromhex(key), rows, [Region("target", array)], timeout=1.0)
        )
        await asyncio.sleep(0)
        server.send_signal(signal.SIGSTOP)
        (outcome,) = await asyncio.gather(reading_on, return_exceptions=True)
        # It may have ended before the server was stopped; late is what it is otherwise.
        assert outcome is None or isinstance(outcome, (DeadlineExceeded, TransferFailed)), repr(outcome)
        array[:] = 0x5A
        server.send_signal(signal.SIGCONT)
        if link.broken:
            await link.close()
            link = await reading.connect(endpoint, timeout=60.0)
        other = np.zeros(NBYTES, np.uint8)
        try:
            await link.read(bytes.fromhex(key), rows, [Region("other", other)], timeout=60.0)
        except TransferFailed:
            if way == "pull" and await asyncio.to_thread(aborted, server):
                pytest.xfail("UCX ended the process that it had to answer a READ from: docs/transports.md")
            raise
        assert (other == pattern(NBYTES)).all()
        assert (array == 0x5A).all()
    finally:
        await reading.close()
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()


@pytest.mark.parametrize("way", list(WAYS))
async def test_a_reader_that_is_killed_costs_nobody_else_anything(way: str) -> None:
    serving, reading, arena = made(way), made(way), SharedArena(NBYTES)
    try:
        await serving.start()
        serving.serve(arena.region)
        grants = [serving.grant(0, NBYTES) for _ in range(2)]
        reader = child(READ, way, serving.endpoint, grants[0].key.hex())
        assert await asyncio.to_thread(heard, reader) == b"read\n"
        reader.kill()
        reader.wait()
        assert reader.stdout is not None
        reader.stdout.close()
        await reading.start()
        link = await reading.connect(serving.endpoint, timeout=60.0)
        targets, rows = Targets([NBYTES]), Segments.of([(0, 0, 0, NBYTES)])
        await link.read(grants[1].key, rows, targets.regions, timeout=60.0)
        targets.check(rows, arena.region.array)
        assert serving.trouble() is None
        for grant in grants:
            while not await serving.revoke(grant):
                pass
        await link.close()
    finally:
        await reading.close()
        await serving.close()
        arena.close()
