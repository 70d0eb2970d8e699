"""Both sides of a job in one process, joined by a wire that loses and repeats frames as it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from hawk.agent.sessions import Session, allocate_cache
from hawk.control.beat import BEAT
from hawk.control.frames import PROTOCOL_VERSION
from hawk.control.messages import Hello, PeerMessage, Welcome
from hawk.errors import AccessDenied, HawkError
from hawk.jobs import serving as serving_module
from hawk.jobs.admission import Admission
from hawk.jobs.caches import CacheBook, CacheEntry, compile_descr
from hawk.jobs.fetch import FetchContext, FetchJob
from hawk.jobs.offers import OfferBook, OfferEntry
from hawk.jobs.planner import Planner
from hawk.jobs.quarantine import Quarantine
from hawk.jobs.request import FetchRequest
from hawk.jobs.retilers import OnProcessors, Retilers
from hawk.jobs.room import Room
from hawk.jobs.serve import ServeContext
from hawk.jobs.serving import Serving
from hawk.jobs.turns import Slots
from hawk.memory.arena import Arena
from hawk.memory.npu import EmulatedNpu
from hawk.memory.region import ByteRanges, Region, Segments
from hawk.observe.metrics import Metrics
from hawk.plan.types import Placement
from hawk.retile.cpu import Retiler
from hawk.transports.base import Capabilities, Grant, Viability
from tests.end_to_end import caches as c
from tests.unit.jobs.wire import Faults, Wire

CAPACITY = 3 << 19
TOKENS = 128
SOURCE = c.source_spec(blocks=8)
TARGET = c.target_spec(block_size=64, blocks=4)
ENDPOINT = {"where": "here"}
PEER = b"d0"


class HoldingNpu(EmulatedNpu):
    """A device that sees what was written only after a flush of just those bytes."""

    def __init__(self) -> None:
        super().__init__("npu0", capacity=CAPACITY, channels=8)
        for region in self.regions:
            region.array[:] = c.CANARY
        self.visible = [region.array.copy() for region in self.regions]

    async def make_visible(self, ranges: ByteRanges) -> None:
        columns = (ranges.region.tolist(), ranges.start.tolist(), ranges.nbytes.tolist())
        for region, start, nbytes in zip(*columns, strict=True):
            part = slice(start, start + nbytes)
            self.visible[region][part] = self.regions[region].array[part]


class Wires:
    """A transport within this process, and its own link.  `hold` stands in every read's way where it is set.

    at_once    it does without waiting what needs no wait
    """

    name = "tcp"
    endpoint = ENDPOINT
    broken = False
    shadow = None
    expect = staticmethod(lambda grant, reader: None)

    def __init__(self, *, can_fence: bool = True) -> None:
        self.capabilities = Capabilities(can_fence=can_fence)
        self.grants: dict[bytes, Grant] = {}
        self.region: Region | None = None
        self.hold: Callable[[], Any] | None = None
        self.reading = 0
        self.at_once = False
        self.after_revoke: Callable[[Grant], bool] = lambda grant: True
        self.corrupt: Callable[[], None] = lambda: None

    def serve(self, region: Region) -> None:
        self.region = region

    def grant(self, offset: int, nbytes: int) -> Grant:
        made = Grant(secrets.token_bytes(32), offset, nbytes)
        self.grants[made.key] = made
        return made

    def shut(self, grant: Grant) -> bool:
        return self.at_once and self._shut(grant)

    async def revoke(self, grant: Grant) -> bool:
        return self._shut(grant)

    def _shut(self, grant: Grant) -> bool:
        self.grants.pop(grant.key, None)
        return self.after_revoke(grant)

    def reachable(self, endpoint: dict[str, str]) -> Viability:
        return Viability(endpoint == ENDPOINT)

    async def read(self, key: bytes, segments: Segments, regions: Any, *, timeout: float) -> None:
        self.reading += 1
        try:
            if self.hold is not None:
                await self.hold()
            grant = self.grants.get(key)
            low, high = int(segments.remote.min()), int((segments.remote + segments.nbytes).max())
            if grant is None or low < grant.offset or high > grant.offset + grant.nbytes:
                raise AccessDenied("no such grant")
            assert self.region is not None
            columns = (segments.region, segments.local, segments.remote, segments.nbytes)
            rows = zip(*(column.tolist() for column in columns), strict=True)
            for region, local, remote, nbytes in rows:
                regions[region].array[local : local + nbytes] = self.region.array[remote : remote + nbytes]
        finally:
            self.reading -= 1

    def read_now(self, key: bytes, segments: Segments, regions: Any) -> bool:
        if not self.at_once or self.hold is not None:
            return False
        reading = self.read(key, segments, regions, timeout=0.0)
        try:
            reading.send(None)
        except StopIteration:
            return True
        except AccessDenied:
            return False
        raise AssertionError("a read without a hold waits for nothing")


class FakeServer:
    """What `Serving` needs of a server; frames for the peer go to `out`."""

    def __init__(self, endpoint: Any, codec: Any, handler: Any, *, on_gone: Any, **_: Any) -> None:
        self.handler = handler
        self.on_gone = on_gone
        self.peers: dict[bytes, Any] = {}
        self.out: Callable[[PeerMessage], None] = lambda message: None

    def start(self) -> None:
        return

    def close(self) -> None:
        return

    async def read_by_all(self, timeout: float) -> None:
        return

    def send(self, identity: bytes, message: PeerMessage) -> None:
        assert identity == PEER
        self.out(message)


class FakeSession:
    """What a fetch needs of a session with its peer."""

    name = "p0"
    generation = 1
    version = PROTOCOL_VERSION
    state = "up"

    def __init__(self, out: Callable[[PeerMessage], None]) -> None:
        self.endpoints = {"tcp": ENDPOINT}
        self.jobs: dict[str, tuple[Any, Any]] = {}
        self.send = out

    def attach(self, job: str, on_message: Any, on_lost: Any) -> None:
        self.jobs[job] = (on_message, on_lost)

    def detach(self, job: str) -> None:
        self.jobs.pop(job, None)

    def take(self, message: PeerMessage) -> None:
        entry = self.jobs.get(getattr(message, "job", ""))
        if entry is not None:
            entry[0](message)

    def lose(self, error: HawkError) -> None:
        for _, on_lost in list(self.jobs.values()):
            on_lost(error)


class Rig:
    """A prefill side with one source and a decode side with one device.  `seen` are the frames, for failures."""

    def __init__(
        self, *, lease: float, faults: dict[tuple[str, int], str], mode: str, arena: int, can_fence: bool
    ) -> None:
        self.seen: list[str] = []
        self.metrics = Metrics()
        self.arena = Arena(arena)
        self.planner, self.retiler = Planner(), Retiler(1)
        self.transport = Wires(can_fence=can_fence)
        self.transport.serve(self.arena.region)
        self.quarantine = Quarantine(self.arena, interval=0.01)
        self.source_caches, self.target_caches = CacheBook(), CacheBook()
        self.ended: list[OfferEntry] = []
        self.offers = OfferBook(16, self.ended.append)
        self.source = c.KVCache.from_numpy(
            [np.zeros(2 * SOURCE.blocks * 16 * c.HEADS * c.DIM, np.uint16) for _ in range(c.LAYERS)], SOURCE
        )
        c.fill(self.source)
        self.npu = HoldingNpu()
        self.session = Session(b"s" * 16, None)  # type: ignore[arg-type]
        self.target = allocate_cache(self.session, TARGET.descr(), self.npu)
        self.target_caches.add(self.target)
        self.source_entry = self._source()
        self.source_caches.add(self.source_entry)
        self.room = Room(self.arena, per_peer=1 << 17, per_transport=1 << 20)
        self.admission = Admission(working=8, queued=8, early=4, what="serves")
        context = ServeContext(
            self.room,
            Retilers(OnProcessors(self.retiler, Slots(2))),
            self.planner,
            {"tcp": self.transport},
            self.offers,
            self.source_caches,
            self.quarantine,
            self.metrics,
            lease,
            1 << 16,
        )
        self.serving = Serving(
            None,
            None,
            context,
            lambda: Welcome("p0", "both", "t", {"tcp": ENDPOINT}),  # type: ignore[arg-type]
            beat=BEAT,
            generation=1,
            admission=self.admission,
        )
        self.server: FakeServer = self.serving.server  # type: ignore[assignment]
        self.to_p, self.to_d = Wire(faults, self.seen), Wire(faults, self.seen)
        self.peer = FakeSession(self.to_p.send)
        self.to_p.deliver = lambda frame: self.server.handler(PEER, SimpleNamespace(from_generation=1), frame)
        self.to_d.deliver = self.peer.take
        self.server.out = self.to_d.send
        hello = Hello("d0", "both", "t", {"tcp": ENDPOINT})
        self.server.handler(PEER, SimpleNamespace(from_generation=1), hello)
        self.context = FetchContext(
            peers=SimpleNamespace(session=self.session_of),  # type: ignore[arg-type]
            links=self,
            transports={"tcp": self.transport},
            prefer=("tcp",),
            on_failure="fail",  # type: ignore[arg-type]
            caches=self.target_caches,
            planner=self.planner,
            metrics=self.metrics,
            chunk=1 << 16,
            credit=1 << 17,
            staging=1 << 18,
            mode=mode,
        )
        self.progress: list[tuple[str, int, int]] = []

    async def reach(self, state: str) -> None:
        """Returns when a fetch has told of that state."""
        async with asyncio.timeout(20):
            while not any(seen == state for seen, _, _ in self.progress):
                await asyncio.sleep(0)

    def _source(self) -> CacheEntry:
        regions = tuple(Region(f"b{i}", buffer) for i, buffer in enumerate(self.source.buffers))
        places = np.arange(len(regions), dtype=np.int32).reshape(-1, 1)
        return CacheEntry(
            descr=SOURCE.descr(),
            layout=compile_descr(SOURCE.descr()),
            placement=Placement(places, np.zeros_like(places, dtype=np.int64)),
            regions=regions,
            session=b"p" * 16,
        )

    # What a fetch asks of `peers` and `links`.

    @contextlib.asynccontextmanager
    async def session_of(
        self, name: str, address: str, *, timeout: float, patience: float
    ) -> AsyncIterator[FakeSession]:
        yield self.peer

    async def get(self, session: FakeSession, transport: str, *, timeout: float) -> Wires:
        return self.transport

    def offer(
        self,
        *,
        layers: int = c.LAYERS,
        request: str = "r",
        consumers: tuple[str, ...] = (),
        count: int = 1,
        ttl: float = 60.0,
    ) -> OfferEntry:
        entry = OfferEntry(
            request, self.source_entry, np.arange(SOURCE.blocks), TOKENS, b"note", layers, consumers, count
        )
        self.offers.add(entry, ttl)
        return entry

    def fetch(
        self,
        claim: str,
        *,
        timeout: float = 10.0,
        wait: bool = False,
        request: str = "r",
        generation: str = "",
    ) -> FetchJob:
        return FetchJob(
            self.context,
            FetchRequest(
                job=secrets.token_hex(16),
                request=request,
                claim=claim,
                source="p0",
                address="",
                generation=generation,
                cache=self.target,
                blocks=np.array([3, 1]),
                first=0,
                tokens=TOKENS,
                timeout=timeout,
                wait=wait,
            ),
            lambda state, done, total: self.progress.append((state.value, done, total)),
        )

    def check_bytes(self) -> None:
        """What the device sees is what the reference says."""
        device = SimpleNamespace(
            channels=self.npu.visible,
            offsets=[int(row[0]) for row in self.target.placement.offset],
            layout=self.target.layout,
        )
        moved = c.Moved(self.source, np.arange(8), [3, 1], 0, TOKENS)
        c.check(device, TARGET, moved, guards=[device])  # type: ignore[arg-type, list-item]

    async def over(self) -> None:
        """Every job has ended and nothing is held: not a range, not a block, not a grant, not a credit."""
        await asyncio.wait_for(self.serving.idle(), 20)
        while len(self.quarantine) or self.peer.jobs:
            await asyncio.sleep(0.01)
        assert self.arena.allocator.owned() == {}
        assert self.arena.allocator.quarantined_bytes == 0
        assert self.room.waiting == self.room.used("peer d0") == self.room.used("transport tcp") == 0
        assert (self.admission.working, self.admission.queued, self.admission.early) == (0, 0, 0)
        assert self.transport.grants == {}
        assert self.transport.reading == 0
        assert self.target.owners == self.target.quarantined == {}
        assert self.target.users == self.source_entry.users == 0
        assert not self.peer.jobs
        assert len(self.npu.allocations()) == 6
        self.arena.allocator.check()

    async def close(self) -> None:
        await self.serving.close()
        await self.quarantine.close()
        self.planner.close()
        self.retiler.close()
        self.npu.close()
        self.arena.close()


@contextlib.asynccontextmanager
async def rig(
    *,
    lease: float = 5.0,
    faults: Faults | None = None,
    mode: str = "direct",
    arena: int = 1 << 18,
    can_fence: bool = True,
) -> AsyncIterator[Rig]:
    """A rig whose pools must be whole again at the end."""
    real, serving_module.Server = serving_module.Server, FakeServer  # type: ignore[misc, assignment]
    try:
        made = Rig(lease=lease, faults=faults or {}, mode=mode, arena=arena, can_fence=can_fence)
    finally:
        serving_module.Server = real  # type: ignore[misc]
    try:
        yield made
        await made.over()
    except BaseException as error:
        error.add_note("frames: " + ", ".join(made.seen))
        raise
    finally:
        await made.close()
