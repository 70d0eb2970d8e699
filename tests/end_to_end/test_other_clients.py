"""The blocking client, and agents that live in the process of their clients."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hawk
from hawk.agent import Agent
from hawk.blocking import connect as connect_blocking
from hawk.config import load_config
from hawk.errors import DeadlineExceeded, Draining, PeerLost, RegistrationFailed, UnknownRequest, WrongContext
from tests.descriptors import fds
from tests.end_to_end import caches as c
from tests.end_to_end.conftest import Decoders
from tests.end_to_end.harness import AgentProcess, clients


def test_the_blocking_client_from_many_threads(prefill: AgentProcess, decoders: Decoders) -> None:
    decode = decoders.get("tcp", "direct")
    with connect_blocking(prefill.local) as hp, connect_blocking(decode.local) as hd:
        spec = c.target_spec()
        device = hd.allocate(spec, memory="npu8")
        source = c.filled()
        cache = hp.register(source)
        before = hd.status()
        c.paint(device)

        def one(i: int) -> c.Moved:
            src = np.random.default_rng(i).permutation(source.spec.blocks)[:8]
            offer = hp.offer(f"thread{i}", cache, src, tokens=128, layers_ready=1)
            job = hd.submit(offer, into=device, blocks=[i, i + 6], timeout="20s")
            with pytest.raises(DeadlineExceeded):
                job.result(timeout=0.01)
            assert not job.done()
            offer.layers_ready(c.LAYERS)
            assert job.result(timeout=20).tokens == 128
            assert offer.ended(timeout=20) == "consumed"
            return c.Moved(source, src, [i, i + 6], 0, 128)

        with ThreadPoolExecutor(6) as pool:
            moves = list(pool.map(one, range(6)))
        c.check(device, spec, *moves)
        assert hd.status().blocks_owned == before.blocks_owned
        hd.release(device)
        hp.release(cache)


def test_a_blocking_job_that_is_ended(prefill: AgentProcess, decoders: Decoders) -> None:
    with (
        connect_blocking(prefill.local) as hp,
        connect_blocking(decoders.get("tcp", "direct").local) as hd,
    ):
        device = hd.allocate(c.target_spec(), memory="npu8")
        cache = hp.register(c.filled())
        offer = hp.offer("stuck", cache, np.arange(8), tokens=128, layers_ready=1)
        assert repr(offer) == "<Offer 'stuck' of p0>"
        assert repr(cache).startswith(f"<Cache {cache.id}: vllm/nhd bf16, ")
        assert repr(device).startswith(f"<DeviceCache {device.id}: tenstorrent/kv ")
        job = hd.submit(offer, into=device, blocks=[1, 2], timeout="20s")
        assert repr(job).endswith(": under way>")
        job.abort()
        assert job.done()
        assert repr(job).endswith(": failed>")
        with pytest.raises(hawk.Aborted):
            job.result()
        assert hd.status().blocks_owned == hd.status().blocks_quarantined == 0
        offer.withdraw()
        with pytest.raises(UnknownRequest):
            hd.fetch(offer, into=device, blocks=[1, 2], timeout="20s")
        hd.release(device)


async def test_the_blocking_client_knows_where_it_is(prefill: AgentProcess) -> None:
    hp = await asyncio.get_running_loop().run_in_executor(None, connect_blocking, prefill.local)

    async def inside() -> None:
        hp.status()

    with pytest.raises(WrongContext):
        await asyncio.get_running_loop().run_in_executor(None, hp.wait, inside())
    child = os.fork()
    if child == 0:  # nothing of the parent's may run here, not even its clean-up
        try:
            hp.status()
        except WrongContext:
            os._exit(7)
        os._exit(1)
    _, status = await asyncio.get_running_loop().run_in_executor(None, os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert hp.status().name == "p0"  # the child's end did not take the parent's connection with it
    hp.close()
    hp.close()
    with pytest.raises(WrongContext):
        hp.status()


async def test_a_client_is_of_one_loop_and_process(prefill: AgentProcess) -> None:
    async with clients(prefill) as (hp,):

        def elsewhere() -> None:
            with pytest.raises(WrongContext):
                asyncio.run(hp.status())
            with pytest.raises(WrongContext):
                asyncio.run(hp.close())

        await asyncio.get_running_loop().run_in_executor(None, elsewhere)
        child = os.fork()
        if child == 0:
            try:
                hp.check_context()
            except WrongContext:
                os._exit(7)
            os._exit(1)
        _, status = await asyncio.get_running_loop().run_in_executor(None, os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert (await hp.status()).name == "p0"
    with pytest.raises(PeerLost, match="closed"):
        await hp.status()
    await hp.close()


async def test_memory_of_another_process_is_refused_with_the_ways_that_work(prefill: AgentProcess) -> None:
    spec = c.source_spec()
    size = 2 * spec.blocks * spec.block_size * spec.heads * spec.dim
    plain = [np.zeros(size, np.uint16) for _ in range(c.LAYERS)]
    async with clients(prefill) as (hp,):
        with pytest.raises(RegistrationFailed, match=r"KVCache\.alloc") as caught:
            await hp.register(hawk.KVCache.from_numpy(plain, spec))
        assert caught.value.field == "buffers[0]"


# -- embedded --------------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hawk-e2e-") as name:
        yield Path(name)


def embedded(
    folder: Path, name: str, *, memory: bool = False, more: str = "", memories: Sequence[Any] = ()
) -> Agent:
    """An agent in this process, without keys."""
    text = f'[agent]\nname = "{name}"\nlocal = "ipc://{folder}/{name}.sock"\ninsecure = true\n'
    text += '[arena]\nsize = "4MiB"\n[jobs]\nchunk = "64KiB"\n' + more
    if memory:
        text += '[memory.npu0]\nkind = "emulated-npu"\ncapacity = "6MiB"\n'
    path = folder / f"{name}.toml"
    path.write_text(text)
    return Agent(load_config(path, {})[0], memories=memories)


@pytest.mark.parametrize("core", ["numpy", "auto"])
async def test_an_embedded_agent_reads_ordinary_memory(folder: Path, core: str) -> None:
    retile = f'[retile]\ncore = "{core}"\n'
    spec, src_spec = c.target_spec(), c.source_spec()
    size = 2 * src_spec.blocks * src_spec.block_size * src_spec.heads * src_spec.dim
    source = hawk.KVCache.from_numpy([np.zeros(size, np.uint16) for _ in range(c.LAYERS)], src_spec)
    c.fill(source)
    descriptors = fds()
    async with (
        embedded(folder, "p0", more=retile) as p,
        embedded(folder, "d0", memory=True, more=retile) as d,
    ):
        async with hawk.connect(p) as hp, hawk.connect(d) as hd:
            device = await hd.allocate(spec, memory="npu0")
            cache = await hp.register(source)
            src, dst = c.tables(3, 0, 0, 500, src=src_spec, dst=spec)
            c.paint(device)
            offer = await hp.offer("r", cache, src, tokens=500)
            await hd.fetch(offer, into=device, blocks=dst, timeout="20s")
            c.check(device, spec, c.Moved(source, src, dst, 0, 500), guards=[device])
            await device.release()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert fds() <= descriptors


async def test_closing_an_agent_in_mid_job_leaves_nothing(folder: Path) -> None:
    descriptors = fds()
    async with embedded(folder, "p0") as p:
        async with embedded(folder, "d0", memory=True) as d:
            async with hawk.connect(p) as hp:
                hd = hawk.connect(d)
                await hd.open()
                device = await hd.allocate(c.target_spec(), memory="npu0")
                cache = await hp.register(c.filled())
                offer = await hp.offer("r", cache, np.arange(16), tokens=256, layers_ready=1)
                job = hd.fetch(offer, into=device, blocks=[1, 2, 3, 4], timeout="20s")
                await job.start()
                async for progress in job.progress():
                    if progress.nbytes:
                        break
                await d.close()
                with pytest.raises((hawk.Aborted, PeerLost)):
                    await job
                await hd.close()
                # The offer is whole again, and its agent unharmed.
                await offer.withdraw()
                status = await hp.status()
                assert (status.offers, status.serving) == (0, 0)
                assert status.pools[0].owned == status.pools[0].quarantined == 0
                del device, job
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert fds() <= descriptors + 1


async def test_a_call_to_an_agent_that_has_ended_its_session_is_told_why(folder: Path) -> None:
    """The call crosses the agent's end: it is nobody's bad frame."""
    async with embedded(folder, "p0") as p:
        async with hawk.connect(p) as hp:
            cache = await hp.register(c.filled())
            stopping = hawk.Aborted("the agent is stopping")
            p.service._closing = True
            for session in list(p.service._sessions.values()):
                p.service._end(session, stopping)
            with pytest.raises(Draining, match="shutting down"):
                await hp.offer("late", cache, np.arange(4), tokens=64)


async def test_a_handle_of_an_ended_offer_leaves_a_newer_one_of_its_request_alone(
    prefill: AgentProcess, decoders: Decoders
) -> None:
    async with clients(prefill, decoders.get("tcp", "direct")) as (hp, hd):
        source = c.filled()
        cache = await hp.register(source)
        device = await hd.allocate(c.target_spec(), memory="npu8")
        old = await hp.offer("again", cache, np.arange(8), tokens=128, ttl="60s")
        await old.withdraw()
        new = await hp.offer("again", cache, np.arange(8), tokens=128, ttl="60s")
        await old.withdraw()
        with pytest.raises(UnknownRequest, match="not open any more"):
            await old.layers_ready(c.LAYERS)
        ready = await hd.fetch(new, into=device, blocks=[3, 1], timeout="20s")
        assert ready.tokens == 128
        assert await new.ended() == "consumed"
        await device.release()
        await cache.release()
