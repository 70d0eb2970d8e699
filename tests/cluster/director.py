"""Gives the cluster work, restarts its agents in turn, cuts one off, and counts what came of every job."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

from hawk.client import Client
from hawk.errors import Busy, Draining, HawkError
from tests.cluster.network import Network
from tests.cluster.nodes import WORKERS, Cluster, Node
from tests.end_to_end import caches as c

PREFILL, DECODE = ("p0", "p1"), ("d0", "d1", "d2")
DIRECTORY = "e0"
CUT = "p0"
"""Who is cut off."""
TOKENS = 256
JOB = "15s"
"""What a fetch has; it outlives a lease."""
PATIENCE = 60.0
"""Seconds that one step may take before it counts as never."""

_NOT_TAKEN = (Draining, Busy)
"""What an agent answers that does not take a job: it promised nothing."""


class Broken(AssertionError):
    """A promise that did not hold."""


class Director:
    """One run.  `told` is called with a line for every step; `problems` are what did not hold."""

    def __init__(self, cluster: Cluster, network: Network, told: Callable[[str], None]) -> None:
        self.nodes = {name: Node(name, "prefill") for name in PREFILL} | {
            name: Node(name, "decode") for name in DECODE
        }
        self.problems: list[str] = []
        self.errors: Counter[str] = Counter()
        self.now = ""
        self._cluster, self._network, self._told = cluster, network, told
        self._numbers = itertools.count()
        self._cut: set[str] = set()
        self._work: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """The whole story; what did not hold is in `problems`."""
        self._spread = itertools.cycle(PREFILL)
        async with self._working():
            self._step("two prefill and three decode agents find each other and share the work")
            await self._everybody(lambda node: node.counts.ready >= 6, "has moved six jobs")
            await self._rolling_restart()
            await self._partition(CUT)
            self._step("the directory restarts; nobody waits for it")
            await self.restart_directory()
            await self._more(3)
        lost = self.errors.total()
        if lost:
            self.problems.append(f"{lost} jobs ended without a reason in sight: {dict(self.errors)}")

    async def restart_directory(self) -> None:
        """Set by whoever has started it."""

    # -- steps -----------------------------------------------------------------------------------------------

    def _step(self, what: str) -> None:
        self.now = what
        self._told(what)

    async def _rolling_restart(self) -> None:
        self._step("each agent in turn drains and is started anew; no job that was taken may be lost")
        before = self.errors.total()
        for node in self.nodes.values():
            await self._cluster.restart(node)
            self._start_work(node)
        await self._more(3)
        if self.errors.total() > before:
            self.problems.append(f"the rolling restart lost jobs: {dict(self.errors)}")

    async def _partition(self, name: str) -> None:
        node = self.nodes[name]
        self._step(f"{name} is cut off: its jobs end by name, the others go on")
        self._cut.add(name)
        node.state = "cut off"
        self._network.cut(name)
        others = [n for n in self.nodes.values() if n is not node]
        await self._reach(lambda: node.counts.failed > 0, f"a job with {name} has failed")
        await self._more(3, others)
        watching = self.nodes["d0"].client
        assert watching is not None
        await self._told_by(watching, everybody=False, what=f"the directory forgot {name}")
        self._step(f"{name} is back: it registers again, and is given jobs again")
        self._network.heal(name)
        await self._told_by(watching, everybody=True, what=f"the directory told of {name} again")
        node.there.clear()
        await self._reach(lambda: not node.running, f"the last job with {name} from then has ended")
        self._cut.discard(name)
        node.state = "up"
        node.there.set()
        await self._more(3)

    # -- waiting ---------------------------------------------------------------------------------------------

    async def _everybody(self, good: Callable[[Node], bool], what: str) -> None:
        for node in self.nodes.values():
            await self._reach(lambda node=node: good(node), f"{node.name} {what}")  # type: ignore[misc]

    async def _more(self, count: int, nodes: list[Node] | None = None) -> None:
        """Each of these nodes moves so many jobs more."""
        wanted = {node.name: node.counts.ready + count for node in nodes or self.nodes.values()}
        for name, ready in wanted.items():
            node = self.nodes[name]
            await self._reach(lambda node=node, ready=ready: node.counts.ready >= ready, f"{name} moves more")  # type: ignore[misc]

    async def _reach(self, good: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                while not good():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise Broken(f"never: {what}; {dict(self.errors)}") from None

    async def _told_by(self, client: Client, *, everybody: bool, what: str) -> None:
        """What another process learns has no event here."""
        try:
            async with asyncio.timeout(PATIENCE):
                while await _all_registered(client) is not everybody:
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise Broken(f"never: {what}") from None

    # -- work ------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _working(self) -> AsyncIterator[None]:
        for node in self.nodes.values():
            await self._cluster.start(node)
            self._start_work(node)
        try:
            yield
        finally:
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)
            for node in self.nodes.values():
                if node.state != "down":
                    await self._cluster.end(node)

    def _start_work(self, node: Node) -> None:
        if node.role == "decode" and node.runs == 1:
            self._work += [
                asyncio.get_running_loop().create_task(self._worker(node, number))
                for number in range(WORKERS)
            ]

    async def _worker(self, decode: Node, number: int) -> None:
        """Jobs into one of a decode agent's caches, one after another."""
        while True:
            await decode.there.wait()
            prefill = self.nodes[next(self._spread)]
            if not prefill.there.is_set():
                await asyncio.sleep(0.02)  # drawn again
                continue
            try:
                with self._counted(decode, prefill):
                    await self._job(decode, prefill, number)
            except Broken as broken:
                self.problems.append(str(broken))
            self._changed.set()

    @contextlib.contextmanager
    def _counted(self, *nodes: Node) -> Iterator[None]:
        """A job with these nodes; how it ends is counted with each."""
        began = time.perf_counter()
        for node in nodes:
            node.running += 1
        try:
            yield
        except _NOT_TAKEN:
            for node in nodes:
                node.counts.refused += 1
        except HawkError as error:
            for node in nodes:
                node.counts.failed += 1
            if self._cut.isdisjoint(node.name for node in nodes):
                self.errors[f"{error.code}: {error}"[:300]] += 1
        else:
            for node in nodes:
                node.counts.ready += 1
                node.counts.seconds += time.perf_counter() - began
        finally:
            for node in nodes:
                node.running -= 1

    async def _job(self, decode: Node, prefill: Node, number: int) -> None:
        assert decode.client is not None
        assert prefill.client is not None
        assert prefill.cache is not None
        assert prefill.source is not None
        device, job = decode.devices[number], next(self._numbers)
        for channel in device.channels:
            for base in device.offsets:
                channel[base : base + device.layout.channel_bytes] = c.CANARY
        source, target = c.tables(job, 0, 0, TOKENS, src=c.source_spec(), dst=c.target_spec())
        request = f"r{job}"
        moved = c.Moved(prefill.source, source, target, 0, TOKENS)
        offer = await prefill.client.offer(
            request, prefill.cache, source, tokens=TOKENS, consumer=decode.name, ttl=JOB
        )
        try:
            await decode.client.fetch(
                request=request, source=prefill.name, into=device, blocks=target, timeout=JOB
            )
        except BaseException:
            with contextlib.suppress(HawkError):
                await asyncio.shield(offer.withdraw())
            raise
        try:
            c.check(device, c.target_spec(), moved, guards=[device])
        except AssertionError as wrong:
            raise Broken(f"{request}: wrong bytes from {prefill.name} at {decode.name}: {wrong}") from wrong


async def _all_registered(client: Client) -> bool:
    """Whether the client's agent is told of every agent by the directory."""
    return (await client.status()).directory == f"etcd, {len(PREFILL) + len(DECODE)} agents"
