"""What cannot be built as asked: ways between devices that they do not join, uneven shares, parts of tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import InvalidArgument
from hawk.layouts.compiled import CacheShape
from hawk.layouts.library import load

if TYPE_CHECKING:
    from hawk.serving.device import Device
    from hawk.serving.model import ServedModel
    from hawk.serving.scenario import Scenario
    from hawk.serving.transfer import Configuration, Side

_PROBE = 4096
"""Tokens of a block of which any layout's tiles are a part."""

_KINDS = {"gg": ("gpu", "gpu"), "gn": ("gpu", "npu"), "single-buffer": ("gpu", "npu")}
_A = {"gpu": "a GPU", "npu": "an NPU"}


def joins(way: Configuration, prefill: Device, decode: Device) -> bool:
    """Whether that way is one between such devices; a device that does not say its kind may be of any."""
    kinds = _KINDS[way if way == "single-buffer" else way[:2]]
    return all(device.kind in ("", kind) for device, kind in zip((prefill, decode), kinds, strict=True))


def check_joins(way: Configuration, prefill: Device, decode: Device) -> None:
    """Raises `InvalidArgument` where `joins` says no."""
    if not joins(way, prefill, decode):
        source, target = _KINDS[way if way == "single-buffer" else way[:2]]
        raise InvalidArgument(
            f"{way} goes from {_A[source]} to {_A[target]}",
            field="way",
            got=f"{prefill.name}, {_said(prefill)}, and {decode.name}, {_said(decode)}",
            expected=f"{_A[source]} that prefills and {_A[target]} that decodes",
        )


def _said(device: Device) -> str:
    return _A.get(device.kind, "of a kind that its file does not say")


def check_share(model: ServedModel, tp: int) -> None:
    """Raises `InvalidArgument` where `tp` workers cannot share the model's KV heads out evenly."""
    heads = model.extents.heads
    if heads % tp and tp % heads:
        even = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise InvalidArgument(
            "KV heads are not shared out evenly",
            field="tp",
            got=f"{tp} for {heads} KV heads of {model.name}",
            expected=f"{', '.join(even)}, or a multiple of {heads}",
        )


def check_blocks(model: ServedModel, side: Side, tp: int, which: str) -> None:
    """Raises `InvalidArgument` where the side's blocks do not hold whole tiles of its layout."""
    heads = max(1, model.extents.heads // tp)
    shape = CacheShape(layers=1, heads=heads, dim=model.extents.dim, block_size=_PROBE, blocks=4)
    made = load(side.layout).compile(shape, codec=side.codec, channels=side.channels)
    tile = max(
        (d.div for piece in made.pieces for d in (*piece.page, *piece.inside) if d.axis == "slot"),
        default=1,
    )
    if side.block % tile:
        raise InvalidArgument(
            "a block holds whole tiles",
            field="block-size",
            got=f"{side.block} tokens on the {which} side",
            expected=f"a multiple of {tile}, the tokens of a tile of {side.layout}",
        )


def most_kept(scenario: Scenario) -> tuple[float, float]:
    """Parts of the requests whose promises on TTFT and on TPOT an idle cluster could keep: no number of instances
    keeps more.

    Each request as if it were alone: its prefill, its transfer where none of that overlaps, steps of one request with
    no more context than the prompt.
    """
    model, (before, after) = scenario.served, scenario.rates()
    drawn = scenario.workload.draw(scenario.rate, scenario.requests, scenario.seed)
    transfer, slo = scenario.transfer, scenario.slo
    lengths, where = np.unique(drawn.input, return_inverse=True)
    first = np.empty(len(lengths))
    for i, n in enumerate(map(int, lengths)):
        first[i] = scenario.overhead + before.prefill(n)
        if transfer is not None and transfer.overlap == "none" and scenario.first_token != "prefill":
            first[i] += transfer.cost(model, n, scenario.prefill.tp, scenario.decode.tp).alone
    step = np.array([after.step(1, int(n)) for n in lengths])
    begin = int(len(drawn.input) * scenario.warm_up)
    kept = (first <= slo.ttft)[where][begin:]
    quick = ((step <= slo.tpot)[where] | (drawn.output < 2))[begin:]
    return float(kept.mean()), float(quick.mean())
