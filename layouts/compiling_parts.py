"""Compiles a layout whose heads are kept in parts: each part a layout of its own, and together one cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hawk.errors import LayoutError
from hawk.layouts.bounds import BYTES, MAX_ALIGN, bounded, moved_error
from hawk.layouts.compiling import Compiler
from hawk.layouts.grammar import evaluate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hawk.layouts.compiled import CacheShape, CompiledLayout
    from hawk.layouts.declared import Part
    from hawk.layouts.layout import Layout


def compile_parts(
    layout: Layout,
    shape: CacheShape,
    codec: str | None,
    channels: int | None,
    align: int | None,
    params: Mapping[str, int],
) -> CompiledLayout:
    """The compiled form of a layout in parts; arguments and errors as of `Layout.compile`."""
    whole = Compiler(layout)
    whole.extents(shape)
    chosen = whole.codec(codec).name
    values = whole.values(params, shape)
    align = bounded(layout.align if align is None else align, MAX_ALIGN, f"{layout.name}: align", BYTES)
    found: list[CompiledLayout] = []
    first = 0
    for i, part in enumerate(layout.parts):
        key = f"{layout.name}: part[{i}].size"
        size = shape.dim - first if part.size is None else evaluate(part.size, values, key)
        if size < 1 or first + size > shape.dim:
            raise LayoutError(
                "the parts do not fit the head", field=key, got=size, expected=f"1..{shape.dim - first}"
            )
        own = _alone(layout, part, chosen, values)
        # Parameters that are extents are those of the whole head.
        try:
            tensor = Compiler(own).compile(replace(shape, dim=size), None, channels, align, {})
        except LayoutError as error:
            error = moved_error(error, f"{own.name}: piece[0].", f"{layout.name}: part[{i}].")
            raise moved_error(error, f"{own.name}: ", f"{layout.name}: part[{i}].") from None
        found.append(replace(tensor, first=first))
        first += size
    if first != shape.dim:
        raise LayoutError(
            "the parts do not fill the head", field=f"{layout.name}: part", got=first, expected=shape.dim
        )
    parts = _in_pages(layout, found, align)
    return replace(parts[0], name=layout.name, shape=shape, first=0, scale=None, parts=parts)


def _alone(layout: Layout, part: Part, codec: str, values: Mapping[str, int]) -> Layout:
    """The layout of one part."""
    kept = part.codec or codec
    return replace(
        layout,
        name=f"{layout.name} {part.name}",
        codec=kept,
        codecs=(kept,),
        params=tuple(values.items()),
        pieces=(part.piece,),
        scale=part.scale,
        parts=(),
    )


def _in_pages(layout: Layout, found: Sequence[CompiledLayout], align: int) -> tuple[CompiledLayout, ...]:
    """The parts, those that share pages set in behind each other and at one stride."""
    groups: list[list[CompiledLayout]] = []
    for i, (part, tensor) in enumerate(zip(layout.parts, found, strict=True)):
        if not part.inside:
            groups.append([tensor])
            continue
        host = groups[-1][0]
        if tensor.pages != host.pages or tensor.buffers != host.buffers:
            raise LayoutError(
                "the part lies in other pages than the one before it",
                field=f"{layout.name}: part[{i}].order",
                got=f"{tensor.pages} pages",
                expected=f"{host.pages} pages",
            )
        groups[-1].append(tensor)
    parts = []
    for group in groups:
        at, set_in = 0, []
        for tensor in group:
            scale = tensor.scale
            inset = at
            at += tensor.page_bytes
            if scale is not None and scale.inset:
                scale = replace(scale, inset=at)
                at += scale.page_bytes
            set_in.append(replace(tensor, inset=inset, scale=scale))
        stride = -(-at // align) * align
        for tensor in set_in:
            scale = tensor.scale
            if scale is not None and scale.inset:
                scale = replace(scale, page_stride=stride)
            parts.append(replace(tensor, page_stride=stride, scale=scale))
    return tuple(parts)
