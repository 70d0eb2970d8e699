"""Scales beside the elements: a second tensor of the same blocks, planned with the first and never without it.

The planes of the scales follow those of the elements in a chunk.  They are moved as any others are; that values keep
their meaning is `check`'s business: elements under scales of their own move as they are, or not at all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import Unmappable
from hawk.plan.types import Placement, TargetChunk

if TYPE_CHECKING:
    from hawk.layouts.compiled import CompiledLayout
    from hawk.plan.types import Selection


def check_scales(src: CompiledLayout, dst: CompiledLayout) -> None:
    """Raises `Unmappable` unless both sides have scales, of the same grain and under the same codec, or neither."""
    if src.scale is None and dst.scale is None:
        return
    if src.scale is None or dst.scale is None or not _alike(src, dst):
        raise Unmappable(
            "the scales of the caches differ",
            field="scale",
            got=f"{_said(dst)} in the target {dst.name}",
            expected=f"{_said(src)} as in the source {src.name}",
        )
    if src.codec != dst.codec:
        raise Unmappable(
            "elements under scales in a tensor of their own move as they are",
            field="codec",
            got=f"{dst.codec.name} in the target {dst.name}",
            expected=f"{src.codec.name} as in the source {src.name}",
        )


def _alike(src: CompiledLayout, dst: CompiledLayout) -> bool:
    """Whether one scale is of as many elements on both sides: of a head or of all, of a group or of a whole row."""
    a, b = (x.scale.shape for x in (src, dst) if x.scale is not None)
    heads = (a.heads, b.heads) in ((1, 1), (src.shape.heads, dst.shape.heads))
    return heads and a.dim == b.dim


def _said(layout: CompiledLayout) -> str:
    if layout.scale is None:
        return "none"
    heads, groups = layout.scale.shape.heads, layout.scale.shape.dim
    return f"{groups} a token and head" if heads == layout.shape.heads else f"{groups} a token"


def scale_selection(layout: CompiledLayout, selection: Selection) -> Selection:
    """What of the scales goes with a selection: one scale for all heads goes with any of them."""
    if layout.scale is not None and layout.scale.shape.heads == layout.shape.heads:
        return selection
    return replace(selection, head=0, heads=0, source_head=0)


def join(main: TargetChunk, scales: TargetChunk) -> TargetChunk:
    """One chunk of both: the scales' planes behind the others, in every channel."""
    layout = main.layout
    kind = (*main.kind, *(k + len(main.runs) for k in scales.kind))
    runs = (*main.runs, *scales.runs)
    plane_bytes = np.stack([r.channel_bytes for r in runs])[np.asarray(kind)]
    ends = np.cumsum(plane_bytes.T.ravel())
    base = (ends - plane_bytes.T.ravel()).reshape(layout.channels, -1).T
    inset = layout.page_bytes if layout.scale_inside else 0
    return replace(
        main,
        planes=(*main.planes, *scales.planes),
        kind=kind,
        runs=runs,
        base=np.ascontiguousarray(base),
        shift=np.concatenate((main.shift, scales.shift + inset)),
        nbytes=int(ends[-1]),
        scales=len(scales.planes),
    )


def parts(target: TargetChunk) -> list[TargetChunk]:
    """A chunk's elements, and its scales where it has some, each as a chunk of its own tensor in the same arena."""
    if not target.scales:
        return [target]
    n = len(target.planes) - target.scales
    scale = target.layout.scale
    assert scale is not None
    found = []
    for layout, selection, rows in (
        (target.layout, target.selection, slice(0, n)),
        (scale, scale_selection(target.layout, target.selection), slice(n, None)),
    ):
        found.append(
            replace(
                target,
                layout=layout,
                selection=selection,
                planes=target.planes[rows],
                kind=target.kind[rows],
                base=target.base[rows],
                shift=target.shift[rows],
                scales=0,
            )
        )
    return found


def placements(layout: CompiledLayout, placement: Placement) -> list[Placement]:
    """Where the elements lie, and the scales where there are some."""
    if layout.scale is None:
        return [placement]
    if layout.scale_inside:
        return [placement, Placement(placement.region, placement.offset + layout.page_bytes)]
    n = layout.buffer_count
    return [
        Placement(placement.region[rows], placement.offset[rows]) for rows in (slice(0, n), slice(n, None))
    ]
