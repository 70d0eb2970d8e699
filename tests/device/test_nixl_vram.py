"""nixl with memory of GPUs, by the real NIXL: between two GPUs where there are two, else within one.

Needs `nixl` in the Python that runs it.  What UCX cannot do here fails by saying why, it is not skipped.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("nixl")

import hawk
from hawk.jobs.lifting import Landings
from hawk.memory.cuda import CudaMemory
from hawk.memory.region import Region, Segments
from hawk.transports.nixl import NixlConfig, NixlTransport
from tests.device.test_cuda import last, moved
from tests.end_to_end import caches as c
from tests.end_to_end.test_other_clients import embedded

ARENA = 96 << 20
ROWS = {
    "one": np.full(1, ARENA),
    "long": np.full(ARENA // (8 << 20), 8 << 20),
    "short": np.full(ARENA // (16 << 10), 16 << 10),
}
WAYS = {
    "all": {"tls": "", "direction": "pull"},
    "tcp, pulled": {"tls": "tcp,cuda_copy", "direction": "pull"},
    "tcp, pushed": {"tls": "tcp,cuda_copy", "direction": "push"},
}

SERVES = """
import asyncio, json, sys
from tests.device import test_nixl_vram
asyncio.run(test_nixl_vram.serve_in_child(json.loads(sys.argv[1]), int(sys.argv[2])))
"""


def content() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, ARENA, np.uint8)


async def serve_in_child(settings: dict[str, str], gpu: int) -> None:
    transport = NixlTransport(NixlConfig(gpu=gpu, **settings))  # type: ignore[arg-type]
    await transport.start()
    source = Region("arena", content())
    transport.serve(source)
    if gpu >= 0:
        assert transport.shadow is not None, (
            "the log above says why chunks are served from memory of the host"
        )
        moved(gpu, transport.shadow.address, source.array, up=True)
    print(json.dumps([transport.endpoint, transport.grant(0, ARENA).key.hex()]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


def started(way: str, gpu: int) -> subprocess.Popen:
    command = [sys.executable, "-c", SERVES, json.dumps(WAYS[way]), str(gpu)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def dealt(lengths: np.ndarray) -> Segments:
    """The arena's bytes in order, their places the last ones first."""
    remote = np.cumsum(lengths) - lengths
    local = ARENA - remote - lengths
    return Segments(np.zeros(len(lengths), np.int32), local, remote, lengths.astype(np.int64))


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("served", ["gpu", "host"])
async def test_rows_arrive_in_memory_of_a_gpu_and_nothing_else_changes(way: str, served: str) -> None:
    child = started(way, 0 if served == "gpu" else -1)
    reading = NixlTransport(NixlConfig(**WAYS[way]))  # type: ignore[arg-type]
    landings = Landings()
    memory = CudaMemory("target", capacity=ARENA, gpu=last())
    try:
        await reading.start()
        endpoint, key = json.loads(await asyncio.to_thread(child.stdout.readline))
        link = await reading.connect(endpoint, timeout=30.0)
        through = await landings.through(link, reading.capabilities, last())
        source, got = content(), np.empty(ARENA, np.uint8)
        for name, lengths in ROWS.items():
            rows = dealt(lengths)
            moved(last(), memory.regions[0].address, np.full(ARENA, 0xA5, np.uint8), up=True)
            for turn in range(2):  # the first one registers
                began = time.perf_counter()
                await through.read(bytes.fromhex(key), rows, memory.regions, timeout=60.0)
                rate = ARENA / (time.perf_counter() - began) / 1e9
                print(f"{way}, from the {served}, {name}, {'again' if turn else 'first'}: {rate:.2f} GB/s")
            assert link.into(last()), "the log above says why it went by way of the host"
            moved(last(), memory.regions[0].address, got, up=False)
            right = np.concatenate(
                [source[at : at + n] for at, n in zip(rows.remote, lengths, strict=True)][::-1]
            )
            assert np.array_equal(got, right), name
        host = np.zeros(ARENA, np.uint8)
        await link.read(bytes.fromhex(key), dealt(ROWS["long"]), [Region("host", host)], timeout=60.0)
        assert np.array_equal(host[-(8 << 20) :], source[: 8 << 20])
    finally:
        child.kill()
        child.communicate()
        await reading.close()
        landings.close()
        memory.close()


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("source", ["gpu", "host"])
async def test_the_whole_job_into_channels_on_a_gpu(short_path, way: str, source: str) -> None:
    host, spec = c.filled(), c.target_spec(channels=8, align=64)
    settings = "\n".join(f'{name} = "{value}"' for name, value in WAYS[way].items())
    near = f'[transport]\nprefer = ["nixl"]\n[transport.nixl]\n{settings}\ngpu = 0\n'
    far = near + (
        f'[memory.npu0]\nkind = "cuda"\ngpu = {last()}\nchannels = 8\ncapacity = "6MiB"\nalignment = 64\n'
    )
    async with embedded(short_path, "p0", more=near) as p, embedded(short_path, "d0", more=far) as d:
        assert p.transports["nixl"].shadow is not None, "the log says why"
        async with hawk.connect(p) as hp, hawk.connect(d) as hd:
            target = await hd.allocate(spec, memory="npu0")
            regions = d.memory("npu0").regions
            cache = host
            if source == "gpu":
                import cupy

                with cupy.cuda.Device(0) as where:
                    arrays = [cupy.asarray(buffer.view(np.uint16)) for buffer in host.buffers]
                    where.synchronize()
                cache = hawk.KVCache.from_cuda(arrays, host.spec)
            registered = await hp.register(cache)
            src, dst = c.tables(3, 0, 0, 500, src=host.spec, dst=spec)
            seen = type("Seen", (), {"offsets": target.offsets, "layout": target.layout})()
            seen.channels = [np.full(r.nbytes, c.CANARY, np.uint8) for r in regions]
            for region, array in zip(regions, seen.channels, strict=True):
                moved(last(), region.address, array, up=True)
            offer = await hp.offer("r", registered, src, tokens=500)
            ready = await hd.fetch(offer, into=target, blocks=dst, timeout="60s")
            assert ready.transport == "nixl"
            for region, array in zip(regions, seen.channels, strict=True):
                moved(last(), region.address, array, up=False)
            c.check(seen, spec, c.Moved(host, src, dst, 0, 500), guards=[seen])
