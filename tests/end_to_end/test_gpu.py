"""The whole job from the memory of a GPU, whose driver is made up and whose kernels a processor runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

import hawk
from hawk import blocking
from hawk.agent import sessions
from hawk.client import Client
from hawk.control.messages import BufferRef
from hawk.errors import (
    Aborted,
    DeviceLost,
    HawkMemoryError,
    InvalidArgument,
    RegistrationFailed,
)
from hawk.handles import DeviceCache
from hawk.jobs.gpus import AHEAD, LANES, Gpus
from hawk.layouts import Layout
from tests.end_to_end import caches as c
from tests.end_to_end.harness import AgentProcess, clients
from tests.end_to_end.test_layouts import INTERLEAVED, QUANTISED
from tests.end_to_end.test_other_clients import embedded
from tests.fake_cuda import FakeCuda
from tests.fake_cuda_parts import Gate, Kernels
from tests.unit.retile.cuda.on_cpu import Kernels as Compiled

ILLEGAL = 700


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def nothing_is_left(driver: FakeCuda) -> Iterator[None]:
    yield
    assert not driver.left()


@pytest.fixture
def kernels(driver: FakeCuda, compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    made = Kernels(driver, compiled)
    monkeypatch.setattr(Gpus, "make", staticmethod(lambda number: made))
    return made


def on_gpu(driver: FakeCuda, cache: hawk.KVCache, device: int = 0) -> hawk.KVCache:
    """A cache of the same bytes in the memory of the GPU."""
    arrays = [driver.tensor(buffer.view(np.uint16), device, kind="test") for buffer in cache.buffers]
    return hawk.KVCache.from_cuda(arrays, cache.spec)


@asynccontextmanager
async def scene(folder: Path, more: str = "") -> AsyncIterator[tuple[Client, Client, DeviceCache]]:
    """Two agents in this process, a client of each, and the target."""
    async with embedded(folder, "p0", more=more) as p, embedded(folder, "d0", memory=True, more=more) as d:
        async with hawk.connect(p) as hp, hawk.connect(d) as hd:
            yield hp, hd, await hd.allocate(c.target_spec(), memory="npu0")


async def reached(condition: object, what: str) -> None:
    """Until something is so that nobody tells of."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)
    assert condition(), what


async def test_an_arena_that_cannot_be_locked(short_path: Path, driver: FakeCuda, kernels: Kernels) -> None:
    driver.fail["pin", 1] = 801
    host = c.filled()
    async with scene(short_path) as (hp, hd, device):
        source = await hp.register(on_gpu(driver, host))
        src, dst = c.tables(5, 0, 0, 300, src=host.spec, dst=c.target_spec())
        c.paint(device)
        offer = await hp.offer("r", source, src, tokens=300)
        await hd.fetch(offer, into=device, blocks=dst, timeout="20s")
        c.check(device, c.target_spec(), c.Moved(host, src, dst, 0, 300), guards=[device])


@pytest.mark.parametrize("more", ["", '[transport]\nprefer = ["tcp"]\n', "[integrity]\nscrub = true\n"])
async def test_a_request_goes_from_a_gpu_into_an_npu(
    more: str, short_path: Path, driver: FakeCuda, kernels: Kernels
) -> None:
    host = c.filled()
    async with scene(short_path, more) as (hp, hd, device):
        source = await hp.register(on_gpu(driver, host))
        assert driver.counts["pin"] == 1
        for number, tokens in enumerate((500, 37, 64)):
            src, dst = c.tables(number, 0, 0, tokens, src=host.spec, dst=c.target_spec())
            c.paint(device)
            offer = await hp.offer(f"r{number}", source, src, tokens=tokens)
            ready = await hd.fetch(offer, into=device, blocks=dst, timeout="20s")
            assert ready.tokens == tokens
            c.check(device, c.target_spec(), c.Moved(host, src, dst, 0, tokens), guards=[device])
            assert await offer.ended() == "consumed"
        assert kernels.launched > 3  # several chunks
        assert driver.counts["allocate"] == 1  # room on the GPU is taken once
        assert list(driver.priorities.values()).count(-1) == LANES
        await source.release()
        again = await hp.register(on_gpu(driver, host))
        await again.release()
        assert (driver.counts["allocate"], driver.counts["pin"]) == (1, 1)
        await device.release()


