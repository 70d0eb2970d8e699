"""Memory of GPUs over NIXL, made up: read into, served, refused, and filled by way of the host where it has to be."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hawk.errors import PeerUnreachable, RegistrationFailed
from hawk.jobs.lifting import Landings
from hawk.memory.cuda import CudaMemory, DeviceRegion
from hawk.memory.region import Segments
from hawk.transports import nixl as package
from hawk.transports._engine import _link, _wire
from hawk.transports._engine._seam import EngineFailed
from hawk.transports.nixl import NixlConfig, NixlTransport, _vram
from hawk.transports.nixl._agent import NixlAgent
from hawk.transports.testing import Rig, SharedArena, pattern
from tests import fake_engines
from tests.fake_cuda import FakeCuda
from tests.unit.transports.test_engine_seam import rig

NBYTES = 1 << 20
SMALL: dict[str, Any] = {"chunk": 64 << 10, "piece": 256 << 10, "grace": 0.2}
SHORT = Segments.of([(0, i * 4096, i * 2048, 2048) for i in range(200)])
LONG = Segments.of([(0, 512 << 10, 0, 300 << 10), (0, 0, 400 << 10, 300 << 10)])


def nixl(
    direction: str = "pull", why: str = "", make: type[NixlAgent] = NixlAgent, **more: Any
) -> NixlTransport:
    config = NixlConfig(direction=direction, tls="tcp", **SMALL, **more)  # type: ignore[arg-type]
    return NixlTransport(config, opener=lambda: make("tcp", package=fake_engines, gpus_why=lambda tls: why))


class Said:
    """In a module's log's place: what was said, by its words."""

    def __init__(self) -> None:
        self.reasons: dict[str, list[str]] = {}

    def info(self, event: str, **more: object) -> None:
        self.reasons.setdefault(event, []).append(str(more["reason"]))

    warning = info


async def arrives(driver: FakeCuda, r: Rig, rows: Segments, landings: Landings, gpu: int = 1) -> None:
    memory = CudaMemory("cache", capacity=NBYTES, gpu=gpu)
    try:
        seen = driver.at(memory.regions[0].address, NBYTES)
        seen[:] = 0xA5
        link = await landings.through(r.link, r.reading.capabilities, gpu)
        await link.read(r.serving.grant(0, NBYTES).key, rows, memory.regions, timeout=30.0)
        right = np.full(NBYTES, 0xA5, np.uint8)
        for local, remote, n in zip(rows.local, rows.remote, rows.nbytes, strict=True):
            right[local : local + n] = r.source[remote : remote + n]
        assert np.array_equal(seen, right)
    finally:
        memory.close()


@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_rows_reach_a_gpu_without_passing_the_host(driver_with_rows: FakeCuda, direction: str) -> None:
    driver, landings = driver_with_rows, Landings()
    async with rig(nixl(direction), nixl(direction)) as r:
        for rows in (SHORT, LONG):
            await arrives(driver, r, rows, landings)
        assert r.link.into(1)
        # What goes up are the kernel's own tables: no row does.
        assert driver.counts.get("launch", 0) == 1
    landings.close()


@pytest.mark.parametrize("why", ["UCX was built without its module for CUDA", ""])
async def test_a_gpu_that_the_engine_does_not_take_is_filled_by_way_of_the_host(
    driver_with_rows: FakeCuda, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refuses(NixlAgent):
        def register(self, address: int, nbytes: int, gpu: int = -1) -> None:
            if gpu >= 0:
                raise EngineFailed("NIXL_ERR_BACKEND")
            super().register(address, nbytes)

    said, landings = Said(), Landings()
    monkeypatch.setattr(_link, "log", said)
    async with rig(nixl(), nixl(why=why, make=Refuses)) as r:
        for rows in (SHORT, LONG):
            await arrives(driver_with_rows, r, rows, landings)
        assert not r.link.into(1)
        region = DeviceRegion("cache", 1 << 40, NBYTES, 1)
        with pytest.raises(RegistrationFailed, match="cuda:1") as refused:
            await r.link.read(r.serving.grant(0, NBYTES).key, LONG, [region], timeout=30.0)
        assert (why or "does not take") in str(refused.value)
    told = said.reasons["memory of GPUs is filled by way of the host"]
    assert told == [why or "the engine does not take it: NIXL_ERR_BACKEND"], "once for a link"
    landings.close()


async def test_one_gpu_that_is_not_taken_leaves_the_others(driver: FakeCuda) -> None:
    class TakesOne(NixlAgent):
        def register(self, address: int, nbytes: int, gpu: int = -1) -> None:
            if gpu == 1:
                raise EngineFailed("NIXL_ERR_BACKEND")
            super().register(address, nbytes, gpu)

    async with rig(nixl(), nixl(make=TakesOne)) as r:
        key = r.serving.grant(0, NBYTES).key
        taken, refused = (CudaMemory(f"cache{gpu}", capacity=NBYTES, gpu=gpu) for gpu in (0, 1))
        with pytest.raises(RegistrationFailed, match=r"cuda:1: .*NIXL_ERR_BACKEND"):
            await r.link.read(key, LONG, refused.regions, timeout=30.0)
        assert (r.link.into(0), r.link.into(1)) == (True, False)
        await r.link.read(key, LONG, taken.regions, timeout=30.0)
        seen = driver.at(taken.regions[0].address, NBYTES)
        assert np.array_equal(seen[: 300 << 10], r.source[400 << 10 : 700 << 10])
        taken.close()
        refused.close()


async def test_another_devices_number_is_refused(driver: FakeCuda) -> None:
    agent = NixlAgent("tcp", package=fake_engines, gpus_why=lambda tls: "")
    memory = CudaMemory("cache", capacity=NBYTES, gpu=1)
    address = memory.regions[0].address
    for gpu in (0, -1):
        with pytest.raises(EngineFailed, match="cannot be registered"):
            agent.register(address, NBYTES, gpu)
    agent.register(address, NBYTES, 1)
    ours, theirs = np.array([address]), np.array([address + 64])
    with pytest.raises(EngineFailed, match="not registered"):
        agent.post(agent.meet(agent.description), False, ours, theirs, np.array([8]), here=0, there=1)
    agent.close()
    memory.close()


async def test_a_registration_ends_with_the_region_that_it_was_for(driver: FakeCuda) -> None:
    made: list[NixlAgent] = []

    class Kept(NixlAgent):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            made.append(self)

    async with rig(nixl(), nixl(make=Kept)) as r:
        key = r.serving.grant(0, NBYTES).key
        for gpu in (0, 1):
            memory = CudaMemory("cache", capacity=NBYTES, gpu=gpu)
            await r.link.read(key, LONG, memory.regions, timeout=30.0)
            memory.close()
            del memory
            gc.collect()
        kinds = [kind for agent in made for _, _, kind, _ in agent._agent.memory]
        assert kinds.count("VRAM") == 1, "the first one was forgotten when the second came"


@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_chunks_are_served_from_a_gpu(driver_with_rows: FakeCuda, direction: str) -> None:
    serving, landings = nixl(direction, gpu=0), Landings()
    async with rig(serving, nixl(direction)) as r:
        shadow = serving.shadow
        assert shadow is not None
        assert (shadow.gpu, shadow.nbytes) == (0, NBYTES)
        r.source = pattern(NBYTES, seed=5)
        driver_with_rows.at(shadow.address, NBYTES)[:] = r.source
        for rows in (SHORT, LONG):
            await arrives(driver_with_rows, r, rows, landings)
        # One that does not know of memory of GPUs cannot be let near: it would ask for the host's.
        endpoint = serving.endpoint
        reader, writer = await asyncio.open_connection(endpoint["host"], int(endpoint["port"]))
        token = bytes.fromhex(endpoint["token"])
        writer.write(_wire.HELLO.pack(_wire.HELLO_MAGIC, _wire.VERSION, token, 0, 0))
        welcome = _wire.WELCOME.unpack(await reader.readexactly(_wire.WELCOME.size))
        assert welcome[1] == _wire.EMPTY
        writer.close()
    assert serving.shadow is None
    landings.close()


async def test_a_gpu_that_cannot_be_served_from_is_told_and_the_host_serves(
    driver: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(call: Callable[[], None]) -> str:
        said = Said()
        monkeypatch.setattr(package, "log", said)
        call()
        (reason,) = said.reasons["chunks are served from memory of the host"]
        return reason

    arena = SharedArena(NBYTES)
    without, absent = nixl(why="no module", gpu=0), nixl(gpu=7)
    said = refuses(lambda: without.serve(arena.region))
    assert "transport.nixl.gpu" in said
    assert "no module" in said
    assert "cuda:7" in refuses(lambda: absent.serve(arena.region))
    driver.fail[("allocate", driver.counts.get("allocate", 0) + 1)] = 2
    full = nixl(gpu=0)
    assert "too little free memory" in refuses(lambda: full.serve(arena.region))
    for transport in (without, absent, full):
        assert transport.shadow is None
        assert transport._grants.region is arena.region
        await transport.close()
    arena.close()


async def test_a_peer_whose_version_does_not_write_into_gpus(
    driver: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_wire, "with_gpu", lambda low, gpu: low & ~_wire.GPUS)
    async with rig(nixl("push"), nixl("push")) as r:
        memory = CudaMemory("cache", capacity=NBYTES)
        assert r.link.into(0)
        with pytest.raises(RegistrationFailed, match="version"):
            await r.link.read(r.serving.grant(0, NBYTES).key, LONG, memory.regions, timeout=30.0)
        assert not r.link.into(0)
        memory.close()


async def test_a_reader_of_another_version_is_told_that_nothing_is_served(
    driver: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = nixl(gpu=0)
    arena = SharedArena(NBYTES)
    await serving.start()
    serving.serve(arena.region)
    reading = nixl()
    await reading.start()
    monkeypatch.setattr(_wire, "GPUS", 0)
    with pytest.raises(PeerUnreachable, match="serves no arena"):
        await reading.connect(serving.endpoint, timeout=30.0)
    await reading.close()
    await serving.close()
    arena.close()


@pytest.mark.parametrize(
    ("tls", "is_there"),
    [("", True), ("all", True), ("tcp,cuda", True), ("cuda_copy,rc", True), ("^ib", True), ("tcp", False),
     ("rc,ud,sm", False), ("^cuda,ib", False)],
)  # fmt: skip
def test_ways_that_leave_memory_of_gpus_out_are_named(tls: str, is_there: bool) -> None:
    assert (_vram.left_out(tls) == "") == is_there
    assert is_there or ("tls" in _vram.left_out(tls) and tls in _vram.left_out(tls))


@pytest.mark.parametrize(
    ("there", "expected"),
    [(None, "built without"), (b"no library", "does not load"), (b"loaded", "")],
)
def test_what_is_said_of_ucx_and_its_module(tmp_path: Path, there: bytes | None, expected: str) -> None:
    (tmp_path / "ucx").mkdir()
    module = tmp_path / "ucx" / "libuct_cuda.so.0.0.0"
    lines = [
        f"7f00-7f01 r--p 00000000 00:00 1    {tmp_path}/libuct-1141f529.so.0.0.0",
        "7f01-7f02 rw-p 0 00:00 0",
    ]
    if there is not None:
        module.write_bytes(there)
        if there == b"loaded":
            lines.append(f"7f02-7f03 r--p 00000000 00:00 1    {module}")
    maps = tmp_path / "maps"
    maps.write_text("\n".join(lines) + "\n")
    said = _vram.loaded(str(maps))
    assert (said == "") if expected == "" else (expected in said)
