"""Caches on a real GPU: the whole job, what other processes see of its memory, and what is left when it is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

import cupy
import numpy as np
import pytest

import hawk
from hawk.errors import RegistrationFailed
from hawk.memory import cuda, cuda_arrays, cuda_share
from hawk.memory.cuda import CudaMemory
from hawk.memory.region import ByteRanges, Moves
from tests.end_to_end import caches as c
from tests.end_to_end.test_other_clients import embedded

torch = pytest.importorskip("torch")


class Capsules:
    """An array of which only DLPack is seen."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, stream=None):
        return self._array.__dlpack__(stream=stream)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def shaped(host, i):
    spec = host.spec
    shape = (2, spec.blocks, spec.block_size, spec.heads, spec.dim)
    return host.buffers[i].view(np.int16).reshape(shape)


def from_torch(host):
    tensors = [torch.from_numpy(shaped(host, i)).cuda().view(torch.bfloat16) for i in range(c.LAYERS)]
    return hawk.KVCache.from_torch(tensors)


def from_cupy(host):
    return hawk.KVCache.from_cuda([cupy.asarray(shaped(host, i)) for i in range(c.LAYERS)], host.spec)


def from_dlpack(host):
    arrays = [Capsules(cupy.asarray(shaped(host, i))) for i in range(c.LAYERS)]
    return hawk.KVCache.from_cuda(arrays, host.spec)


@pytest.fixture(params=["shm", "tcp"])
def more(request):
    return f'[transport]\nprefer = ["{request.param}"]\n'


@pytest.mark.parametrize("make", [from_torch, from_cupy, from_dlpack])
async def test_a_request_goes_from_a_gpu_into_an_npu(make, more, short_path):
    host = c.filled()
    there = make(host)
    async with (
        embedded(short_path, "p0", more=more) as p,
        embedded(short_path, "d0", memory=True, more=more) as d,
    ):
        async with hawk.connect(p) as hp, hawk.connect(d) as hd:
            for codec in ("bf16", "bfp8_b"):
                spec = c.target_spec(codec=codec)
                device = await hd.allocate(spec, memory="npu0")
                source = await hp.register(there)
                for number, tokens in enumerate((500, 37)):
                    src, dst = c.tables(number, 0, 0, tokens, src=host.spec, dst=spec)
                    c.paint(device)
                    offer = await hp.offer("r", source, src, tokens=tokens)
                    await hd.fetch(offer, into=device, blocks=dst, timeout="30s")
                    c.check(device, spec, c.Moved(host, src, dst, 0, tokens), guards=[device])
                    assert await offer.ended() == "consumed"
                await source.release()
                await device.release()
            assert p.gpus._pinned is not None
            print("the arena's pages are locked:", p.gpus._pinned.why or "yes")


async def test_layers_that_are_written_later(short_path):
    host = c.filled()
    tensors = [torch.zeros(shaped(host, i).shape, dtype=torch.int16, device="cuda") for i in range(c.LAYERS)]
    filled = [torch.from_numpy(shaped(host, i)).cuda() for i in range(c.LAYERS)]
    there = hawk.KVCache.from_torch([t.view(torch.bfloat16) for t in tensors])
    a = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    async with embedded(short_path, "p0") as p, embedded(short_path, "d0", memory=True) as d:
        async with hawk.connect(p) as hp, hawk.connect(d) as hd:
            device = await hd.allocate(c.target_spec(), memory="npu0")
            source = await hp.register(there)
            src, dst = c.tables(3, 0, 0, 256, src=host.spec, dst=c.target_spec())
            for how in ("stream", "event", "current"):
                for tensor in tensors:
                    tensor.zero_()
                torch.cuda.synchronize()
                c.paint(device)
                offer = await hp.offer(how, source, src, tokens=256, layers_ready=0)
                fetch = hd.fetch(offer, into=device, blocks=dst, timeout="30s")
                await fetch.start()
                with torch.cuda.stream(stream):
                    for layer in range(c.LAYERS):
                        for _ in range(20):
                            a @ a
                        tensors[layer].copy_(filled[layer])
                        event = torch.cuda.Event()
                        event.record()
                        after = {"stream": stream, "event": event, "current": None}[how]
                        await offer.layers_ready(layer + 1, after=after)
                    assert not event.query(), "said before it was so"
                await fetch.result()
                c.check(device, c.target_spec(), c.Moved(host, src, dst, 0, 256), guards=[device])


async def test_memory_of_a_gpu():
    memory = CudaMemory("gpu0", capacity=8 << 20, channels=2)
    try:
        print("dma-buf:", memory.why_no_dmabuf or "yes", "flushes:", memory._flushes)
        region = memory.regions[1]
        whole = cupy.ndarray(
            (region.nbytes,),
            cupy.uint8,
            cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(region.address, region.nbytes, memory), 0),
        )
        values = np.random.default_rng(0).integers(0, 256, region.nbytes, np.uint8)
        whole.set(values)
        columns = [np.array(x, np.int64) for x in ([16, 64], [4096, 8192], [32, 16])]
        await memory.move(Moves(np.array([1, 1], np.int32), *columns))
        got = whole.get()
        assert np.array_equal(got[4096:4128], values[16:48])
        assert np.array_equal(got[8192:8208], values[64:80])
        one = np.zeros(1, np.int64)
        await memory.flush(ByteRanges(np.zeros(1, np.int32), one, one + 64))
    finally:
        memory.close()