async def test_kernels_wait_for_the_layers_that_they_read_and_no_others(
    short_path: Path, driver: FakeCuda, kernels: Kernels
) -> None:
    host, engine = c.filled(), driver.make_stream()
    empty = hawk.KVCache.from_numpy([np.zeros_like(b) for b in host.buffers], host.spec)
    there = on_gpu(driver, empty)
    async with scene(short_path) as (hp, hd, device):
        source = await hp.register(there)
        src, dst = c.tables(1, 0, 0, 128, src=host.spec, dst=c.target_spec())
        offer = await hp.offer("r", source, src, tokens=128, layers_ready=0)
        gates = []
        for layer in range(c.LAYERS):
            gates.append(Gate(driver, engine))
            array, want = there.gpu_buffers[layer], host.buffers[layer]
            to = driver.at(array.address, array.nbytes)
            driver.put_plain(engine, lambda to=to, want=want: np.copyto(to, want))
            # Said long before it is true: the GPU waits, nobody else.
            await offer.layers_ready(layer + 1, after=engine)
        c.paint(device)
        fetch = asyncio.ensure_future(hd.fetch(offer, into=device, blocks=dst, timeout="20s").result())
        for layer, gate in enumerate(gates):
            await reached(
                lambda n=layer + 1: driver.counts.get("synchronise", 0) >= n, "the GPU is waited for"
            )
            done = driver.counts.get("synchronised", 0)
            assert done <= layer
            gate.open()
        await fetch
        c.check(device, c.target_spec(), c.Moved(host, src, dst, 0, 128), guards=[device])
        assert driver.counts["synchronised"] >= c.LAYERS, "a chunk for each layer"
        driver.end_stream(engine)


async def test_scales_are_made_as_those_of_memory_of_the_host(
    short_path: Path, driver: FakeCuda, kernels: Kernels
) -> None:
    """Any bits at all of bf16 become int8 under scales of their own."""
    there = QUANTISED.format(more=INTERLEAVED, place="page", order="head slot dim")
    dst, host = c.target_spec(layout=Layout.from_toml(there), codec=None), c.filled()
    async with scene(short_path) as (hp, hd, _):
        device = await hd.allocate(dst, memory="npu0")
        src, into = c.tables(1, 0, 0, 100, src=host.spec, dst=dst)
        seen = []
        for cache in (host, on_gpu(driver, host)):
            source = await hp.register(cache)
            c.paint(device)
            offer = await hp.offer("r", source, src, tokens=100)
            await hd.fetch(offer, into=device, blocks=into, timeout="20s")
            seen.append([channel.copy() for channel in device.channels])
            await source.release()
        assert kernels.launched > 0
        for got, want in zip(seen[1], seen[0], strict=True):
            assert np.array_equal(got, want)


async def test_chunks_are_made_ahead_and_leave_room_for_another_job(
    short_path: Path, driver: FakeCuda, kernels: Kernels
) -> None:
    host, engine = c.filled(), driver.make_stream()
    gate = Gate(driver, engine)
    async with scene(short_path) as (hp, hd, device):
        source = await hp.register(on_gpu(driver, host))
        src, dst = c.tables(1, 0, 0, 128, src=host.spec, dst=c.target_spec())
        offer = await hp.offer("r", source, src, tokens=128, after=engine)
        c.paint(device)
        fetch = asyncio.ensure_future(hd.fetch(offer, into=device, blocks=dst, timeout="20s").result())
        await reached(lambda: driver.counts.get("synchronise", 0) == AHEAD, "a chunk is made ahead")
        quick = await hp.offer("quick", source, [1], tokens=16)
        other = sorted(set(range(c.target_spec().blocks)) - set(dst))[:1]
        await hd.fetch(quick, into=device, blocks=other, timeout="20s")
        assert not fetch.done()
        gate.open()
        await fetch
        moved = [c.Moved(host, src, dst, 0, 128), c.Moved(host, [1], other, 0, 16)]
        c.check(device, c.target_spec(), *moved, guards=[device])
        assert driver.counts["synchronise"] >= AHEAD + c.LAYERS, (
            "chunks of a layer, and those of the other job"
        )
        driver.end_stream(engine)


