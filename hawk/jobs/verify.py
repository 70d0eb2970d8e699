"""End-to-end checks: what the prefill side retiled is what lies in the decode side's memory before it is ready.

The decode side asks (`Fetch.verify`), the prefill side says whether it will (`Accepted.verify`), and sends with every
chunk the XXH3-64 of each of its stretches (see `hawk.plan.stretches`), taken from the arena right after the retile.
After its last flush, and before Release, the decode side reads the same stretches where they landed.  `sample` checks
a part of them, other ones in each attempt, that both sides derive from the job id.

XXH3 finds accidents: lost, misplaced and flipped bytes go unnoticed once in 2**64.  It has no key, so it is no
protection against somebody who changes bytes on purpose; that is what an encrypted transport is for.
"""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
import xxhash

from hawk.errors import BadFrame, InvalidArgument, Unverifiable, VerificationFailed
from hawk.jobs.looking import brought
from hawk.jobs.states import settle
from hawk.memory.cuda import device
from hawk.memory.cuda_look import Look
from hawk.observe.log import get as get_log
from hawk.plan import stretches
from hawk.retile.native import copy_segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from hawk.config_schema import IntegrityConfig
    from hawk.control.messages import Accepted, Fetch, Prepared
    from hawk.jobs.caches import CacheEntry
    from hawk.observe.metrics import Metrics
    from hawk.plan.stretches import Stretches
    from hawk.plan.types import Chunk, TargetChunk

    I64 = NDArray[np.int64]
    U8 = NDArray[np.uint8]
    U64 = NDArray[np.uint64]

log = get_log("hawk.jobs.verify")

CHECK = "xxh3-64"
"""The only check there is; a name, so that another one can come beside it."""

Mode = Literal["off", "sample", "full"]

_BATCH = 1 << 20
"""Bytes gathered at a time: they stay in a core's own cache between the copy and the hash."""

_LONG = 8 << 10
"""Mean length of a stretch's pieces, bytes, from which hashing one after the other is cheaper than gathering them."""

_SLICE = 4 << 20
"""Bytes that a thread takes at a time."""

_MOST = 1 << 17
"""Checks that one `Prepared` can carry."""


# -- which, and what ------------------------------------------------------------------------------------------


