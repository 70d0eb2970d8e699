"""Jobs into memory of GPUs, whose driver is made up: over the cuda transport, and by way of the host over others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

import hawk
from hawk.agent import Agent
from hawk.client import Client
from hawk.errors import HawkError, VerificationFailed
from hawk.handles import DeviceCache
from hawk.jobs.gpus import Gpus
from hawk.memory import cuda_look
from hawk.memory.cuda import CudaMemory, device
from hawk.memory.region import ByteRanges
from hawk.transports.base import Viability
from hawk.transports.nixl import NixlTransport
from hawk.transports.nixl._agent import NixlAgent
from tests import fake_engines
from tests.end_to_end import caches as c
from tests.end_to_end.test_gpu import on_gpu
from tests.end_to_end.test_other_clients import embedded
from tests.fake_cuda import FakeCuda
from tests.fake_cuda_parts import Kernels
from tests.unit.retile.cuda.on_cpu import Kernels as Compiled

OVER_CUDA = '[transport]\nprefer = ["cuda", "tcp"]\n'
OVER_NIXL = '[transport]\nprefer = ["nixl", "tcp"]\n[transport.nixl]\n'
OVER_TCP = '[transport]\nprefer = ["tcp"]\n'
MEMORY = '[memory.npu0]\nkind = "cuda"\ngpu = 1\nchannels = 8\ncapacity = "6MiB"\nalignment = 64\n'
SECOND = "[transport.cuda]\ngpu = 1\n"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def driver(driver_with_rows: FakeCuda) -> Iterator[FakeCuda]:
    yield driver_with_rows
    assert not driver_with_rows.left()


@pytest.fixture
def kernels(driver: FakeCuda, compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels(driver, compiled)
    monkeypatch.setattr(Gpus, "make", staticmethod(lambda number: made))
    return made


class Pool:
    """A cache in memory of the GPU that stands in for a device, as `caches.check` looks at it."""

    def __init__(self, agent: Agent, cache: DeviceCache) -> None:
        assert cache.channels == []
        driver = device(1).driver
        regions = agent.memory("npu0").regions
        self.channels = [driver.at(r.address, r.nbytes) for r in regions]
        self.offsets, self.layout = cache.offsets, cache.layout
        c.paint(self)


@asynccontextmanager
async def scene(folder: Path, more: str) -> AsyncIterator[tuple[Client, Client, DeviceCache, Pool]]:
    """Two agents in this process, a client of each, and a target in channels on the second GPU."""
    far = more + MEMORY + (SECOND if "cuda" in more else "")
    async with embedded(folder, "p0", more=more) as p, embedded(folder, "d0", more=far) as d:
        async with hawk.connect(p) as hp, hawk.connect(d) as hd:
            target = await hd.allocate(c.target_spec(channels=8, align=64), memory="npu0")
            yield hp, hd, target, Pool(d, target)


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ("gpu", OVER_CUDA),
        ("other gpu", OVER_CUDA),
        ("other gpu", OVER_CUDA + "[integrity]\nscrub = true\n"),
        ("far gpu", OVER_CUDA),
        ("gpu", OVER_CUDA + '[integrity]\nverify = "full"\n'),
        ("other gpu", OVER_CUDA + '[integrity]\nverify = "sample"\n'),
        ("gpu", OVER_TCP + '[integrity]\nverify = "full"\n'),
        ("host", OVER_CUDA),
        ("gpu", OVER_CUDA + "[integrity]\nscrub = true\n"),
        ("gpu", OVER_TCP),
    ],
)
async def test_a_request_goes_into_channels_on_a_gpu(
    source: str, more: str, short_path: Path, driver: FakeCuda, kernels: Kernels
) -> None:
    host, spec = c.filled(), c.target_spec(channels=8, align=64)
    driver.devices, driver.apart = 3, {(2, 0)}
    async with scene(short_path, more) as (hp, hd, target, pool):
        number = {"gpu": 0, "other gpu": 1, "far gpu": 2}
        there = host if source == "host" else on_gpu(driver, host, number[source])
        cache = await hp.register(there)
        for number, tokens in enumerate((500, 37)):
            src, dst = c.tables(number, 0, 0, tokens, src=host.spec, dst=spec)
            c.paint(pool)
            offer = await hp.offer(f"r{number}", cache, src, tokens=tokens)
            ready = await hd.fetch(offer, into=target, blocks=dst, timeout="20s")
            assert ready.transport == ("tcp" if OVER_TCP in more else "cuda")
            assert ("verify" in ready.phases) == ("verify" in more)
            c.check(pool, spec, c.Moved(host, src, dst, 0, tokens), guards=[pool])
            assert await offer.ended() == "consumed"
        if OVER_CUDA in more and "verify" not in more and source != "host":
            assert ("to_host" in driver.counts) == (source == "far gpu"), "it goes by way of the host"
        await target.release()


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ("gpu", "gpu = 0\n"),
        ("gpu", 'direction = "push"\ntls = "tcp,cuda_copy"\ngpu = 0\n'),
        ("host", "gpu = 0\n"),
        ("gpu", ""),
    ],
)
async def test_a_request_goes_into_channels_on_a_gpu_over_nixl(
    source: str,
    more: str,
    short_path: Path,
    driver: FakeCuda,
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = {"package": fake_engines, "gpus_why": lambda tls: ""}
    monkeypatch.setattr(NixlTransport, "engine", lambda self: NixlAgent(self.config.tls, **made))
    monkeypatch.setattr(NixlTransport, "probe", classmethod(lambda cls: Viability(True)))
    host, spec = c.filled(), c.target_spec(channels=8, align=64)
    async with scene(short_path, OVER_NIXL + more) as (hp, hd, target, pool):
        cache = await hp.register(host if source == "host" else on_gpu(driver, host))
        src, dst = c.tables(1, 0, 0, 500, src=host.spec, dst=spec)
        offer = await hp.offer("r", cache, src, tokens=500)
        ready = await hd.fetch(offer, into=target, blocks=dst, timeout="20s")
        assert ready.transport == "nixl"
        c.check(pool, spec, c.Moved(host, src, dst, 0, 500), guards=[pool])
        if more and source == "gpu":
            assert "to_host" not in driver.counts, "it went by way of the host"
        await target.release()


async def test_a_byte_that_is_wrong_on_the_gpu_is_found(
    short_path: Path, driver: FakeCuda, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, spec = c.filled(), c.target_spec(channels=8, align=64)
    monkeypatch.setattr(cuda_look, "AT_ONCE", 10_000)
    async with scene(short_path, OVER_CUDA + '[integrity]\nverify = "full"\n') as (hp, hd, target, pool):
        cache = await hp.register(on_gpu(driver, host))
        src, dst = c.tables(1, 0, 0, 500, src=host.spec, dst=spec)
        flush = CudaMemory.flush

        async def spoils(self: CudaMemory, ranges: ByteRanges) -> None:
            await flush(self, ranges)
            region, start = int(ranges.region[-1]), int(ranges.start[-1] + ranges.nbytes[-1] - 1)
            driver.at(self.regions[region].address + start, 1)[0] ^= 1

        async def fetched(name: str) -> None:
            offer = await hp.offer(name, cache, src, tokens=500)
            await hd.fetch(offer, into=target, blocks=dst, timeout="20s")

        await fetched("right")
        c.check(pool, spec, c.Moved(host, src, dst, 0, 500), guards=[pool])
        monkeypatch.setattr(CudaMemory, "flush", spoils)
        with pytest.raises(VerificationFailed, match=r"what arrived is not what was sent.*npu0/channel"):
            await fetched("wrong")
        await target.release()


async def test_into_an_engines_own_cache_on_a_gpu(
    short_path: Path, driver: FakeCuda, kernels: Kernels
) -> None:
    host = c.filled()
    empty = hawk.KVCache.from_numpy([np.zeros_like(b) for b in host.buffers], host.spec)
    async with scene(short_path, OVER_CUDA) as (hp, hd, _, _):
        there = on_gpu(driver, empty, 1)
        target = await hd.register(there)
        source = await hp.register(on_gpu(driver, host))
        offer = await hp.offer("r", source, [3, 5], tokens=32)
        await hd.fetch(offer, into=target, blocks=[7, 1], timeout="20s")
        for buffer, array in zip(host.buffers, there.gpu_buffers, strict=True):
            pages = buffer.reshape(2, host.spec.blocks, -1)
            got = driver.at(array.address, array.nbytes).reshape(2, host.spec.blocks, -1)
            pages = pages.view(np.uint8).reshape(got.shape)
            assert np.array_equal(got[:, [7, 1]], pages[:, [3, 5]])
            assert not got[:, [0, 2, 6]].any()


async def test_without_peer_access_the_next_transport_is_agreed(
    short_path: Path, driver: FakeCuda, kernels: Kernels
) -> None:
    driver.apart = {(1, 0)}
    host, spec = c.filled(), c.target_spec(channels=8, align=64)
    async with scene(short_path, OVER_CUDA) as (hp, hd, target, pool):
        source = await hp.register(on_gpu(driver, host))
        src, dst = c.tables(1, 0, 0, 100, src=host.spec, dst=spec)
        offer = await hp.offer("r", source, src, tokens=100)
        ready = await hd.fetch(offer, into=target, blocks=dst, timeout="20s")
        assert ready.transport == "tcp"
        c.check(pool, spec, c.Moved(host, src, dst, 0, 100), guards=[pool])


async def test_a_peer_can_try_the_transport(short_path: Path, driver: FakeCuda, kernels: Kernels) -> None:
    far = OVER_CUDA + SECOND
    async with embedded(short_path, "p0", more=OVER_CUDA) as p:
        peer = f'[peers]\np0 = "{p.control_address}"\n'
        async with embedded(short_path, "d0", more=far + peer) as d, hawk.connect(d) as hd:
            tries = {each.transport: each for each in await hd.try_peer("p0")}
            assert tries["cuda"].ok, tries
            driver.fail["to_device", driver.counts["to_device"] + 1] = 801
            tries = {each.transport: each for each in await hd.try_peer("p0")}
            assert "refused a call" in tries["cuda"].text
            assert tries["tcp"].ok


async def test_a_cancelled_fetch_leaves_nothing_on_its_way_up(
    short_path: Path, driver: FakeCuda, kernels: Kernels
) -> None:
    host, spec = c.filled(), c.target_spec(channels=8, align=64)
    async with scene(short_path, OVER_TCP) as (hp, hd, target, _):
        source = await hp.register(host)
        src, dst = c.tables(1, 0, 0, 500, src=host.spec, dst=spec)
        for turns in (1, 20, 60):
            offer = await hp.offer(f"r{turns}", source, src, tokens=500)
            fetch = asyncio.ensure_future(hd.fetch(offer, into=target, blocks=dst, timeout="20s").result())
            for _ in range(turns):
                await asyncio.sleep(0)
            fetch.cancel()
            with pytest.raises((asyncio.CancelledError, HawkError)):
                await fetch
            await offer.withdraw()


async def test_copies_to_ordinary_memory_for_comparison(
    short_path: Path, driver: FakeCuda, kernels: Kernels
) -> None:
    host, spec = c.filled(), c.target_spec(channels=8, align=64)
    more = OVER_TCP + '[arena]\nsize = "4MiB"\npinned = false\n'
    driver.fail["pin", 1] = 801
    async with embedded_with(short_path, more) as (hp, hd, target, pool):
        source = await hp.register(on_gpu(driver, host))
        src, dst = c.tables(1, 0, 0, 100, src=host.spec, dst=spec)
        offer = await hp.offer("r", source, src, tokens=100)
        await hd.fetch(offer, into=target, blocks=dst, timeout="20s")
        c.check(pool, spec, c.Moved(host, src, dst, 0, 100), guards=[pool])
    assert "pin" not in driver.counts


@asynccontextmanager
async def embedded_with(folder: Path, more: str) -> AsyncIterator[tuple[Client, Client, DeviceCache, Pool]]:
    """`scene`, with an `[arena]` of its own."""
    from hawk.config import load_config

    agents = []
    for name, extra in (("p0", ""), ("d0", MEMORY)):
        path = folder / f"{name}.toml"
        head = f'[agent]\nname = "{name}"\nlocal = "ipc://{folder}/{name}.sock"\ninsecure = true\n'
        path.write_text(head + '[jobs]\nchunk = "64KiB"\n' + more + extra)
        agents.append(Agent(load_config(path, {})[0]))
    p, d = agents
    async with p, d, hawk.connect(p) as hp, hawk.connect(d) as hd:
        target = await hd.allocate(c.target_spec(channels=8, align=64), memory="npu0")
        yield hp, hd, target, Pool(d, target)


async def test_chunks_leave_nothing_on_the_gpu_where_the_arena_is_scrubbed(
    short_path: Path, driver: FakeCuda, kernels: Kernels
) -> None:
    more, host = OVER_CUDA + "[integrity]\nscrub = true\n", c.filled()
    async with embedded(short_path, "p0", more=more) as p, hawk.connect(p) as hp:
        async with embedded(short_path, "d0", more=more + MEMORY + SECOND) as d, hawk.connect(d) as hd:
            spec = c.target_spec(channels=8, align=64)
            target = await hd.allocate(spec, memory="npu0")
            shadow = p.transports["cuda"].shadow
            assert shadow is not None
            there = driver.at(shadow.address, shadow.nbytes)
            assert not there.any()
            source = await hp.register(on_gpu(driver, host))
            src, dst = c.tables(1, 0, 0, 100, src=host.spec, dst=spec)
            offer = await hp.offer("r", source, src, tokens=100)
            await hd.fetch(offer, into=target, blocks=dst, timeout="20s")
            await offer.ended()
            assert not there.any()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_range_that_cannot_be_zeroed_comes_back_once_it_can(
    times: int, short_path: Path, driver: FakeCuda, kernels: Kernels
) -> None:
    more = OVER_CUDA + "[integrity]\nscrub = true\n"
    host, spec = c.filled(), c.target_spec(channels=8, align=64)
    async with (
        embedded(short_path, "p0", more=more) as p,
        embedded(short_path, "d0", more=more + MEMORY) as d,
    ):
        async with hawk.connect(p) as hp, hawk.connect(d) as hd:
            target = await hd.allocate(spec, memory="npu0")
            pool, source = Pool(d, target), await hp.register(host)
            src, dst = c.tables(1, 0, 0, 100, src=host.spec, dst=spec)
            before = driver.counts.get("fill", 0)
            driver.fail = {("fill", before + number): 801 for number in range(1, times + 1)}
            p._quarantine._interval = 0.01
            offer = await hp.offer("r", source, src, tokens=100)
            await hd.fetch(offer, into=target, blocks=dst, timeout="20s")
            assert await offer.ended() == "consumed"
            c.check(pool, spec, c.Moved(host, src, dst, 0, 100), guards=[pool])
            arena = p.arena.allocator
            async with asyncio.timeout(20):
                while arena.free_bytes < arena.nbytes:
                    await asyncio.sleep(0.005)
            shadow = p.transports["cuda"].shadow
            assert shadow is not None
            assert not driver.at(shadow.address, shadow.nbytes).any()
