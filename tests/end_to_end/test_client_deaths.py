"""Clients that die, cancel or leave, at every state of a fetch and of an offer: nothing of theirs stays."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest

from hawk.client import connect
from hawk.control.messages import decode_ticket, encode_ticket
from hawk.errors import Aborted, PeerLost
from hawk.handles import Fetch
from tests.child import child
from tests.end_to_end import caches as c
from tests.end_to_end.conftest import Decoders
from tests.end_to_end.harness import AgentProcess, back_to, counts, until
from tests.end_to_end.scene import Scene, scene

ROOT = Path(__file__).resolve().parents[2]

FETCH_STATES = ["attached", "allocated", "connecting", "requested", "receiving", "ready"]
OFFER_STATES = ["registered", "offered", "awaited", "claimed", "consumed"]


@pytest.fixture
async def s(prefill: AgentProcess, decoders: Decoders) -> AsyncIterator[Scene]:
    async with scene(prefill, decoders.get("shm", "direct")) as made:
        yield made


@contextlib.asynccontextmanager
async def silent_peer() -> AsyncIterator[str]:
    """Somebody listens, takes connections and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.asynccontextmanager
async def fetch_arguments(s: Scene, state: str) -> AsyncIterator[dict[str, object]]:
    """What a fetch needs to stand still in that state, for as long as the block lasts."""
    ready = {"receiving": 1, "ready": c.LAYERS}.get(state, 0)
    offer = await s.offer(layers_ready=ready)
    if state == "connecting":
        async with silent_peer() as address:
            ticket = msgspec.structs.replace(decode_ticket(offer.ticket), agent="d1", address=address)
            yield {"ticket": encode_ticket(ticket)}
    elif state == "requested":
        yield {"request": "will never be made", "source": "p0", "wait": True}
    else:
        yield {"ticket": offer.ticket}


async def reach(job: Fetch, state: str) -> None:
    """Returns when the fetch is in that state; receiving means that bytes have arrived."""
    async for progress in job.progress():
        if progress.state == state and (state != "receiving" or progress.nbytes):
            return
    raise AssertionError(f"it never was {state}")


# -- cancelling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", FETCH_STATES[2:5])
@pytest.mark.parametrize("how", ["leave", "abort", "cancel", "close"])
async def test_a_fetch_that_its_client_ends(s: Scene, state: str, how: str) -> None:
    before = await counts(s.hd)
    async with fetch_arguments(s, state) as arguments:
        ticket = arguments.pop("ticket", None)
        job = s.hd.fetch(ticket, into=s.device, blocks=[1, 2, 3, 4], timeout="30s", **arguments)
        if how == "leave":
            async with job:
                await reach(job, state)
            assert await counts(s.hd) == before  # left means over, at once
        elif how == "abort":
            await job.start()
            await reach(job, state)
            await job.abort()
            await job.abort()
            assert await counts(s.hd) == before
        elif how == "cancel":

            async def run() -> None:
                await job

            task = asyncio.get_running_loop().create_task(run())
            await reach(job, state)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await counts(s.hd) == before
        else:
            other = connect(s.decode.local)
            await other.open()
            device = await other.allocate(s.spec, memory="npu7")
            job = other.fetch(ticket, into=device, blocks=[1, 2, 3, 4], timeout="30s", **arguments)
            await job.start()
            await reach(job, state)
            await other.close()
            with pytest.raises((Aborted, PeerLost)):
                await job
            await device_gone(s)
        with pytest.raises((Aborted, PeerLost)):
            await job


async def device_gone(s: Scene) -> None:
    """The closed client's cache has gone from its memory."""
    await until(s.hd, lambda now: now.caches == 1, "one cache only")


async def test_an_iterator_of_progress_sees_the_latest_only(s: Scene) -> None:
    offer = await s.offer(tokens=600)
    job = s.hd.fetch(offer, into=s.device, blocks=list(range(10)), timeout="20s")
    await job  # the end is there before anybody looks
    seen = [progress async for progress in job.progress()]
    assert [progress.state for progress in seen] == ["ready"]
    assert seen[0].nbytes == seen[0].total > 0


# -- dying -----------------------------------------------------------------------------------------------

CLIENT = """
import asyncio, json, sys
import numpy as np
import hawk
from tests.end_to_end import caches as c

async def main():
    address, role, state, arguments = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
    hk = hawk.connect(address)
    await hk.open()
    if role == "decode":
        await decode(hk, state, arguments)
    else:
        await prefill(hk, state, arguments)
    print(state, flush=True)
    await asyncio.Event().wait()

async def decode(hk, state, arguments):
    if state == "attached":
        return
    device = await hk.allocate(c.target_spec(), memory="npu7")
    hk.kept = device
    if state == "allocated":
        return
    ticket = arguments.pop("ticket", None)
    job = hk.fetch(ticket, into=device, blocks=[1, 2, 3, 4], timeout="30s", **arguments)
    await job.start()
    async for progress in job.progress():
        if progress.state == state and (state != "receiving" or progress.nbytes):
            return
    raise SystemExit("it never was " + state)

async def prefill(hk, state, arguments):
    source = c.filled()
    cache = await hk.register(source)
    hk.kept = source, cache
    if state == "registered":
        return
    ready = c.LAYERS if state == "consumed" else 1
    offer = await hk.offer("dying", cache, np.arange(16), tokens=256, layers_ready=ready)
    hk.offer_kept = offer
    print(offer.ticket, flush=True)
    if state == "awaited":
        hk.task = asyncio.create_task(offer.ended())
        await asyncio.sleep(0)
    elif state in ("claimed", "consumed"):
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)

asyncio.run(main())
"""


def client_process(*arguments: str) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """A client in a process of its own; killed at the end if it still lives."""
    command = (sys.executable, "-c", CLIENT, *arguments)
    return child(*command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT)


async def said(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 30)
    assert line, "the client ended before it was there"
    return line.decode().strip()


@pytest.mark.parametrize("state", FETCH_STATES)
async def test_a_decode_client_that_dies(s: Scene, state: str) -> None:
    before = await counts(s.hd)
    async with fetch_arguments(s, state) as arguments:
        async with client_process(s.decode.local, "decode", state, json.dumps(arguments)) as process:
            assert await said(process) == state
            process.kill()
            await process.wait()
        await back_to(before, s.hd)
    await until(s.hp, lambda now: now.serving == 0, "no job")


@pytest.mark.parametrize("state", OFFER_STATES)
async def test_a_prefill_client_that_dies(s: Scene, state: str) -> None:
    before = await counts(s.hp)
    async with client_process(s.prefill.local, "prefill", state, "{}") as process:
        assert process.stdin is not None
        job = None
        if state != "registered":
            ticket = await said(process)
            if state in ("claimed", "consumed"):
                job = s.hd.fetch(ticket, into=s.device, blocks=[1, 2, 3, 4], timeout="20s")
                await job.start()
                await reach(job, "receiving" if state == "claimed" else "ready")
                process.stdin.write(b"\n")
        assert await said(process) == state
        process.kill()
        await process.wait()
    if state == "claimed":
        assert job is not None
        with pytest.raises(PeerLost, match="client's process is gone"):
            await job
    await back_to(before, s.hp)
    if state == "offered":
        with pytest.raises(Exception, match="withdrawn"):
            await s.hd.fetch(ticket, into=s.device, blocks=[1, 2, 3, 4])


async def test_many_clients_come_and_go(s: Scene) -> None:
    before = await counts(s.hd)
    for _ in range(3):
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(12):
                await stack.enter_async_context(connect(s.decode.local))
    await back_to(before, s.hd)
