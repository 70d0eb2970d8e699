"""What moving a request's KV takes, in the paper's configurations.

    gg-host        between devices of one kind by way of both hosts' memory, one step after another
    gn-host        into another kind likewise, the layout adjusted when all has come
    gg-direct      between devices of one kind straight
    gn-hawk        into another kind straight, retiled on the source, into its channels
    single-buffer  into another kind straight, into one contiguous buffer of one channel, adjusted afterwards

How many bytes, segments and work requests a request takes is what HAWK's own planner says of the two layouts, for all
workers of both sides (`hawk.plan.whole`).  Seconds, with n bytes over a link of L bytes a second, and k = n / `staging`
rounded up (1 for a transfer alone):

    by way of the host   k * (fixed + host_fixed) + n / copy + n / (L * efficiency) + n / copy
                         (+ k * adjust_fixed + n / adjust)
    straight             fixed (+ retile_fixed) + (sum of stages) / c + (c - 1) / c * (slowest stage)
                         stages: n / (L * efficiency), requests of a worker * request_cost, and for HAWK n / retile
                         in c = n / chunk chunks, one behind another (+ adjust_fixed + n / adjust with one buffer)
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, get_args

from hawk.errors import InvalidArgument
from hawk.layouts.library import load
from hawk.plan.shards import Grid
from hawk.plan.whole import explain_model
from hawk.serving.calibration import Calibration, load_calibration
from hawk.serving.figures import number

if TYPE_CHECKING:
    from hawk.serving.model import ServedModel

Configuration = Literal["gg-host", "gn-host", "gg-direct", "gn-hawk", "single-buffer"]
CONFIGURATIONS: tuple[Configuration, ...] = get_args(Configuration)
LINK = 25e9
"""Bytes a second of the paper's link, 200 Gb/s."""

_PAIRS = {
    "gg-host": "same",
    "gg-direct": "same",
    "gn-host": "other",
    "gn-hawk": "other",
    "single-buffer": "one-buffer",
}


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a transfer: a layout by name or path, its codec, tokens of a block, channels (None: the layout's)."""

    layout: str
    codec: str | None = None
    block: int = 16
    channels: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("block", self.block), ("channels", self.channels)):
            if value is not None and value < 1:
                raise InvalidArgument("no such number", field=name, got=value, expected="1 or more")


