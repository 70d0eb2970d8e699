"""What a plan does to values: why some may change, or that none does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hawk.plan.scales import rounds, said
from hawk.plan.ways import program_part, ways
from hawk.retile.build import build_programs

if TYPE_CHECKING:
    from hawk.layouts.compiled import CodecInfo, CompiledLayout
    from hawk.plan.types import Selection
    from hawk.plan.ways import Part, Way

_EXACT = (
    {("bf16", "fp32"), ("fp16", "fp32")}
    | {(block, wide) for block in ("bfp8_b", "bfp4_b") for wide in ("fp32", "bf16")}
    | {(small, wide) for small in ("fp8_e4m3fn", "fp8_e5m2", "int8") for wide in ("fp32", "bf16", "fp16")}
    | {(block, "fp32") for block in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4_e2m1")}
)
"""Conversions that keep every value: the target has all of the source's exponents and mantissas."""


def loss(src: CompiledLayout, dst: CompiledLayout, selection: Selection | None = None) -> str | None:
    """Why values may change on the way from `src` into `dst`, or None where every value survives.

    Raises as `ways` does.
    """
    part = None if selection is None else program_part(src, dst, selection)
    found = (_of_way(src, dst, part, way) for way in ways(src, dst, part))
    return next((f"lossy: {said}" for said in found if said is not None), None)


def scales_told(src: CompiledLayout, dst: CompiledLayout, selection: Selection | None = None) -> str:
    """What becomes of scales in words; "" where neither side has a tensor of them."""
    if all(t.scale is None for t in (*src.tensors, *dst.tensors)):
        return ""
    part = None if selection is None else program_part(src, dst, selection)
    found = []
    for way in ways(src, dst, part):
        a, targets = src.tensors[way.sources[0]], [dst.tensors[i] for i in way.targets]
        for b, rule in zip(targets, way.rules or ("moved",) * len(targets), strict=True):
            if (a.scale is not None or b.scale is not None) and not b.of_scales:
                word = "values are read under them" if rule == "none" else _WORDS[rule]
                found.append(f"{said(a)} -> {said(b)}: {word}")
    return "; ".join(dict.fromkeys(found))


_WORDS = {
    "moved": "moved with their elements",
    "spread": "spread, and elements stay as they are",
    "made": "made anew, largest / Q of the values that each covers",
    "ranged": "made anew of the source's, for the same range",
}


def _of_way(src: CompiledLayout, dst: CompiledLayout, part: Part | None, way: Way) -> str | None:
    ours = [src.tensors[i] for i in way.sources]
    for number, b in enumerate(dst.tensors[i] for i in way.targets):
        rule = way.rules[number] if way.rules else "moved"
        if rule in ("made", "ranged"):
            return f"scales are made anew, from {said(ours[0])} to {said(b)}"
        if rule == "spread":
            return _rounded(ours[0], b)
        for a in ours:
            if a.scale is not None and rule == "none":
                return f"{a.codec.name} under {said(a)} to {b.codec.name} may round"
            if rule == "moved" and (why := _rounded(a, b)) is not None:
                return why
            apart = a.first >= b.first + b.shape.dim or b.first >= a.first + a.shape.dim
            if not apart and not b.of_scales and (why := _of_codecs(a.codec, b.codec)) is not None:
                return why
            if not apart and a.codec == b.codec and a.codec.group > 1 and _anew(a, b, part, way):
                return f"the elements are grouped anew ({a.codec.name}, by {a.codec.group})"
    return None


def _rounded(a: CompiledLayout, b: CompiledLayout) -> str | None:
    if a.scale is None or b.scale is None or not rounds(a, b):
        return None
    return f"scales of {a.scale.codec.name} are kept as {b.scale.codec.name}"


def _anew(a: CompiledLayout, b: CompiledLayout, part: Part | None, way: Way) -> bool:
    """Whether groups that share an exponent are of other elements than before."""
    if way.rows:
        return True
    for kv in way.kvs:
        for program in build_programs(a, b, kv, part):
            inner = program.loops[-1] if program.loops else None
            # Encoding a decoded group gives the same values, but only if it is the same elements.
            if inner is None or (inner.src, inner.dst) != (1, 1) or inner.ext % a.codec.group:
                return True
    return False


def _of_codecs(a: CodecInfo, b: CodecInfo) -> str | None:
    if a == b:
        return None
    if b.group > 1:
        return f"{b.name} holds {b.bits} bits an element, {b.group} sharing an exponent"
    if a.factor != 1.0 or b.factor != 1.0:
        return f"{a.name} under a scale of {a.factor:g} to {b.name} under {b.factor:g} may round"
    if (a.name, b.name) in _EXACT:
        return None
    if b.name == "int8":
        return (
            "int8 without scales: elements are rounded to integers and saturate at 127; is [scale] missing?"
        )
    return f"{a.name} to {b.name} may round"
