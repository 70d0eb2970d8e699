"""The cuda transport beside the contract: who reaches whom, what is lost, what it leaves, links of a given rate."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hawk.errors import DeadlineExceeded, DeviceLost, HawkError, InvalidArgument, NotViable, PeerUnreachable
from hawk.memory import cuda_rows
from hawk.memory.cuda import CudaMemory, device
from hawk.memory.cuda_share import Exported
from hawk.memory.region import Region, Segments
from hawk.transports import registry
from hawk.transports.cuda import CudaConfig, CudaTransport, _pace, _wire
from hawk.transports.cuda._client import Clocks
from tests.descriptors import fds
from tests.fake_cuda import FakeCuda
from tests.fake_cuda_parts import FakeRows

ILLEGAL = 700


@pytest.fixture
def driver(driver_with_rows: FakeCuda) -> FakeCuda:
    return driver_with_rows


class Ends:
    """A serving side on the first GPU with its arena beside memory of the host, and a reader on the second."""

    def __init__(self, **settings: object) -> None:
        self.serving = CudaTransport(CudaConfig(**settings))
        self.reading = CudaTransport(CudaConfig(gpu=1, **settings))

    async def __aenter__(self) -> Ends:
        await self.serving.start()
        await self.reading.start()
        self.serving.serve(Region("arena", np.zeros(1 << 20, np.uint8)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.reading.close()
        await self.serving.close()


async def test_the_arena_is_beside_memory_of_the_host(driver: FakeCuda) -> None:
    before = fds()
    async with Ends() as ends:
        shadow = ends.serving.shadow
        assert shadow is not None
        assert (shadow.gpu, shadow.nbytes) == (0, 1 << 20)
        assert ends.reading.shadow is None
        there = driver.at(shadow.address, shadow.nbytes)
        there[:] = np.random.default_rng(1).integers(0, 256, len(there), np.uint8)
        memory = CudaMemory("npu", capacity=8 << 20, gpu=1, channels=8)
        grant = ends.serving.grant(4096, 8 * 512)
        segments = Segments.of([(c, 64 * c, 4096 + 512 * c, 512) for c in range(8)])
        link = await ends.reading.connect(ends.serving.endpoint, timeout=5.0)
        await link.read(grant.key, segments, memory.regions, timeout=5.0)
        for c, region in enumerate(memory.regions):
            assert np.array_equal(driver.at(region.address + 64 * c, 512), there[4096 + 512 * c :][:512])
        assert ends.reading.busy() == pytest.approx(1e-3)
        assert ends.reading.busy() == 0
        assert await ends.serving.revoke(grant)
        memory.close()
    assert not driver.left()
    assert fds() == before


async def test_long_rows_are_taken_by_copy_engines_and_short_ones_by_the_kernel(driver: FakeCuda) -> None:
    long = cuda_rows.LONG
    async with Ends() as ends:
        ends.serving.serve(Region("larger", np.zeros(4 * long, np.uint8)))
        memory = CudaMemory("gpu", capacity=4 * long, gpu=1)
        link = await ends.reading.connect(ends.serving.endpoint, timeout=5.0)
        grant = ends.serving.grant(0, 4 * long)
        kernel = cuda_rows._kernels.get(1)
        for rows, launched in (([(0, 0, 0, long)], 0), ([(0, 0, 0, 100), (0, 300, 4000, long)], 1)):
            await link.read(grant.key, Segments.of(rows), memory.regions, timeout=5.0)
            kernel = cuda_rows._kernels[1]
            assert isinstance(kernel, FakeRows)
            assert kernel.launched == launched
        memory.close()


@pytest.mark.parametrize(("nbytes", "uploads"), [(cuda_rows.READ_THERE, 0), (cuda_rows.READ_THERE - 16, 1)])
async def test_the_table_of_long_rows_is_read_where_it_was_written(
    driver: FakeCuda, nbytes: int, uploads: int
) -> None:
    async with Ends() as ends:
        memory = CudaMemory("gpu", capacity=1 << 20, gpu=1)
        link = await ends.reading.connect(ends.serving.endpoint, timeout=5.0)
        grant = ends.serving.grant(0, 1 << 20)
        there = driver.at(ends.serving.shadow.address, 1 << 20)  # type: ignore[union-attr]
        there[:] = np.arange(1 << 20) % 251
        rows = [(0, i * nbytes, (9 - i) * nbytes, nbytes) for i in range(10)]
        await link.read(grant.key, Segments.of(rows), memory.regions, timeout=5.0)
        assert driver.counts.get("to_device", 0) == uploads
        assert driver.counts["launch"] == 1
        for _, local, remote, n in rows:
            found = driver.at(memory.regions[0].address + local, n)
            assert np.array_equal(found, there[remote : remote + n])
        memory.close()


async def test_without_a_kernel_rows_go_one_by_one(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(number: int) -> FakeRows:
        raise ImportError("No module named 'cupy'")

    monkeypatch.setattr(cuda_rows, "make", absent)
    async with Ends() as ends:
        memory = CudaMemory("gpu", capacity=1 << 20, gpu=1)
        link = await ends.reading.connect(ends.serving.endpoint, timeout=5.0)
        grant = ends.serving.grant(0, 1 << 20)
        rows = [(0, i * 64, i * 128, 64) for i in range(50)]
        await link.read(grant.key, Segments.of(rows), memory.regions, timeout=5.0)
        assert driver.counts["across"] == 50
        memory.close()


async def test_gpus_that_do_not_reach_each_other_are_refused_before_anything_is_tried(
    driver: FakeCuda,
) -> None:
    driver.apart = {(1, 0)}
    async with Ends() as ends:
        verdict = ends.reading.reachable(ends.serving.endpoint)
        assert not verdict.ok
        assert "cuda:1 has no peer access to the peer's GPU, cuda:0" in verdict.reason
        assert "transport.prefer" in verdict.reason
        with pytest.raises(PeerUnreachable, match="no peer access"):
            await ends.reading.connect(ends.serving.endpoint, timeout=5.0)
        tcp = registry.make("tcp")
        await tcp.start()
        both = {"cuda": ends.reading, "tcp": tcp}
        far = {"cuda": ends.serving.endpoint, "tcp": tcp.endpoint}
        choice = registry.choose(("cuda", "tcp"), both, far)
        assert choice.name == "tcp"
        assert "no peer access" in choice.rejected["cuda"]
        await tcp.close()
        hidden = ends.serving.endpoint | {"gpu": "5" * 32}
        assert "CUDA_VISIBLE_DEVICES" in ends.reading.reachable(hidden).reason
        for wrong, said in (({"boot": "b"}, "another host"), ({"uid": "4711"}, "runs as user 4711")):
            assert said in ends.reading.reachable(ends.serving.endpoint | wrong).reason


async def test_a_target_on_another_gpu_that_does_not_reach_the_peers_is_refused(driver: FakeCuda) -> None:
    driver.devices, driver.apart = 3, {(2, 0)}
    async with Ends() as ends:
        near, far = (CudaMemory(f"gpu{n}", capacity=1 << 20, gpu=n) for n in (1, 2))
        link = await ends.reading.connect(ends.serving.endpoint, timeout=5.0)
        grant = ends.serving.grant(0, 128)
        segments = Segments.of([(0, 0, 0, 64), (1, 0, 64, 64)])
        regions = [near.regions[0], far.regions[0]]
        with pytest.raises(NotViable, match=r"cuda:2.*cuda:0.*transport.prefer"):
            await link.read(grant.key, segments, regions, timeout=5.0)
        assert "launch" not in driver.counts
        await link.read(grant.key, Segments.of([(0, 0, 0, 64)]), regions[:1], timeout=5.0)
        near.close()
        far.close()


async def test_a_lost_gpu_fails_its_reads_and_says_so(driver: FakeCuda) -> None:
    async with Ends() as ends:
        memory = CudaMemory("gpu", capacity=1 << 20, gpu=1)
        link = await ends.reading.connect(ends.serving.endpoint, timeout=5.0)
        grant = ends.serving.grant(0, 1 << 20)
        segments = Segments.of([(0, 0, 0, 64)])
        driver.fail["outwait", 1] = ILLEGAL
        with pytest.raises(DeviceLost):
            await link.read(grant.key, segments, memory.regions, timeout=5.0)
        assert "failed" in (ends.reading.trouble() or "")
        driver.lost = 0
        with pytest.raises(DeviceLost):
            await link.read(grant.key, segments, memory.regions, timeout=5.0)
        memory.close()
    driver.forget_lost()


async def test_a_fault_in_the_midst_leaves_nothing_under_way(driver: FakeCuda) -> None:
    async with Ends(kernels=False) as ends:
        memory = CudaMemory("gpu", capacity=1 << 20, gpu=1)
        link = await ends.reading.connect(ends.serving.endpoint, timeout=5.0)
        grant = ends.serving.grant(0, 1 << 20)
        driver.fail["across", 2] = 801
        rows = [(0, 0, 0, 64), (0, 64, 128, 64)]
        with pytest.raises(HawkError, match="refused a call"):
            await link.read(grant.key, Segments.of(rows), memory.regions, timeout=5.0)
        driver.at(memory.regions[0].address, 128)[:] = 7
        driver.advance()
        assert (driver.at(memory.regions[0].address, 128) == 7).all(), "a copy was still under way"
        await link.read(grant.key, Segments.of(rows), memory.regions, timeout=5.0)
        memory.close()


async def test_what_a_machine_lacks_is_said_at_the_start(driver: FakeCuda) -> None:
    with pytest.raises(NotViable, match=r"cuda:7"):
        await CudaTransport(CudaConfig(gpu=7)).start()
    driver.fail["create", 1] = 2
    async with Started(CudaTransport()) as full:
        with pytest.raises(NotViable, match=r"no arena for chunks.*too little free memory"):
            full.serve(Region("arena", np.zeros(4096, np.uint8)))
    driver.devices = 0
    assert registry.viability("cuda").reason == "the CUDA driver finds no GPU"
    assert not driver.left()


class Started:
    def __init__(self, transport: CudaTransport) -> None:
        self._transport = transport

    async def __aenter__(self) -> CudaTransport:
        await self._transport.start()
        return self._transport

    async def __aexit__(self, *_: object) -> None:
        await self._transport.close()


def test_what_a_server_says_of_its_arena() -> None:
    by_handle = Exported("legacy", 100, 40, bytes(range(64)))
    assert _wire.read(_wire.arena(by_handle), []) == by_handle
    by_fds = Exported("fd", 5000, 40, sizes=(4096, 8192), fds=(7, 8))
    assert _wire.read(_wire.arena(by_fds), [7, 8]) == by_fds
    for message, got in ((_wire.arena(by_fds), []), (_wire.arena(by_fds)[:-1], [7, 8])):
        with pytest.raises(InvalidArgument):
            _wire.read(message, got)
    broken = bytearray(_wire.arena(by_handle))
    broken[4] = 9
    with pytest.raises(InvalidArgument):
        _wire.read(bytes(broken), [])


@pytest.mark.parametrize(
    ("name", "value"), [("gpu", -1), ("streams", 0), ("chunk", 1), ("pace", -1), ("kernels", 1), ("grace", 0)]
)
def test_settings_out_of_range(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"transport.cuda.{name}"):
        CudaConfig(**{name: value})


def test_a_paced_link_carries_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(_pace.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(_pace.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + max(seconds, 1e-5)))
    pace = _pace.Pace(1e9)
    assert pace.begin(1_000_000) == pytest.approx(100.001)
    assert pace.begin(500_000) == pytest.approx(100.0015)
    pace.end(100.0015)
    assert now[0] == pytest.approx(100.0015, abs=2e-5)
    now[0] = 200.0
    assert pace.begin(1_000_000) == pytest.approx(200.001)


async def test_a_paced_read_takes_what_the_link_would(driver: FakeCuda) -> None:
    async with Ends(pace=20e6) as ends:
        memory = CudaMemory("gpu", capacity=1 << 20, gpu=1)
        link = await ends.reading.connect(ends.serving.endpoint, timeout=5.0)
        grant = ends.serving.grant(0, 1 << 20)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await link.read(grant.key, Segments.of([(0, 0, 0, 1 << 20)]), memory.regions, timeout=5.0)
        assert loop.time() - began >= (1 << 20) / 20e6
        memory.close()
    assert device(1).lost is None


async def test_a_read_over_a_slow_link_can_be_ended(driver: FakeCuda) -> None:
    async with asyncio.timeout(30), Ends(pace=100) as ends:  # a chunk takes hours
        memory = CudaMemory("gpu", capacity=1 << 20, gpu=1)
        link = await ends.reading.connect(ends.serving.endpoint, timeout=5.0)
        grant = ends.serving.grant(0, 1 << 20)
        segments = Segments.of([(0, 0, 0, 1 << 20)])
        with pytest.raises(DeadlineExceeded):
            await link.read(grant.key, segments, memory.regions, timeout=0.05)
        assert await ends.serving.revoke(grant)
        memory.close()


def test_copies_side_by_side_count_once() -> None:
    clocks = Clocks()
    for gpu, begin, seconds in ((0, 1.0, 2.0), (0, 2.0, 0.5), (0, 2.5, 1.5), (0, 10.0, 1.0), (1, 0.0, 1.0)):
        clocks.add(gpu, begin, seconds)
    assert clocks.busy() == pytest.approx(3.0 + 1.0 + 1.0)
    assert clocks.busy() == 0