OTHER = """
import hashlib, json, sys
import numpy as np
from hawk.memory import cuda
from hawk.memory.cuda_share import Exported, Imported
told = json.loads(sys.argv[1])
told["handle"] = bytes.fromhex(told["handle"])
told["sizes"], told["fds"] = tuple(told["sizes"]), tuple(told["fds"])
there = cuda.device(0)
seen = Imported(there, Exported(**told))
out = np.zeros(seen.nbytes, np.uint8)
with there.current() as driver:
    stream, event = driver.stream(low=True), driver.event()
    driver.to_host(out.ctypes.data, seen.address, seen.nbytes, stream)
    driver.record(event, stream)
    driver.synchronise(event)
seen.close()
print(hashlib.sha256(out.tobytes()).hexdigest())
"""


def seen_elsewhere(exported):
    told = asdict(exported) | {"handle": exported.handle.hex()}
    done = subprocess.run(
        [sys.executable, "-c", OTHER, json.dumps(told)],
        pass_fds=exported.fds,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_another_process_sees_a_plain_allocation():
    import hashlib

    pointer = cupy.cuda.runtime.malloc(8 << 20)
    try:
        array = cupy.ndarray(
            (8 << 20,),
            cupy.uint8,
            cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(pointer, 8 << 20, None), 0),
        )
        array.set(np.random.default_rng(1).integers(0, 256, 8 << 20, np.uint8))
        part = array[4096 : 3 << 20]
        exported = cuda_share.export(cuda.device(0), part.data.ptr, part.nbytes)
        assert (exported.way, exported.offset) == ("legacy", 4096)
        assert seen_elsewhere(exported) == hashlib.sha256(part.get().tobytes()).hexdigest()
    finally:
        cupy.cuda.runtime.free(pointer)


EXPANDABLE = """
import hashlib, sys
import torch
from hawk.memory import cuda, cuda_share
from hawk.errors import RegistrationFailed
from tests.device.test_jobs import seen_elsewhere
made = torch.randint(0, 256, (48 << 20,), dtype=torch.uint8, device="cuda")
part = made[5 << 20 : 45 << 20]
torch.cuda.synchronize()
there = cuda.device(0)
print("pointer", there.driver.pointer(part.data_ptr()))
try:
    exported = cuda_share.export(there, part.data_ptr(), part.numel())
except RegistrationFailed as error:
    print("refused", error)
    sys.exit(0)
assert seen_elsewhere(exported) == hashlib.sha256(part.cpu().numpy().tobytes()).hexdigest()
print("seen", exported.way, exported.sizes)
"""


@pytest.mark.parametrize("expandable", [True, False])
def test_another_process_sees_torchs_memory_or_it_is_refused(expandable):
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE],
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]
    if not expandable:
        assert "seen legacy" in done.stdout


def test_pools_without_handles_are_refused():
    pool = cupy.cuda.MemoryAsyncPool()
    with cupy.cuda.using_allocator(pool.malloc):
        array = cupy.zeros(1 << 20, cupy.uint8)
    print(cuda.device(0).driver.pointer(array.data.ptr))
    with pytest.raises(RegistrationFailed, match=r"hawk\.Agent"):
        cuda_share.export(cuda.device(0), array.data.ptr, array.nbytes)
    assert cuda_arrays.taken(array).device == 0  # an agent of this process takes it all the same


LOST = """
import asyncio, sys, tempfile
from pathlib import Path
import cupy
import hawk
from tests.end_to_end import caches as c
from tests.device.test_jobs import from_cupy
from tests.end_to_end.test_other_clients import embedded

WRITES = "{ *(volatile int *)((char *)p + (1ull << 44)) = 1; }"
BAD = cupy.RawKernel('extern "C" __global__ void bad(int *p) ' + WRITES, "bad")

async def main():
    folder = Path(tempfile.mkdtemp())
    host = c.filled()
    async with embedded(folder, "p0") as p, embedded(folder, "d0", memory=True) as d:
        async with hawk.connect(p) as hp, hawk.connect(d) as hd:
            device = await hd.allocate(c.target_spec(), memory="npu0")
            source, plain = await hp.register(from_cupy(host)), await hp.register(host)
            offer = await hp.offer("good", source, [1], tokens=16)
            await hd.fetch(offer, into=device, blocks=[1], timeout="30s")
            other = await hp.offer("other", plain, [3], tokens=16)
            offer = await hp.offer("bad", source, [1], tokens=16)
            BAD((1,), (1,), (cupy.zeros(1, cupy.int32),))
            try:
                await hd.fetch(offer, into=device, blocks=[2], timeout="30s")
                print("no error")
            except hawk.HawkError as error:
                print(type(error).__name__, error)
            print(await offer.ended())
            print((await hd.fetch(other, into=device, blocks=[3], timeout="30s")).tokens)
            try:
                await hp.offer("again", source, [1], tokens=16)
            except hawk.HawkError as error:
                print(type(error).__name__)
    print("closed")

asyncio.run(main())
"""


def test_a_lost_gpu_costs_its_own_jobs():
    done = subprocess.run(
        [sys.executable, "-c", LOST], capture_output=True, text=True, check=False, timeout=100
    )
    print(done.stdout, done.stderr[-3000:])
    lines = done.stdout.splitlines()
    assert any(line.startswith("DeviceLost cuda:0") for line in lines)
    assert lines[-4:] == ["withdrawn", "16", "DeviceLost", "closed"]