@dataclass(frozen=True, slots=True)
class Moved:
    """What the planner says of one request, all workers together.

    nbytes, segments, requests    bytes moved, runs, and work requests of a direct transfer
    workers                       transfers that go on side by side
    """

    nbytes: int
    segments: int
    requests: int
    workers: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one transfer.

    alone                       from asking until it is in the target's cache, nothing else going on
    link                        on the link
    hold_source, hold_target    how long it keeps the node's link (and staging) from others
    stall_source, stall_target  how long the engines of both sides stand still for it
    """

    moved: Moved
    alone: float
    link: float
    hold_source: float
    hold_target: float
    stall_source: float
    stall_target: float


@cache
def _shipped_pairs() -> dict[str, tuple[Side, Side]]:
    text = resources.files("hawk.layouts").joinpath("scenarios/serving.toml").read_text(encoding="utf-8")
    tables: dict[str, Any] = tomllib.loads(text)
    return {name: (Side(**table["source"]), Side(**table["target"])) for name, table in tables.items()}


@dataclass(frozen=True)
class Transfer:
    """Costs of one configuration.

    link             bytes a second between nodes
    overlap          "none": begins when prefill has ended; "layers": each layer goes when it is computed
    source, target   None: as `layouts/scenarios/serving.toml` has them for the configuration
    """

    configuration: Configuration = "gn-hawk"
    calibration: Calibration = field(default_factory=lambda: load_calibration("paper"))
    link: float = LINK
    overlap: Literal["none", "layers"] = "none"
    source: Side | None = None
    target: Side | None = None

    def __post_init__(self) -> None:
        if self.configuration not in CONFIGURATIONS:
            raise InvalidArgument(
                "unknown configuration",
                field="configuration",
                got=self.configuration,
                expected=" or ".join(CONFIGURATIONS),
            )
        if self.overlap not in ("none", "layers"):
            raise InvalidArgument(
                "unknown overlap", field="overlap", got=self.overlap, expected="none or layers"
            )
        if self.overlap == "layers" and self.by_host:
            raise InvalidArgument(
                "staging through the host begins after prefill",
                field="overlap",
                got="layers",
                expected=f"none with {self.configuration}",
            )
        number(self.link, "link", 1.0)

    @property
    def by_host(self) -> bool:
        """Whether KV is staged in memory of both hosts."""
        return self.configuration.endswith("-host")

    @property
    def sides(self) -> tuple[Side, Side]:
        """Source and target."""
        source, target = _shipped_pairs()[_PAIRS[self.configuration]]
        return self.source or source, self.target or target

    def with_link(self, link: float) -> Transfer:
        """The same over another link."""
        return replace(self, link=link)

    def moved(self, model: ServedModel, tokens: int, source_tp: int, target_tp: int) -> Moved:
        """What the planner says of a request of so many tokens, to the end of the target's last block."""
        source, target = self.sides
        blocks = -(-tokens // target.block)
        return _planned(model, source, target, source_tp, target_tp, blocks * target.block)

    def kv_bytes(self, model: ServedModel, source_tp: int, target_tp: int) -> tuple[float, float]:
        """Bytes of one token's KV on either side, all devices together, copies of heads included."""
        source, target = self.sides
        here = _planned(model, source, source, source_tp, source_tp, source.block).nbytes / source.block
        there = _planned(model, source, target, source_tp, target_tp, target.block).nbytes / target.block
        return here, there

    def cost(self, model: ServedModel, tokens: int, source_tp: int, target_tp: int) -> Cost:
        """Seconds of a request of so many tokens while serving."""
        moved = self.moved(model, tokens, source_tp, target_tp)
        return self._cost(moved, math.ceil(moved.nbytes / self.calibration.value("staging")))

    def seconds(self, nbytes: float, requests: int = 0) -> float:
        """Seconds of a transfer of so many bytes alone, as in the paper's figure 9; `requests` of one worker."""
        return self._cost(Moved(int(number(nbytes, "nbytes")), 0, requests, 1), 1).alone

    def _cost(self, moved: Moved, pieces: int) -> Cost:
        v, n = self.calibration.value, float(moved.nbytes)
        link = n / (self.link * v("link_efficiency"))
        adjusted = self.configuration in ("gn-host", "single-buffer")
        adjust = n / v("adjust_rate") if adjusted else 0.0
        if self.by_host:
            copy, asked = n / v("copy_rate"), pieces * (v("fixed") + v("host_fixed"))
            after = adjust + pieces * v("adjust_fixed") * adjusted
            held = asked + 2 * copy + link
            stalls = v("stalls")
            return Cost(moved, held + after, link, held, held, stalls * held, stalls * (copy + after))
        post = moved.requests / moved.workers * v("request_cost")
        retile = n / v("retile_rate") if self.configuration == "gn-hawk" else 0.0
        stages, chunks = (link, post, retile), max(1.0, n / v("chunk"))
        alone = v("fixed") + sum(stages) / chunks + (1 - 1 / chunks) * max(stages)
        alone += v("retile_fixed") if self.configuration == "gn-hawk" else 0.0
        alone += adjust + v("adjust_fixed") if adjusted else 0.0
        held = max(stages)
        return Cost(moved, alone, link, held, held, 0.0, 0.0)


@lru_cache(maxsize=8192)
def _planned(
    model: ServedModel, source: Side, target: Side, source_tp: int, target_tp: int, tokens: int
) -> Moved:
    found = explain_model(
        model.extents,
        load(source.layout),
        load(target.layout),
        source=Grid(source_tp),
        target=Grid(target_tp),
        tokens=tokens,
        block_sizes=(source.block, target.block),
        src_options={"codec": source.codec, "channels": source.channels},
        dst_options={"codec": target.codec, "channels": target.channels},
    )
    requests = sum(p.count * p.explanation.requests for p in found.parts)
    return Moved(found.nbytes, found.segments, requests, sum(p.count for p in found.parts))
