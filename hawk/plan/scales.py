"""What becomes of scales on the way: whether they move with their elements, are spread, or are made anew.

A scale is a number that elements of eight bits are multiplied by.  It is never forgotten: where the target has scales
of its own a plan holds them, and where the source has some its values are read under them.

- *moved*: both sides have scales of the same under the same codec; elements and scales move as they are.
- *spread*: one scale of the source covers all that one of the target's does (one of a token becomes those of its
  groups, a constant those of all tokens), the codec is the same, and the target's type holds it: elements stay as
  they are.
- *made*: values are read under the source's scales, the target's scales are computed of them, and the values are
  written under these.  A new scale is `largest / Q` of its group, `largest` the largest finite magnitude there and Q
  the largest number of the codec (127, 448, 57344); see `hawk.retile.scaling` for its rounding.
- *ranged*: scales of a whole cache cover tokens that a transfer does not hold, so they are made of the source's own:
  the largest of `scale * Q` of the source that it covers, by the target's Q.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hawk.errors import InvalidArgument, Unmappable
from hawk.retile.scaling import stored

if TYPE_CHECKING:
    from hawk.layouts.compiled import CompiledLayout
    from hawk.plan.types import Selection
    from hawk.retile.rows import Rule

_WIDER = {("bf16", "fp32"), ("fp16", "fp32")}
"""Types of scales of which the second holds every number of the first."""

_ROUNDED = {("fp32", "bf16"), ("fp16", "bf16")}
"""Types of which the second rounds a number of the first by 2^-9 of it at most: less than new elements would."""


def rule(sources: tuple[CompiledLayout, ...], dst: CompiledLayout) -> Rule:
    """What becomes of the scales of `dst`, a tensor of elements that is filled from `sources`.

    Raises `Unmappable` naming what would forget a scale, or need tokens that no transfer holds.
    """
    if dst.scale is None:
        for src in sources:
            if src.scale is not None and dst.codec.name == "int8" and dst.codec.factor == 1.0:
                raise _forgotten(src, dst)
        return "none"
    for src in sources:
        if src.codec.name == "int8" and src.codec.factor == 1.0 and src.scale is None:
            raise _forgotten(src, dst)
    src = sources[0]
    same = (src.first, src.shape.dim) == (dst.first, dst.shape.dim)
    if len(sources) == 1 and same and src.codec.name == dst.codec.name:
        if src.scale is not None and _alike(src, dst):
            return "moved"
        if _covers(src, dst):
            return "spread"
    if dst.scale.per != "cache":
        return "made"
    for src in sources:
        known = src.scale is None and src.codec.bits == 8 and src.codec.group == 1
        if not known and (src.scale is None or src.scale.per != "cache"):
            raise Unmappable(
                "scales of a whole cache cannot be made of some of its tokens",
                field="scale.order",
                got=f"{said(dst)} in the target {dst.name}, {said(src)} in the source {src.name}",
                expected="scales of tokens or blocks in the target, the place 'constant', or such scales in the source",
            )
    return "ranged"


def check_selected(cache: CompiledLayout, selection: Selection) -> None:
    """Raises unless all that a scale of the target `cache` covers is in the selection.

    `Unmappable` where some cover heads that do not move, `InvalidArgument` where some cover tokens before it.
    """
    for dst in cache.tensors:
        scale, heads = dst.scale, selection.target_heads(cache)[1]
        if scale is None or scale.per == "cache":
            continue
        if heads < cache.shape.heads and scale.shape.heads == 1:
            raise Unmappable(
                "a scale covers heads that do not move with it",
                field="scale.order",
                got=f"{said(dst)} in the target {cache.name}, for {heads} of {cache.shape.heads} heads",
                expected="head in the order, or all heads of the target from one worker",
            )
        if scale.per == "block" and selection.token % cache.shape.block_size:
            raise InvalidArgument(
                "a scale of the target covers tokens before the selection",
                field="selection.token",
                got=selection.token,
                expected=f"a multiple of {cache.shape.block_size}, for {cache.name} has {said(dst)}",
            )


def _alike(src: CompiledLayout, dst: CompiledLayout) -> bool:
    """Whether one scale is of as many elements on both sides: of a head or of all, of a group or of a whole row."""
    a, b = src.scale, dst.scale
    assert a is not None
    assert b is not None
    heads = (a.shape.heads, b.shape.heads) == (1, 1) or not (_of_all(src, a) or _of_all(dst, b))
    sizes = a.per != "block" or src.shape.block_size == dst.shape.block_size
    return heads and sizes and a.per == b.per and a.shape.dim == b.shape.dim and _keeps(a, b)


def _keeps(a: CompiledLayout, b: CompiledLayout) -> bool:
    """Whether scales of the one tensor may be written into the other, elements staying as they are."""
    return a.codec == b.codec or (a.codec.name, b.codec.name) in _WIDER | _ROUNDED


def rounds(src: CompiledLayout, dst: CompiledLayout) -> bool:
    """Whether moved scales are rounded."""
    a, b = src.scale, dst.scale
    return a is not None and b is not None and (a.codec.name, b.codec.name) in _ROUNDED


def _of_all(layout: CompiledLayout, scale: CompiledLayout) -> bool:
    return scale.shape.heads == 1 < layout.shape.heads


def _covers(src: CompiledLayout, dst: CompiledLayout) -> bool:
    """Whether every scale of the target is one of the source's, or its constant, and the target's type holds it."""
    a, b = src.scale, dst.scale
    assert b is not None
    if a is None:
        return stored(b.codec, src.codec.factor) == src.codec.factor
    if not _keeps(a, b):
        return False
    if _of_all(dst, b) and not _of_all(src, a):
        return False
    if b.shape.dim % a.shape.dim:
        return False
    if b.per == "cache":
        return a.per == "cache"
    if b.per == "block":
        size, ours = src.shape.block_size, dst.shape.block_size
        return a.per == "cache" or (a.per == "block" and size % ours == 0)
    return True


def _forgotten(src: CompiledLayout, dst: CompiledLayout) -> Unmappable:
    return Unmappable(
        "the scales of the caches differ",
        field="scale",
        got=f"{said(dst)} in the target {dst.name}",
        expected=f"{said(src)} as in the source {src.name}; for int8 a side without a table of scales "
        "says the place 'constant'",
    )


def said(layout: CompiledLayout) -> str:
    """The scales of a tensor in words: how many of what."""
    scale = layout.scale
    if scale is None:
        return "none" if layout.codec.factor == 1.0 else f"the constant {layout.codec.factor:g}"
    of = {"token": "a token", "block": "a block", "cache": "the cache"}[scale.per]
    heads = "" if _of_all(layout, scale) or layout.shape.heads == 1 else " and head"
    return f"{scale.shape.dim} {scale.codec.name} for {of}{heads}"
