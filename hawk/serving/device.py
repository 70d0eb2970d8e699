"""Devices: what a group of them takes for a prefill and for a step of decoding, what it holds, needs and costs.

Two ways to say so.  A *roofline* from a device's file (`hawk/serving/devices`), for any model and number of devices:

    prefill of n tokens behind c others, seconds
        fixed  +  n * (2 * parameters / F + spread)  +  n * (c + (n + 1) / 2) * 4 * layers * hidden / F
        with F = N * flops * mfu: the products of the weights, what the devices tell each other, and causal attention
    spread, seconds a token: 2 sums of a layer over all devices in a ring, 2 bytes an element
        layers * 2 * (2 * (N - 1) / N) * hidden * 2 / interconnect
    a step of decoding for b requests with c tokens of context in all
        fixed  +  weights / B  +  b * 2 * parameters / (N * flops * mfu_decode)  +  c * kv bytes / B
        with B = N * bandwidth * mbu: all weights once, the products of each request, each request's KV once

on N devices (tensor parallelism).  Or *tables* of measured points (`Device.measured`): prompt length to seconds and
batch to seconds, interpolated.  Sums instead of the maximum of memory and arithmetic are pessimistic by at most the
smaller of the two, and keep a step affine in batch and context, which `hawk.serving.decode` needs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from hawk.errors import InvalidArgument
from hawk.serving.figures import Figure, figures, number, read_shipped, shipped

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hawk.serving.model import ServedModel

UNITS = {
    "flops": "FLOP/s",
    "bandwidth": "bytes/s",
    "memory": "bytes",
    "interconnect": "bytes/s",
    "mfu": "1",
    "mfu_decode": "1",
    "mbu": "1",
    "prefill_fixed": "s",
    "step_fixed": "s",
    "weight_bytes": "bytes",
    "kept_free": "1",
    "power_prefill": "W",
    "power_decode": "W",
    "power_idle": "W",
    "price": "USD",
}
"""Figures of a device's file, one device each.

