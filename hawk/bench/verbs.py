"""What RDMA work requests cost to build and to hand over, and on a machine with an RDMA device how fast READs are.

Segments of one page each, in two kinds of batch: `apart`, where no two follow each other in the arena, so each READ
takes one; and `together`, where all do, so that a READ takes as many as it can.  The targets, in an order of their own,
fill sixteen stretches at most, so that a WRITE takes as many as it can of either.  Stages:

    build        segments to chained requests, with addresses and lengths; for pushes by way of the rows that the reader
                 sends and the writer checks, in one process here
    address      keys and numbers of the queue pair that a batch goes to
    hand over    into pyverbs, up to its call of ibv_post_send, which is not made: there is no device in this
    objects      the same three by pyverbs' request objects, one by one; of a part of the requests

The last two take pyverbs, not a device.  With a device, links are made from it to itself and read at several sizes
of a request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.table import Table

from hawk.errors import InvalidArgument, MissingDependency
from hawk.memory import shared
from hawk.memory.region import Region, Segments
from hawk.transports import _pieces
from hawk.transports.verbs import VerbsConfig, VerbsTransport, _abi, _find, _pyverbs_queue, _wire, _work
from hawk.transports.verbs._abi import Batch, Places, Shape
from hawk.transports.verbs._plan import plan
from hawk.transports.verbs._register import Registered

if TYPE_CHECKING:
    from rich.console import Console

    from hawk.transports.base import Link
    from hawk.transports.verbs._device import Driver

PAGE = 2048
KINDS = ("apart", "together")
WAYS: tuple[Literal["pull", "push"], ...] = ("pull", "push")
STAGES = ("build", "address", "hand over", "objects")
SIZES = (4 << 10, 64 << 10, 1 << 20)
_OBJECTS = 4096
_SHAPE = Shape(max_sge=30, message=1 << 20, batch_wrs=64, batch_bytes=2 << 20)


@dataclass(frozen=True)
class Row:
    """One stage of one kind, pulled or pushed: seconds of the runs, for so many segments and requests."""

    kind: str
    way: str
    stage: str
    segments: int
    requests: int
    seconds: tuple[float, ...]

    @property
    def request(self) -> float:
        """Nanoseconds for each request, of the median run."""
        return statistics.median(self.seconds) / self.requests * 1e9

    @property
    def segment(self) -> float:
        """Nanoseconds for each segment."""
        return statistics.median(self.seconds) / self.segments * 1e9

    @property
    def per_mib(self) -> float:
        """Requests for each MiB."""
        return self.requests / (self.segments * PAGE / 2**20)


@dataclass(frozen=True)
class Rate:
    """READs or WRITEs of one size: bytes, seconds, and seconds of processor time on both sides together."""

    size: int
    nbytes: int
    seconds: float
    cpu: float
    way: str = "pull"


@dataclass
class Result:
    """All rows; `left_out` says why something was not measured."""

    rows: list[Row] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        rows = [
            {
                **dataclasses.asdict(r),
                "ns_per_request": r.request,
                "ns_per_segment": r.segment,
                "requests_per_mib": r.per_mib,
            }
            for r in self.rows
        ]
        return {"rows": rows, "rates": [dataclasses.asdict(r) for r in self.rates], "left_out": self.left_out}


class _NoQueue:
    """Takes what would be posted."""

    def post_send(self, request: object) -> None:
        """Posts nothing."""


def run(
    segments: int = 160_000,
    runs: int = 5,
    mebibytes: int = 64,
    *,
    driver: Driver | None = None,
) -> Result:
    """Measures; `mebibytes` is read at each size where there is a device (`driver`, by default the machine's own)."""
    for name, value, least in (("segments", segments, 64), ("runs", runs, 1), ("mebibytes", mebibytes, 1)):
        if value < least:
            raise InvalidArgument("too few", field=name, got=value, expected=f"at least {least}")
    result = Result()
    try:
        _find.load()
        has_pyverbs = True
    except MissingDependency as error:
        has_pyverbs = False
        result.left_out["hand over"] = result.left_out["objects"] = str(error)
    for kind in KINDS:
        for way in WAYS:
            result.rows += _building(kind, way, segments, runs, has_pyverbs)
    verdict = VerbsTransport.probe()
    if driver is None and not verdict.ok:
        result.left_out["rates"] = verdict.reason
    else:
        for size in SIZES:
            for way in WAYS:
                result.rates.append(asyncio.run(_reading(size, way, mebibytes << 20, driver)))
    return result


def _batch_of(kind: str, count: int) -> tuple[Segments, Places]:
    step = PAGE * 2 if kind == "apart" else PAGE
    rows = np.arange(count, dtype=np.int64)
    # Targets in an order of their own, over eight regions.
    local = np.random.default_rng(0).permutation(count // 8 + 1)[rows // 8] * PAGE
    size = (count // 8 + 1) * PAGE
    begin = np.arange(8, dtype=np.int64) * size
    places = Places(begin, begin, begin + (1 << 40), np.zeros(1, np.int64), np.full(1, 1 << 41))
    segments = Segments((rows % 8).astype(np.int32), local, rows * step, np.full(count, PAGE, dtype=np.int64))
    return segments, places


def _batches(segments: Segments, places: Places) -> list[Batch]:
    return [
        batch
        for piece in _pieces.cut(segments, 1 << 60, _abi.BUILD_ROWS)
        for batch in _abi.batches(_pieces.join(piece), places, _SHAPE)
    ]


def _pushed(segments: Segments, places: Places) -> list[Batch]:
    """The writer's batches for a read that is pushed, and what it takes to ask for them."""
    step = int(places.begin[1])
    regions = [Region("bench", np.zeros(step, np.uint8)) for _ in places.begin]
    registered = [
        Registered(np.zeros(1, np.int64), np.full(1, at), ((),), (-1,)) for at in places.address.tolist()
    ]
    wanted = plan(segments, regions, registered, VerbsConfig(direction="push"))
    assert wanted is not None
    arena = Registered(np.zeros(1, np.int64), np.full(1, 1 << 41), ((),), (-1,))
    shape = dataclasses.replace(_SHAPE, opcode=_abi.WRITE)
    keys = [[0] * len(wanted.parts)]
    made = []
    for at in range(0, len(wanted.rows), _wire.PUSH_ROWS):
        rows = wanted.rows[at : at + _wire.PUSH_ROWS].astype("<i8").tobytes()
        asked = _wire.Push(1, bytes(32), 1, wanted.windows, wanted.bases, keys, [1], rows)
        made += list(_work.written(asked, _wire.rows_of(asked), arena, shape))
    return made


def _building(kind: str, way: str, count: int, runs: int, has_pyverbs: bool) -> list[Row]:
    segments, places = _batch_of(kind, count)
    make = _batches if way == "pull" else _pushed
    local, remote = np.zeros(8, np.uint32), np.zeros(16, np.uint32)
    nothing = _NoQueue()
    taken: dict[str, list[float]] = {stage: [] for stage in STAGES[: 4 if has_pyverbs else 2]}
    requests = some = pieces = 0
    for _ in range(runs + 1):
        began = time.perf_counter()
        batches = make(segments, places)
        taken["build"].append(time.perf_counter() - began)
        requests = sum(map(len, batches))
        began = time.perf_counter()
        for batch in batches:
            batch.address(local, remote, 1)
        taken["address"].append(time.perf_counter() - began)
        if not has_pyverbs:
            continue
        began = time.perf_counter()
        for batch in batches:
            _pyverbs_queue.post(nothing, batch)
        taken["hand over"].append(time.perf_counter() - began)
        few = batches[: max(_OBJECTS // max(len(batches[0].sge), 1), 1)]
        some, pieces = sum(map(len, few)), sum(len(batch.sge) for batch in few)
        began = time.perf_counter()
        for batch in few:
            _pyverbs_queue.post_one_by_one(nothing, batch)
        taken["objects"].append(time.perf_counter() - began)
    return [
        Row(
            kind,
            way,
            stage,
            pieces if stage == "objects" else count,
            some if stage == "objects" else requests,
            tuple(seconds[1:]),  # the first run warms up
        )
        for stage, seconds in taken.items()
    ]


async def _reading(size: int, way: Literal["pull", "push"], nbytes: int, driver: Driver | None) -> Rate:
    """READs or WRITEs of `size` bytes each from the device to itself."""
    source = shared.alloc(nbytes, name="bench-verbs")
    transport = VerbsTransport(VerbsConfig(message=2 * size, direction=way), driver=driver)
    await transport.start()
    try:
        transport.serve(source.region())
        link = await transport.connect(transport.endpoint, timeout=60)
        found = await rate(link, transport.grant(0, nbytes).key, size, nbytes)
        return dataclasses.replace(found, way=way)
    finally:
        await transport.close()
        source.close()


async def rate(link: Link, key: bytes, size: int, nbytes: int) -> Rate:
    """READs or WRITEs of `size` bytes each, every one of one piece, over a link whose `message` setting is twice that.

    Reads `nbytes` bytes of what the key opens, from its first on, once to warm up and once to measure.
    """
    target = Region("bench-target", np.zeros(nbytes, np.uint8))
    starts = np.arange(0, nbytes, size, dtype=np.int64)
    # Every other one first, so that no two can be joined.
    order = np.concatenate((starts[::2], starts[1::2]))
    where = np.empty_like(starts)
    where[: len(order)] = order
    segments = Segments(np.zeros(len(starts), np.int32), where, starts, np.full(len(starts), size))
    await link.read(key, segments, [target], timeout=600)
    began, cpu = time.perf_counter(), time.process_time()
    await link.read(key, segments, [target], timeout=600)
    return Rate(size, nbytes, time.perf_counter() - began, time.process_time() - cpu)


def render(result: Result, console: Console) -> None:
    """Prints the result as tables."""
    table = Table(title="Building work requests", title_justify="left")
    for heading in ("kind", "way", "stage", "segments", "requests", "per MiB", "ns/request", "ns/segment"):
        table.add_column(heading, justify="left" if heading in ("kind", "way", "stage") else "right")
    for row in result.rows:
        table.add_row(
            row.kind,
            row.way,
            row.stage,
            f"{row.segments:,}",
            f"{row.requests:,}",
            f"{row.per_mib:,.1f}",
            f"{row.request:,.0f}",
            f"{row.segment:,.0f}",
        )
    console.print(table)
    if result.rates:
        rates = Table(title="From a device to itself", title_justify="left")
        for heading in ("bytes each", "way", "MB/s", "CPU s/GiB"):
            rates.add_column(heading, justify="right")
        for rate in result.rates:
            gib = rate.nbytes / 2**30
            rates.add_row(
                f"{rate.size:,}",
                rate.way,
                f"{rate.nbytes / rate.seconds / 1e6:,.1f}",
                f"{rate.cpu / gib:.2f}",
            )
        console.print(rates)
    for what, why in result.left_out.items():
        console.print(f"{what} left out: {why}")
