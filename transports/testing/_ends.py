"""The contract's third part: however a read ends, it is over when it says so, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import os
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING

from hawk.errors import DeadlineExceeded, HawkError, PeerUnreachable, TransferFailed
from hawk.memory.region import Segments
from hawk.transports.testing._descriptors import descriptors, fresh
from hawk.transports.testing._helpers import Gate, Targets, pattern
from hawk.transports.testing._rig import LIMIT, ContractBase, Rig, on_a_loop, refused

if TYPE_CHECKING:
    from hawk.memory.region import U8

AFTER = 0x5A
"""What targets are filled with once a read has ended: a late byte would show in it."""


class EndsContract(ContractBase):
    """Endings."""

    async def _nothing_lands(self, rig: Rig, targets: Targets) -> None:
        """Fills the targets, moves other bytes the same way, and asserts that the targets stayed as they are."""
        targets.fill(AFTER)
        others, segments = Targets([1 << 20]), Segments.of([(0, 0, 0, 1 << 20)])
        link = await rig.usable_link()
        await rig.read(rig.serving.grant(0, 1 << 20), segments, others, link=link)
        others.check(segments, rig.source)
        assert targets.only(AFTER)

    @on_a_loop
    async def test_after_a_cancellation_nothing_lands(self) -> None:
        async with self.rig(self.large) as rig:
            grant = rig.serving.grant(0, self.large)
            targets, segments = Targets([self.large]), Segments.of([(0, 0, 0, self.large)])
            task, gate = await self.held(rig, lambda: rig.read(grant, segments, targets))
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done() or task.cancelled()
            gate.open()
            assert isinstance(await rig.outcome(task), asyncio.CancelledError)
            await self._nothing_lands(rig, targets)

    @on_a_loop
    async def test_a_cancelled_read_waits_for_whoever_still_writes(self) -> None:
        async with self.rig(self.large) as rig:
            grant = rig.serving.grant(0, self.large)
            targets, segments = Targets([self.large]), Segments.of([(0, 0, 0, self.large)])
            gate = Gate()
            if not self.hold(rig.reading, gate):
                return
            task = asyncio.get_running_loop().create_task(rig.read(grant, segments, targets))
            await gate.reached()
            for _ in range(3):  # impatience changes nothing
                task.cancel()
                for _ in range(5):
                    await asyncio.sleep(0)
                assert not task.done(), "ended while its thread is still in the middle"
            gate.open()
            assert isinstance(await rig.outcome(task), asyncio.CancelledError)

    @on_a_loop
    async def test_cancellation_at_any_moment(self) -> None:
        async with self.rig(self.large) as rig:
            grant = rig.serving.grant(0, self.large)
            targets, segments = Targets([self.large]), Segments.of([(0, 0, 0, self.large)])
            for turn in range(8):
                link = await rig.usable_link()
                task = asyncio.get_running_loop().create_task(rig.read(grant, segments, targets, link=link))
                for _ in range(turn * turn):
                    await asyncio.sleep(0)
                task.cancel()
                await rig.outcome(task)
                await self._nothing_lands(rig, targets)

    @on_a_loop
    async def test_a_deadline(self) -> None:
        async with self.rig(self.large) as rig:
            grant = rig.serving.grant(0, self.large)
            targets, segments = Targets([self.large]), Segments.of([(0, 0, 0, self.large)])

            async def hurried() -> None:
                await rig.link.read(grant.key, segments, targets.regions, timeout=0.001)

            task, gate = await self.held(rig, hurried)
            # The read may end only when its thread does, so the deadline has to come before the gate opens.
            asyncio.get_running_loop().call_later(0.2, gate.open)
            error = await rig.outcome(task)
            assert isinstance(error, DeadlineExceeded), repr(error)
            assert isinstance(error, TimeoutError)
            await self._nothing_lands(rig, targets)

    @on_a_loop
    async def test_the_serving_side_closes_in_mid_read(self) -> None:
        async with self.rig(self.large) as rig:
            grant = rig.serving.grant(0, self.large)
            targets, segments = Targets([self.large]), Segments.of([(0, 0, 0, self.large)])
            task, gate = await self.held(rig, lambda: rig.read(grant, segments, targets))
            await asyncio.wait_for(rig.serving.close(), LIMIT)
            gate.open()
            error = await rig.outcome(task)
            assert isinstance(error, TransferFailed), repr(error)
            assert rig.link.broken
            await refused(TransferFailed, rig.read(grant, segments, targets))

    @on_a_loop
    async def test_closing_the_link_ends_its_reads(self) -> None:
        async with self.rig(self.large) as rig:
            grant = rig.serving.grant(0, self.large)
            targets, segments = Targets([self.large]), Segments.of([(0, 0, 0, self.large)])
            task, gate = await self.held(rig, lambda: rig.read(grant, segments, targets))
            closing = asyncio.get_running_loop().create_task(rig.link.close())
            await asyncio.sleep(0)
            gate.open()
            await asyncio.wait_for(closing, LIMIT)
            targets.fill(AFTER)
            error = await rig.outcome(task)
            assert isinstance(error, TransferFailed), repr(error)
            assert rig.link.broken
            await rig.link.close()
            await refused(TransferFailed, rig.read(grant, segments, targets))
            assert targets.only(AFTER)

    @on_a_loop
    async def test_nobody_there(self) -> None:
        async with self.rig(4096) as rig:
            gone = self.make()
            await gone.start()
            endpoint = gone.endpoint
            await gone.close()
            await gone.close()
            try:
                link = await rig.reading.connect(endpoint, timeout=5.0)
            except (PeerUnreachable, DeadlineExceeded):
                return
            await link.close()
            raise AssertionError("connected to a transport that is closed")

    @on_a_loop
    async def test_the_serving_process_is_killed_in_mid_read(self) -> None:
        arena = self.large
        with _Child(type(self), arena) as child:
            reading = self.make()
            await reading.start()
            try:
                link = await reading.connect(child.endpoint, timeout=LIMIT)
                targets, segments = Targets([arena]), Segments.of([(0, 0, 0, arena)])
                await link.read(child.key, segments, targets.regions, timeout=LIMIT)
                targets.check(segments, pattern(arena))
                gate = Gate()
                can_hold = self.hold(reading, gate)
                read = link.read(child.key, segments, targets.regions, timeout=LIMIT)
                task = asyncio.get_running_loop().create_task(read)
                await (gate.reached() if can_hold else asyncio.sleep(0))
                child.kill()
                gate.open()
                await asyncio.wait({task}, timeout=LIMIT)
                assert task.done(), "the read outlives the process that it reads from"
                assert isinstance(task.exception(), TransferFailed), repr(task.exception())
                assert link.broken
                targets.fill(AFTER)
                await link.close()
                assert targets.only(AFTER)
            finally:
                await reading.close()

    async def _use(self, memory: list[weakref.ref[U8]]) -> None:
        """Reads, reads what is refused, leaves a second link open, and cancels a read; adds the memory that it used."""
        async with self.rig(1 << 20) as rig:
            grant = rig.serving.grant(0, 1 << 20)
            targets, segments = Targets([1 << 20]), Segments.of([(0, 0, 0, 1 << 20)])
            memory += (weakref.ref(region.array) for region in (rig.arena, *targets.regions))
            await rig.read(grant, segments, targets)
            with contextlib.suppress(HawkError):
                await rig.link.read(bytes(32), segments, targets.regions, timeout=LIMIT)
            second = await rig.reading.connect(rig.serving.endpoint, timeout=LIMIT)
            assert not second.broken  # left for the transport to close
            task = asyncio.get_running_loop().create_task(rig.read(grant, segments, targets))
            await asyncio.sleep(0)
            task.cancel()
            await rig.outcome(task)

    def test_nothing_is_left_behind(self) -> None:
        """Descriptors and threads are as many afterwards as before."""
        asyncio.run(self._use([]))
        before, threads = descriptors(), set(threading.enumerate())
        for _ in range(3):
            asyncio.run(self._use([]))
        assert set(threading.enumerate()) <= threads
        after = descriptors()
        assert len(after) <= len(before), "left open: " + "; ".join(fresh(before, after))

    def test_no_memory_waits_for_a_collector(self) -> None:
        """What was served or read into is let go when both sides have closed; it may be all that a machine has."""
        memory: list[weakref.ref[U8]] = []
        gc.disable()
        try:
            asyncio.run(self._use(memory))
            kept = [array for found in memory if (array := found()) is not None]
            assert not kept, f"{len(kept)} of {len(memory)} arrays are kept"
        finally:
            gc.enable()


class _Child:
    """Another process that serves a pattern; `key` opens all of it."""

    def __init__(self, contract: type[ContractBase], nbytes: int) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        command = "from hawk.transports.testing import serve_in_child; serve_in_child()"
        arguments = [inspect.getfile(contract), contract.__qualname__, str(nbytes)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.kill()
            raise AssertionError("the serving process did not start; its message is above")
        told = json.loads(line)
        self.endpoint: dict[str, str] = told["endpoint"]
        self.key = bytes.fromhex(told["key"])

    def kill(self) -> None:
        """SIGKILL, and returns when it is gone."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def serve_in_child() -> None:
    """What the serving process of the contract runs: arguments are a file, a class in it, and a size.

    Prints endpoint and key as one line of JSON, and serves until its standard input ends.
    """
    import importlib.util

    file, name, nbytes = sys.argv[1:4]
    spec = importlib.util.spec_from_file_location("hawk_contract_under_test", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    contract: ContractBase = getattr(module, name)()

    async def serve() -> None:
        transport, arena = contract.make(), contract.arena(int(nbytes))
        await transport.start()
        transport.serve(arena.region)
        grant = transport.grant(0, int(nbytes))
        print(json.dumps({"endpoint": transport.endpoint, "key": grant.key.hex()}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await transport.close()
        arena.close()

    asyncio.run(serve())