mfu, mfu_decode    part of `flops` that prefill and decoding reach;  mbu: part of `bandwidth` that decoding reaches
weight_bytes       bytes of one parameter;  kept_free: part of `memory` that holds neither weights nor KV
power_*            of the ASIC (the paper's measure: cores and on-chip memory), not of the board
"""

KINDS = ("gpu", "npu")

Points = tuple[tuple[float, float], ...]


def _points(table: Mapping[float, float] | Mapping[int, float], field: str) -> Points:
    found = sorted((number(x, field, 1), number(y, f"{field}[{x}]")) for x, y in table.items())
    if not found:
        raise InvalidArgument("a table needs a point", field=field, got="none", expected="1 or more")
    if any(b[1] < a[1] for a, b in pairwise(found)):
        # Work is the difference of two lengths: it may not be negative.
        raise InvalidArgument(
            "more of it takes less time", field=field, got=found, expected="seconds that do not fall"
        )
    return tuple(found)


def interpolate(points: Points, x: float) -> float:
    """Piecewise linear through the points; their first and last slope go on outside, never below 0."""
    if len(points) == 1:
        return points[0][1]
    i = min(max(bisect_right(points, (x,)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return max(0.0, y0 + (x - x0) * (y1 - y0) / (x1 - x0))


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of one instance, N devices together, for one model; the coefficients of the module's formulas.

    prefill_points, step_points    measured points in place of the coefficients of length and of batch
    kv_tokens                      tokens whose KV it holds beside the weights
    """

    prefill_fixed: float
    prefill_token: float
    prefill_context: float
    step_fixed: float
    step_sequence: float
    step_context: float
    kv_tokens: int
    prefill_points: Points = ()
    step_points: Points = ()

    @property
    def fixed(self) -> float:
        """Seconds of a prefill step of no tokens."""
        if not self.prefill_points:
            return self.prefill_fixed
        return interpolate(self.prefill_points, 0.0) if len(self.prefill_points) > 1 else 0.0

    def work(self, context: int, tokens: int) -> float:
        """Seconds that `tokens` tokens behind `context` add to a step: additive over the chunks of a prompt."""
        if self.prefill_points:
            if len(self.prefill_points) == 1:  # in proportion to the only length known
                length, seconds = self.prefill_points[0]
                return tokens * seconds / length
            behind = interpolate(self.prefill_points, context)
            return interpolate(self.prefill_points, context + tokens) - behind
        pairs = tokens * (context + (tokens + 1) / 2)
        return tokens * self.prefill_token + pairs * self.prefill_context

    def prefill(self, tokens: int) -> float:
        """Seconds of one whole prompt alone."""
        return self.fixed + self.work(0, tokens)

    def base(self, batch: int) -> float:
        """Seconds of a step of `batch` requests without what their context adds."""
        if self.step_points:
            return interpolate(self.step_points, batch)
        return self.step_fixed + batch * self.step_sequence

    def step(self, batch: int, context: int) -> float:
        """Seconds of a step of `batch` requests with `context` tokens in all."""
        return self.base(batch) + context * self.step_context


@dataclass(frozen=True)
class Device:
    """One kind of device; `load_device` reads one, `measured` makes one of measured points."""

    name: str
    summary: str
    figures: Mapping[str, Figure]
    table: Rates | None = field(default=None)
    kind: str = ""
    """What it is beside a way of moving KV, one of `KINDS`; empty where nobody says."""

    @classmethod
    def measured(
        cls,
        name: str,
        *,
        prefill: Mapping[int, float] | None = None,
        decode: Mapping[int, float] | None = None,
        step_context: float = 0.0,
        kv_tokens: int = 1 << 30,
        power: float = 0.0,
        price: float = 0.0,
        source: str = "measured points",
    ) -> Device:
        """A device of points: prompt tokens to seconds of a prefill alone, and batch to seconds of a step.

        step_context    seconds that each token of context adds to a step
        power, price    watts and dollars of one device, for efficiencies; 0 where they do not matter

        Raises `InvalidArgument` for tables without a point, or where more work takes less time.
        """
        before = _points(prefill, "prefill") if prefill is not None else ((1.0, 0.0),)
        steps = _points(decode, "decode") if decode is not None else ((1.0, 0.0),)
        context = number(step_context, "step_context")
        tokens = int(number(kv_tokens, "kv_tokens", 1))
        table = Rates(0.0, 0.0, 0.0, 0.0, 0.0, context, tokens, before, steps)
        found = {
            key: Figure(number(value, key), UNITS[key], "measured", source)
            for key, value in (
                ("power_prefill", power),
                ("power_decode", power),
                ("power_idle", power),
                ("price", price),
            )
        }
        return cls(name, source, found, table)

    def value(self, name: str) -> float:
        """The value of a figure; raises `InvalidArgument` where this device has none of that name."""
        if name not in self.figures:
            raise InvalidArgument(
                "this device has no such figure", field=name, got=self.name, expected=", ".join(self.figures)
            )
        return self.figures[name].value

    def with_figures(self, changes: Mapping[str, Figure]) -> Device:
        """The same device with some figures replaced, as a calibration does."""
        for name in changes:
            if name not in UNITS:
                raise InvalidArgument(
                    "unknown figure", field=f"{self.name}.{name}"[:200], expected=", ".join(UNITS)
                )
        return replace(self, figures={**self.figures, **changes})

    def rates(self, model: ServedModel, tp: int, kv_bytes: float = 0.0) -> Rates:
        """What `tp` of these take for `model`.

        kv_bytes    bytes of one token's KV in all devices together; 0: two bytes an element

        Raises `InvalidArgument` where the weights leave no room for a token.
        """
        if tp < 1:
            raise InvalidArgument("no devices", field="tp", got=tp, expected="1 or more")
        if self.table is not None:
            return self.table
        v = self.value
        kv = kv_bytes or 2.0 * model.kv_elements
        flops, bandwidth = tp * v("flops"), tp * v("bandwidth") * v("mbu")
        weights = model.parameters * v("weight_bytes")
        room = tp * v("memory") * (1 - v("kept_free")) - weights
        if room < kv:
            raise InvalidArgument(
                "the weights leave no room for KV",
                field="tp",
                got=f"{tp} x {self.name}, {tp * v('memory') / 1e9:.0f} GB",
                expected=f"more than {(weights + kv) / (1 - v('kept_free')) / 1e9:.0f} GB for {model.name}",
            )
        ring = 2 * (tp - 1) / tp * model.hidden * 2 / v("interconnect")
        return Rates(
            prefill_fixed=v("prefill_fixed"),
            prefill_token=2 * model.parameters / (flops * v("mfu")) + 2 * model.layers * ring,
            prefill_context=4 * model.layers * model.hidden / (flops * v("mfu")),
            step_fixed=v("step_fixed") + weights / bandwidth,
            step_sequence=2 * model.parameters / (flops * v("mfu_decode")),
            step_context=kv / bandwidth,
            kv_tokens=int(room / kv),
        )


def sound(found: Mapping[str, Figure], origin: str) -> None:
    """Raises `InvalidArgument` for figures, all or some of `UNITS`, that no device can have."""
    bounds = dict.fromkeys(("mfu", "mfu_decode", "mbu"), (1e-6, 1.0)) | {"kept_free": (0.0, 0.99)}
    bounds |= dict.fromkeys(
        ("flops", "bandwidth", "memory", "interconnect", "weight_bytes"), (1e-9, math.inf)
    )
    for name, one in found.items():
        low, high = bounds.get(name, (0.0, math.inf))
        number(one.value, f"{origin}.{name}", low, high)


def device_names() -> list[str]:
    """Names of the devices that `load_device` knows."""
    return shipped("devices")


def load_device(name_or_path: str | Path) -> Device:
    """The device of that name, or that of a `.toml` file; raises `InvalidArgument` naming file and key."""
    table, origin = read_shipped("devices", "device", name_or_path)
    for key in table:
        if key not in ("name", "summary", "kind", "figures"):
            raise InvalidArgument(
                "unknown key", field=f"{origin}: {key}"[:200], expected="name, summary, kind, figures"
            )
    for key in ("name", "summary"):
        if not isinstance(table.get(key), str) or not table[key]:
            raise InvalidArgument(
                "a text is needed", field=f"{origin}: {key}", got=table.get(key), expected="a text"
            )
    found = figures(table.get("figures"), f"{origin}: figures", UNITS)
    sound(found, f"{origin}: figures")
    kind = table.get("kind", "")
    if kind not in ("", *KINDS):
        raise InvalidArgument(
            "unknown kind", field=f"{origin}: kind", got=str(kind)[:200], expected=" or ".join(KINDS)
        )
    return Device(table["name"], table["summary"], found, kind=kind)