async def test_marks_of_every_kind(short_path: Path, driver: FakeCuda, kernels: Kernels) -> None:
    host, engine = c.filled(), driver.make_stream()
    event = driver.make_event(engine)

    class Stream:
        ptr = engine

    class Event:
        cuda_event = event

    class Unrecorded:
        cuda_event = 0

    async with scene(short_path) as (hp, hd, device):
        source = await hp.register(on_gpu(driver, host))
        plain = await hp.register(c.filled())
        for after in (None, engine, 0, Stream(), Event()):
            offer = await hp.offer("r", source, [1], tokens=16, after=after)
            await hd.fetch(offer, into=device, blocks=[0], timeout="20s")
            assert await offer.ended() == "consumed"
        assert list(driver.priorities.values()).count(1) == 1, (
            "what waits for an event stands in no kernel's way"
        )
        for wrong in ("now", -1, True, Unrecorded(), object()):
            with pytest.raises(InvalidArgument, match="after: nothing that a GPU can wait for"):
                await hp.offer("w", source, [1], tokens=16, after=wrong)
        with pytest.raises(InvalidArgument, match="after: only what a GPU writes can be waited for"):
            await hp.offer("w", plain, [1], tokens=16, after=engine)
        with pytest.raises(InvalidArgument):
            await hp.offer("w", source, [1], tokens=0, after=engine)
        offer = await hp.offer("late", source, [1], tokens=16, layers_ready=0)
        mark = offer.mark(engine)
        with pytest.raises(InvalidArgument):
            await offer.layers_ready(99, after=mark)
        await offer.layers_ready(1, after=engine)
        await offer.withdraw()
        driver.end_stream(engine)
        driver.drop(event)


async def test_a_lost_gpu_costs_its_own_jobs(short_path: Path, driver: FakeCuda, kernels: Kernels) -> None:
    host = c.filled()
    async with scene(short_path) as (hp, hd, device):
        source = await hp.register(on_gpu(driver, host))
        plain = await hp.register(host)
        src, dst = c.tables(2, 0, 0, 128, src=host.spec, dst=c.target_spec())
        other = await hp.offer("other", plain, src, tokens=128, layers_ready=1)
        waiting = asyncio.ensure_future(hd.fetch(other, into=device, blocks=dst, timeout="20s").result())
        idle = await hp.offer("idle", source, [9], tokens=16)
        offer = await hp.offer("r", source, [1], tokens=16)
        driver.fail["synchronised", 1] = ILLEGAL
        with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"):
            await hd.fetch(offer, into=device, blocks=[13], timeout="20s")
        assert {await offer.ended(), await idle.ended()} == {"withdrawn"}
        with pytest.raises(DeviceLost):
            await hp.register(on_gpu(driver, host))
        with pytest.raises(DeviceLost):
            await hp.offer("again", source, [1], tokens=16)
        await other.layers_ready(c.LAYERS)
        assert (await waiting).tokens == 128
        assert (await hp.status()).caches == 2
        await source.release()
    driver.forget_lost()


async def test_errors_of_the_kernels_library_are_told(
    short_path: Path, driver: FakeCuda, kernels: Kernels
) -> None:
    class Library(Exception):
        status = 1

    async with scene(short_path) as (hp, hd, device):
        source = await hp.register(on_gpu(driver, c.filled()))
        kernels.fail = Library("CUDA_ERROR_INVALID_VALUE")
        offer = await hp.offer("r", source, [1], tokens=16)
        with pytest.raises(HawkMemoryError, match="kernels cannot be started; got CUDA_ERROR_INVALID_VALUE"):
            await hd.fetch(offer, into=device, blocks=[1], timeout="20s")
        kernels.fail = None
        assert (await hd.fetch(offer, into=device, blocks=[1], timeout="20s")).tokens == 16
        kernels.fail = Library("CUDA_ERROR_ILLEGAL_ADDRESS")
        kernels.fail.status = ILLEGAL
        offer = await hp.offer("r2", source, [1], tokens=16)
        with pytest.raises(DeviceLost):
            await hd.fetch(offer, into=device, blocks=[1], timeout="20s")
    driver.forget_lost()