def chosen(job: str, chunk: int, count: int, share: float) -> I64:
    """Numbers of the stretches that are checked, `int64[ceil(share * count)]`, ascending, out of `count`.

    The same for the same job and chunk, and as good as random otherwise: the lowest of a hash of each number.  So a
    stretch that is wrong is found with a chance of `ceil(share * count) / count`.  The hash is the finaliser of
    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    number = np.arange(count, dtype=np.int64)
    wanted = min(math.ceil(share * count), count)
    if wanted == count:
        return number
    seed = np.uint64((int(job, 16) ^ (int(job, 16) >> 64) ^ chunk * 0x9E3779B97F4A7C15) & (1 << 64) - 1)
    z = (number.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + seed
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return np.sort(np.argsort(z, kind="stable")[:wanted])


def checks_of(
    found: Stretches, regions: Sequence[U8], out: U64, begin: int = 0, end: int | None = None
) -> None:
    """Writes the checks of stretches `[begin, end)` to their places in `out`, `uint64[len(found)]`.

    regions    what `found.rows.region` names, contiguous `uint8[...]`
    """
    rows, first = found.rows, found.first
    end = len(found) if end is None else end
    size = np.concatenate((np.zeros(1, np.int64), np.cumsum(rows.nbytes)))[first]
    views = [memoryview(array.data) for array in regions]
    addresses = np.asarray([array.ctypes.data for array in regions], np.int64)
    scratch = np.empty(0, np.uint8)
    while begin < end:
        until = min(max(int(size.searchsorted(size[begin] + _BATCH, "right")) - 1, begin + 1), end)
        low, high = int(first[begin]), int(first[until])
        region, local, nbytes = rows.region[low:high], rows.local[low:high], rows.nbytes[low:high]
        edges = (first[begin : until + 1] - low).tolist()
        total = int(size[until] - size[begin])
        if high - low == until - begin or total >= _LONG * (high - low):
            places = list(zip(region.tolist(), local.tolist(), nbytes.tolist(), strict=True))
            out[begin:until] = [_in_place(views, places[a:b]) for a, b in pairwise(edges)]
        else:
            if len(scratch) < total:
                scratch = np.empty(total, np.uint8)
            out[begin:until] = _gathered(addresses[region] + local, nbytes, edges, scratch)
        begin = until


def _in_place(views: Sequence[memoryview], places: Sequence[tuple[int, int, int]]) -> int:
    """The check of one stretch, from (region, offset, length) of its pieces, where they lie."""
    (region, at, nbytes), *more = places
    if not more:
        return xxhash.xxh3_64_intdigest(views[region][at : at + nbytes])
    whole = xxhash.xxh3_64(views[region][at : at + nbytes])
    for region, at, nbytes in more:
        whole.update(views[region][at : at + nbytes])
    return whole.intdigest()


def _gathered(address: I64, nbytes: I64, edges: Sequence[int], scratch: U8) -> list[int]:
    """The checks of stretches of many small pieces: those of stretch i are `[edges[i], edges[i + 1])`."""
    place = np.concatenate((np.zeros(1, np.int64), np.cumsum(nbytes)))
    here = np.asarray([scratch.ctypes.data], np.int64)
    copy_segments(here, np.zeros(len(nbytes), np.int32), place[:-1], 0, address, nbytes)
    view = memoryview(scratch.data)
    return [xxhash.xxh3_64_intdigest(view[a:b]) for a, b in pairwise(place[edges].tolist())]


def _slices(found: Stretches) -> Iterator[tuple[int, int]]:
    """Runs of stretches of about as many bytes as a thread takes at a time."""
    size = np.cumsum(found.rows.nbytes)[found.first[1:] - 1]
    begin, done = 0, 0
    while begin < len(size):
        until = max(int(size.searchsorted(done + _SLICE, "right")), begin + 1)
        yield begin, until
        begin, done = until, int(size[until - 1])


# -- both sides -----------------------------------------------------------------------------------------------


class Verifier:
    """What an agent's config says about checks, and the threads that do them.

    mode       what this agent's fetches ask for; what it sends is checked as its peers ask
    sample     the part of the stretches that `sample` checks, above 0 to 1
    require    a fetch from a peer that sends no checks ends `Unverifiable`; else it goes on without
    retries    how often a fetch whose check failed is tried again
    """

    def __init__(
        self,
        mode: Mode = "off",
        *,
        sample: float = 0.05,
        require: bool = True,
        retries: int = 0,
        threads: int = 1,
    ) -> None:
        self.share = {"off": 0.0, "sample": sample, "full": 1.0}[mode]
        self.require = require
        self.retries = retries
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hawk-verify")

    @classmethod
    def of(cls, config: IntegrityConfig, threads: int) -> Verifier:
        """As `[integrity]` says, with so many threads."""
        return cls(
            config.verify,
            sample=config.sample,
            require=config.unverified == "refuse",
            retries=1 if config.on_mismatch == "retry" else 0,
            threads=threads,
        )

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def asks(self) -> str:
        """The check that a fetch asks for, or empty."""
        return CHECK if self.share else ""

    async def run(self, work: Iterable[Callable[[], None]]) -> None:
        """Does all of `work` in the threads; raises the first error.  However it ends, no thread is at it then."""
        todo = _Todo(iter(work))
        waits = [
            asyncio.get_running_loop().run_in_executor(self._pool, todo.drain) for _ in range(self._threads)
        ]
        try:
            await asyncio.wait(waits)
        finally:
            todo.stopped = True
            for wait in waits:
                await settle(wait)
        for wait in waits:
            wait.result()


class _Todo:
    """Work for whichever thread is free."""

    def __init__(self, work: Iterator[Callable[[], None]]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self.stopped = False

    def drain(self) -> None:
        """Works until nothing is left or somebody stopped it."""
        try:
            while not self.stopped:
                with self._lock:
                    each = next(self._work, None)
                if each is None:
                    return
                each()
        except BaseException:
            self.stopped = True
            raise


class Sealer:
    """The sending side of one job: the checks that go with each chunk.

    name    what `Accepted.verify` says: the check that was asked for if it is one of ours, else empty
    plan    the target's side of a chunk
    """

    def __init__(self, verifier: Verifier, fetch: Fetch, plan: Callable[[Chunk], TargetChunk]) -> None:
        known = fetch.verify == CHECK and fetch.share > 0
        self.name = CHECK if known else ""
        self._verifier = verifier
        self._job, self._share = fetch.job, fetch.share
        self._plan = plan

    async def seal(self, number: int, chunk: Chunk, arena: U8, metrics: Metrics) -> bytes:
        """The checks of a chunk that was just retiled into `arena`; empty where none were asked for."""
        if not self.name:
            return b""
        began = time.perf_counter()
        checks: list[U64] = []

        def work() -> Iterator[Callable[[], None]]:
            found = stretches.prepared(self._plan(chunk))
            found = found.take(chosen(self._job, number, len(found), self._share))
            if len(found) > _MOST:
                raise InvalidArgument(
                    "the chunk has more parts than checks fit into a message",
                    field="integrity.verify",
                    got=f"{len(found)} parts",
                    expected=f"{_MOST} or fewer",
                    hint="Lower jobs.chunk, or check a sample",
                )
            checks.append(out := np.empty(len(found), np.uint64))
            for begin, end in _slices(found):
                yield functools.partial(checks_of, found, [arena], out, begin, end)

        await self._verifier.run(work())
        metrics.phase("seal", time.perf_counter() - began)
        return checks[0].astype("<u8").tobytes()


class Arrivals:
    """The receiving side of one attempt: what came, to be checked where it lies once all of it is there.

    wanted    whether it is checked
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self.wanted = False
        self._came: list[tuple[Prepared, TargetChunk]] = []

    def begin(self, accepted: Accepted) -> None:
        """P has said whether it sends checks; raises `Unverifiable` where it must and does not."""
        asked = self._verifier.asks
        self.wanted = bool(asked) and accepted.verify == asked
        if asked and not self.wanted and self._verifier.require:
            raise Unverifiable(
                "the prefill side sends no checks of what it prepares",
                field="integrity.verify",
                got=accepted.verify or "none (a peer of protocol 1 knows none)",
                expected=asked,
                hint='integrity.unverified = "allow" goes on without for such peers',
            )

    def came(self, prepared: Prepared, planned: TargetChunk) -> None:
        """A chunk is in its place."""
        if self.wanted:
            self._came.append((prepared, planned))

    async def verify(self, cache: CacheEntry, phases: dict[str, float], metrics: Metrics) -> None:
        """Compares everything that came with what was sent, after the last flush; says in `phases` how long it took.

        Raises `VerificationFailed` naming the first stretch that differs, `BadFrame` for checks that cannot be this
        chunk's.
        """
        if not self.wanted:
            return
        began = time.perf_counter()
        look = Look(device(cache.gpu)) if cache.gpu >= 0 else None
        regions = [] if look is not None else [region.array for region in cache.regions]
        work = (
            each
            for prepared, planned in self._came
            for each in self._parts(prepared, planned, cache, regions, look)
        )
        try:
            await self._verifier.run(work)
        except VerificationFailed as fault:
            metrics.mismatch()
            log.error("a check failed", reason=str(fault))
            raise
        finally:
            if look is not None:
                await settle(asyncio.ensure_future(asyncio.to_thread(look.close)))
        phases["verify"] = time.perf_counter() - began
        metrics.phase("verify", phases["verify"])

    def _parts(
        self,
        prepared: Prepared,
        planned: TargetChunk,
        cache: CacheEntry,
        regions: list[U8],
        look: Look | None,
    ) -> Iterator[Callable[[], None]]:
        found = stretches.landed(planned, cache.placement)
        found = found.take(chosen(prepared.job, prepared.chunk, len(found), self._verifier.share))
        if len(prepared.checks) != 8 * len(found):
            raise BadFrame(
                "the checks are not those of this chunk",
                field=f"chunk {prepared.chunk}",
                got=f"{len(prepared.checks)} bytes",
                expected=f"{8 * len(found)} bytes",
            )
        sent = np.frombuffer(prepared.checks, "<u8")
        there = np.empty(len(found), np.uint64)

        def compare(begin: int, end: int) -> None:
            if look is None:
                checks_of(found, regions, there, begin, end)
            else:
                here, seen = brought(found, cache.regions, look, begin, end)
                checks_of(here, [seen], there[begin:end])
            wrong = np.flatnonzero(there[begin:end] != sent[begin:end])
            if len(wrong):
                raise _mismatch(prepared, planned, found, begin + int(wrong[0]), cache)

        for begin, end in _slices(found):
            yield functools.partial(compare, begin, end)


def _mismatch(
    prepared: Prepared, planned: TargetChunk, found: Stretches, at: int, cache: CacheEntry
) -> VerificationFailed:
    layer, kv, channel, tensor = stretches.named(planned, int(found.begin[at]))
    row, end = int(found.first[at]), int(found.first[at + 1])
    rows = found.rows
    region = cache.regions[int(rows.region[row])]
    return VerificationFailed(
        "what arrived is not what was sent",
        field=f"chunk {prepared.chunk}, layer {layer}, {'KV'[kv] if kv < 2 else kv}, channel {channel}",
        got=f"other bytes in {end - row} segments, the first at byte {int(rows.local[row])} of {region.name}",
        expected=f"the {int(rows.nbytes[row:end].sum())} bytes from arena byte {int(found.begin[at])} of the chunk",
        layer=layer,
        channel=channel,
        tensor=tensor,
        check=CHECK,
    )
