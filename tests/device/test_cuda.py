"""The cuda transport on real GPUs: between two where there are two, else between two ways of one."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys

import numpy as np
import pytest

import hawk
from hawk.errors import TransferFailed
from hawk.jobs import gpus
from hawk.memory import cuda_driver, cuda_rows
from hawk.memory.cuda import CudaMemory, device
from hawk.memory.region import Region, Segments
from hawk.transports.cuda import CudaConfig, CudaTransport
from hawk.transports.testing import scatter
from tests.end_to_end import caches as c
from tests.end_to_end.test_other_clients import embedded

ARENA = 48 << 20

SERVES = """
import asyncio, json, sys
from tests.device import test_cuda
asyncio.run(test_cuda.serve_in_child())
"""


def last() -> int:
    """The reader's GPU."""
    return cuda_driver.load().device_count() - 1


def moved(number: int, address: int, host: np.ndarray, *, up: bool) -> np.ndarray:
    with device(number).current() as driver:
        event = driver.event()
        if up:
            driver.to_device(address, host.ctypes.data, host.nbytes, 0)
        else:
            driver.to_host(host.ctypes.data, address, host.nbytes, 0)
        driver.record(event, 0)
        driver.synchronise(event)
        driver.drop_event(event)
    return host


def content() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, ARENA, np.uint8)


async def served() -> tuple[CudaTransport, bytes]:
    transport = CudaTransport(CudaConfig(gpu=0))
    await transport.start()
    transport.serve(Region("arena", np.zeros(ARENA, np.uint8)))
    shadow = transport.shadow
    assert shadow is not None
    moved(0, shadow.address, content(), up=True)
    return transport, transport.grant(0, ARENA).key


async def serve_in_child() -> None:
    transport, key = await served()
    print(json.dumps([transport.endpoint, key.hex()]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    "lengths", [[2048] * 4000, [1, 2, 3, 17, 4095, 65537, (3 << 20) + 1] * 3, [8 << 20] * 3]
)
@pytest.mark.parametrize("where", ["gpu", "host"])
async def test_rows_arrive_and_nothing_else_changes(where: str, lengths: list[int], kernels: bool) -> None:
    serving, key = await served()
    reading = CudaTransport(CudaConfig(gpu=last(), kernels=kernels, chunk=4 << 20))
    await reading.start()
    segments, sizes = scatter(lengths, 3, seed=1)
    arrays = [np.full(size, 0xA5, np.uint8) for size in sizes]
    expected, source = [a.copy() for a in arrays], content()
    columns = (segments.region, segments.local, segments.remote, segments.nbytes)
    for region, local, remote, nbytes in zip(*(x.tolist() for x in columns), strict=True):
        expected[region][local : local + nbytes] = source[remote : remote + nbytes]
    memory = CudaMemory("target", capacity=3 * max(sizes), gpu=last(), channels=3, alignment=1)
    try:
        link = await reading.connect(serving.endpoint, timeout=10.0)
        if where == "host":
            await link.read(key, segments, [Region(f"r{i}", a) for i, a in enumerate(arrays)], timeout=20.0)
        else:
            for region, array in zip(memory.regions, arrays, strict=True):
                moved(last(), region.address, array, up=True)
            await link.read(key, segments, memory.regions, timeout=20.0)
            for region, array in zip(memory.regions, arrays, strict=True):
                moved(last(), region.address, array, up=False)
            assert not kernels or cuda_rows.kernel(device(last())) is not None, "CuPy is here to compile it"
            assert reading.busy() > 0
    finally:
        await reading.close()
        await serving.close()
        memory.close()
    for got, right in zip(arrays, expected, strict=True):
        assert np.array_equal(got, right)


def started() -> subprocess.Popen:
    command = [sys.executable, "-c", SERVES]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def test_a_sender_in_another_process_is_killed() -> None:
    child = started()
    reading = CudaTransport(CudaConfig(gpu=last()))
    await reading.start()
    memory = CudaMemory("target", capacity=ARENA, gpu=last())
    try:
        endpoint, key = json.loads(await asyncio.to_thread(child.stdout.readline))
        link = await reading.connect(endpoint, timeout=10.0)
        whole = Segments.of([(0, 0, 0, ARENA)])
        await link.read(bytes.fromhex(key), whole, memory.regions, timeout=20.0)
        got = moved(last(), memory.regions[0].address, np.empty(ARENA, np.uint8), up=False)
        assert np.array_equal(got, content())
        tasks = [
            asyncio.ensure_future(link.read(bytes.fromhex(key), whole, memory.regions, timeout=20.0))
            for _ in range(20)
        ]
        await asyncio.sleep(0)
        child.send_signal(signal.SIGKILL)
        child.wait()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(end is None or isinstance(end, TransferFailed) for end in ends), ends
        with pytest.raises(TransferFailed):
            await link.read(bytes.fromhex(key), whole, memory.regions, timeout=20.0)
        assert device(last()).lost is None
        assert np.array_equal(
            moved(last(), memory.regions[0].address, np.empty(ARENA, np.uint8), up=False), content()
        )
    finally:
        child.kill()
        child.communicate()
        await reading.close()
        memory.close()


@pytest.mark.parametrize("over", ["cuda", "tcp", "shm"])
@pytest.mark.parametrize("source", ["gpu", "other gpu", "host"])
@pytest.mark.parametrize("verify", ["off", "full"])
async def test_the_whole_job_into_channels_on_a_gpu(
    short_path, over: str, source: str, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "other gpu" and last() == 0:
        pytest.skip("there is one GPU")
    lifted: list[int] = []
    lift = gpus.lift
    monkeypatch.setattr(gpus, "lift", lambda *a: lifted.append(1) or lift(*a))
    host, spec = c.filled(), c.target_spec(channels=8, align=64)
    memory = (
        f'[memory.npu0]\nkind = "cuda"\ngpu = {last()}\nchannels = 8\ncapacity = "6MiB"\nalignment = 64\n'
    )
    prefer = f'[transport]\nprefer = ["{over}"]\n[integrity]\nverify = "{verify}"\n'
    far = prefer + f"[transport.cuda]\ngpu = {last()}\n" + memory
    async with embedded(short_path, "p0", more=prefer) as p, embedded(short_path, "d0", more=far) as d:
        async with hawk.connect(p) as hp, hawk.connect(d) as hd:
            target = await hd.allocate(spec, memory="npu0")
            regions = d.memory("npu0").regions
            cache = host
            if source != "host":
                import cupy

                with cupy.cuda.Device(last() if source == "other gpu" else 0) as where:
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
            ready = await hd.fetch(offer, into=target, blocks=dst, timeout="20s")
            assert ready.transport == over
            assert ("verify" in ready.phases) == (verify == "full")
            assert not lifted or source == "host", "peers reach each other: nothing goes by way of the host"
            for region, array in zip(regions, seen.channels, strict=True):
                moved(last(), region.address, array, up=False)
            c.check(seen, spec, c.Moved(host, src, dst, 0, 500), guards=[seen])