async def test_an_aborted_job_waits_for_the_gpu(short_path: Path, driver: FakeCuda, kernels: Kernels) -> None:
    host, engine = c.filled(), driver.make_stream()
    async with scene(short_path) as (hp, hd, device):
        source = await hp.register(on_gpu(driver, host))
        gate = Gate(driver, engine)
        offer = await hp.offer("r", source, [1], tokens=16, after=engine)
        fetch = hd.fetch(offer, into=device, blocks=[1], timeout="20s")
        await fetch.start()
        await reached(lambda: driver.counts.get("synchronise", 0), "the GPU is waited for")
        await fetch.abort()
        with pytest.raises(Aborted):
            await fetch.result()
        gone = asyncio.ensure_future(offer.withdraw())
        await asyncio.sleep(0)
        assert (await hp.status()).serving == 1
        assert not gone.done(), "the source is still read"
        gate.open()
        await gone
        driver.end_stream(engine)


async def test_what_cannot_be_is_refused(short_path: Path, driver: FakeCuda, kernels: Kernels) -> None:
    host = c.filled()
    arrays = [driver.tensor(b.view(np.uint16), kind="test") for b in host.buffers]
    with pytest.raises(InvalidArgument, match=r"arrays\[1\]: the arrays are on several GPUs; got cuda:1"):
        hawk.KVCache.from_cuda(
            [arrays[0], driver.tensor(host.buffers[1].view(np.uint16), 1, kind="test"), arrays[2]], host.spec
        )
    with pytest.raises(InvalidArgument, match=r"arrays\[0\]\.dtype: the spec stores its elements as bf16"):
        hawk.KVCache.from_cuda(
            [driver.tensor(b.view(np.float16), kind="test") for b in host.buffers], host.spec
        )
    with pytest.raises(InvalidArgument, match="buffers"):
        hawk.KVCache.from_cuda(arrays[:2], host.spec)
    there = hawk.KVCache.from_cuda(arrays, host.spec)
    assert "on cuda:0" in repr(there)
    with pytest.raises(InvalidArgument, match="in memory of a GPU"):
        there.array(0)
    there.close()
    assert "closed" in repr(there)


def test_buffers_are_in_one_memory_and_of_the_agents_own_process() -> None:
    on_a_gpu, on_another, on_host = (BufferRef(bytes(16), 64, 4096, 64, gpu) for gpu in (0, 1, -1))
    shared = BufferRef(b"x" * 16, 64, 0, 64, 0)
    assert sessions._gpu_of([on_a_gpu, on_a_gpu], True) == 0
    assert sessions._gpu_of([on_host], False) == -1
    for refs, field in (([on_a_gpu, on_another], 1), ([on_host, on_a_gpu], 1)):
        with pytest.raises(
            RegistrationFailed, match=rf"buffers\[{field}\]: the buffers of a cache are in one memory"
        ):
            sessions._gpu_of(refs, True)
    for refs, here in (([on_a_gpu], False), ([shared], True)):
        with pytest.raises(RegistrationFailed, match=r"belongs to another process.*hawk\.Agent"):
            sessions._gpu_of(refs, here)


async def test_another_process_retiles_no_memory_of_a_gpu(driver: FakeCuda, prefill: AgentProcess) -> None:
    async with clients(prefill) as (hp,):
        with pytest.raises(RegistrationFailed, match=r"memory of cuda:0.*hawk\.Agent"):
            await hp.register(on_gpu(driver, c.filled()))


async def test_the_blocking_client_marks_in_its_own_thread(
    short_path: Path, driver: FakeCuda, kernels: Kernels
) -> None:
    host, engine = c.filled(), driver.make_stream()
    async with scene(short_path) as (_, hd, device):
        loop = asyncio.get_running_loop()
        ticket = loop.create_future()

        def offered() -> str:
            with blocking.connect(f"ipc://{short_path}/p0.sock") as client:
                cache = client.register(on_gpu(driver, host))
                offer = client.offer("r", cache, [1], tokens=16, layers_ready=0)
                offer.layers_ready(1, after=engine)
                offer.layers_ready(c.LAYERS)
                loop.call_soon_threadsafe(ticket.set_result, str(offer))
                return offer.ended(timeout=20)

        work = asyncio.ensure_future(asyncio.to_thread(offered))
        c.paint(device)
        await hd.fetch(await ticket, into=device, blocks=[1], timeout="20s")
        assert await work == "consumed"
        c.check(device, c.target_spec(), c.Moved(host, [1], [1], 0, 16), guards=[device])
    driver.end_stream(engine)
