"""Direct or staged: which of the two costs less, by what transport and memory state about themselves.

    direct    bytes / bandwidth + requests * request_cost
    staged    arena bytes / bandwidth + channels * request_cost
              + bytes * move_cost + moves * move_row_cost + move_call_cost

A request of a reader takes one stretch of the arena and scatters it over up to `max_sge` places; a request of
a writer fills one place and gathers.  So a reader needs one request for every `max_sge` runs that follow each
other in the arena, a writer one for every run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from hawk.errors import InvalidArgument
from hawk.plan.pattern import starts
from hawk.plan.types import Decision

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.plan.types import Placement, PlaneRuns, TargetChunk

    I64 = NDArray[np.int64]
    I32 = NDArray[np.int32]

Override = Literal["auto", "direct", "staged"]
Support = Literal["none", "host", "device"]
Direction = Literal["read", "write"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a chunk costs to move, in numbers.

    nbytes          bytes in runs (payload and padding rows)
    arena_bytes     bytes of the arena: payload, neighbours' places and alignment
    runs            rows of `direct` before any joining across planes
    shortest, median, longest    of the runs, bytes
    channel_bytes   payload per channel
    channels_used   channels that hold anything
    """

    nbytes: int
    arena_bytes: int
    runs: int
    shortest: int
    median: int
    longest: int
    channel_bytes: tuple[int, ...]
    channels_used: int


def statistics(target: TargetChunk) -> Statistics:
    """The chunk in numbers; looks at each kind of plane once."""
    planes = np.bincount(np.asarray(target.kind), minlength=len(target.runs)).astype(np.int64)
    lengths = np.concatenate([r.nbytes for r in target.runs])
    weight = np.repeat(planes, [len(r.nbytes) for r in target.runs])
    order = np.argsort(lengths)
    ends = np.cumsum(weight[order])
    median = lengths[order][np.searchsorted(ends, (int(ends[-1]) + 1) // 2)]
    per_channel = np.zeros(target.layout.channels, np.int64)
    for n, runs in zip(planes, target.runs, strict=True):
        np.add.at(per_channel, runs.channel, runs.nbytes * n)
    return Statistics(
        nbytes=int(per_channel.sum()),
        arena_bytes=target.nbytes,
        runs=int(ends[-1]),
        shortest=int(lengths.min()),
        median=int(median),
        longest=int(lengths.max()),
        channel_bytes=tuple(per_channel.tolist()),
        channels_used=int(np.count_nonzero(per_channel)),
    )


def _plane_requests(runs: PlaneRuns, max_sge: int) -> int:
    new = runs.channel[1:] != runs.channel[:-1]
    new |= runs.arena[1:] != runs.arena[:-1] + runs.nbytes[:-1]
    stretch = np.diff(np.append(starts(new), len(runs.nbytes)))
    return int((-(-stretch // max_sge)).sum())


def direct_requests(target: TargetChunk, max_sge: int, direction: Direction = "read") -> int:
    """Work requests that `direct` needs (at most: planes are not joined)."""
    per_kind = [len(r.nbytes) if direction == "write" else _plane_requests(r, max_sge) for r in target.runs]
    return sum(per_kind[k] for k in target.kind)


def _why_not_staged(
    target: TargetChunk, placement: Placement | None, staging_region: I32 | None, move_support: str
) -> str | None:
    if move_support == "none":
        return "the memory cannot move bytes inside a channel"
    if placement is None:
        return None
    region = placement.region[target.buffers]
    home = region[0] if staging_region is None else staging_region
    apart = (region != home).any(axis=0)
    if apart.any():
        return f"staging and cache of channel {int(np.argmax(apart))} lie in different regions"
    return None


def _known(field: str, got: str, among: object) -> None:
    if got not in get_args(among):
        raise InvalidArgument("no such choice", field=field, got=got, expected=" or ".join(get_args(among)))


def decide(
    target: TargetChunk,
    placement: Placement | None = None,
    *,
    move_support: Support,
    move_cost: float,
    request_cost: float,
    bandwidth: float,
    max_sge: int,
    override: Override = "auto",
    direction: Direction = "read",
    move_row_cost: float = 0.0,
    move_call_cost: float = 0.0,
    staging_region: I32 | None = None,
) -> Decision:
    """Chooses how a chunk is moved, and says why.

    placement         where the target cache lies; without it staging is taken to lie in the same regions
    move_support      `MoveSupport.value` of the target's memory
    move_cost         seconds per byte moved inside a channel, infinite where nobody has measured it; `move_row_cost`
                      seconds per move, `move_call_cost` seconds for the moves of a chunk besides
    request_cost, bandwidth, max_sge    the transport's `Capabilities`
    override          what the config asks for
    direction         "read": the target pulls, a request scatters; "write": the source pushes, a request gathers
    staging_region    region of each channel's staging, `int32[channels]`; the cache's own if not given

    Raises
    ------
    InvalidArgument
        staged is asked for and impossible (the message says why), or a cost cannot be right.
    """
    _known("move_support", move_support, Support)
    _known("override", override, Override)
    _known("direction", direction, Direction)
    for name, value, least in (
        ("bandwidth", bandwidth, 1.0),
        ("max_sge", max_sge, 1),
        ("request_cost", request_cost, 0),
        ("move_cost", move_cost, 0),
        ("move_row_cost", move_row_cost, 0),
        ("move_call_cost", move_call_cost, 0),
    ):
        if not value >= least:
            raise InvalidArgument(
                "a cost that cannot be right", field=name, got=value, expected=f"{least} or more"
            )
    if override == "direct":
        return Decision("direct", "direct: the config asks for it")
    obstacle = _why_not_staged(target, placement, staging_region, move_support)
    if override == "staged":
        if obstacle:
            raise InvalidArgument(
                f"staged is not possible: {obstacle}",
                field="override",
                got="staged",
                expected="auto or direct",
            )
        return Decision("staged", "staged: the config asks for it")
    if obstacle:
        return Decision("direct", f"direct: {obstacle}")
    if move_cost == math.inf:
        return Decision("direct", "direct: what moving inside a channel costs was not measured")
    stats = statistics(target)
    requests = direct_requests(target, max_sge, direction)
    direct_cost = stats.nbytes / bandwidth + requests * request_cost
    moving = stats.nbytes * move_cost + stats.runs * move_row_cost + move_call_cost
    staged_cost = stats.arena_bytes / bandwidth + stats.channels_used * request_cost + moving
    mode: Literal["direct", "staged"] = "staged" if staged_cost < direct_cost else "direct"
    return Decision(
        mode,
        f"{mode}: direct {requests} requests for {stats.runs} runs (median {stats.median} B), "
        f"{direct_cost * 1e3:.3g} ms; staged {stats.channels_used} requests and moves by the {move_support}, "
        f"{staged_cost * 1e3:.3g} ms",
    )
