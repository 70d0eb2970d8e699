"""What a layout does, drawn for people: `hawk layout show NAME`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import LayoutError
from hawk.layouts.compiled import AXES, CacheShape
from hawk.layouts.digits import show
from hawk.layouts.grammar import show as show_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hawk.layouts.compiled import Axis, CompiledLayout, CompiledPiece
    from hawk.layouts.declared import Part, Piece, Scale
    from hawk.layouts.layout import Layout

EXAMPLE = CacheShape(layers=2, heads=2, dim=64, block_size=64, blocks=4)
EXAMPLES = (
    EXAMPLE,
    replace(EXAMPLE, dim=128),
    replace(EXAMPLE, dim=256),
    replace(EXAMPLE, heads=1, dim=576, kvs=1),  # latent attention
)
"""The first that a layout can hold is drawn."""
MAX_LINES = 8


def describe(
    layout: Layout,
    shape: CacheShape | None = None,
    *,
    codec: str | None = None,
    params: Mapping[str, int] | None = None,
) -> str:
    """The declaration and, for `shape` (or a small example), its digits and where elements of a block land.

    `codec` and `params` are as for `Layout.compile`.
    Raises `LayoutError` if the layout cannot hold `shape`, or none of the examples.
    """
    lines = [layout.name + (f": {layout.summary}" if layout.summary else "")]
    others = [c for c in layout.codecs if c != layout.codec]
    facts = [
        ("source", layout.source),
        ("codec", layout.codec + (f" (or {', '.join(others)})" if others else "")),
        ("buffers", f"one for each {' and '.join(layout.buffers)}" if layout.buffers else "one"),
        ("memory", _placement(layout)),
        ("scale", _scale(layout.scale)),
        ("params", ", ".join(f"{name} = {default}" for name, default in layout.params)),
    ]
    for piece in layout.pieces:
        where = "" if piece.kv is None else f" ({_kv_name(piece.kv)})"
        facts += _of_piece(piece, where)
    for part in layout.parts:
        facts.append((part.name, _part(part)))
        facts += _of_piece(part.piece, f" ({part.name})")
        facts.append((f"scale ({part.name})", _scale(part.scale)))
    width = max(len(key) for key, value in facts if value)
    lines += [f"  {key:<{width}}  {value}" for key, value in facts if value]
    compiled = (
        _example(layout, codec, params)
        if shape is None
        else layout.compile(shape, codec=codec, params=params)
    )
    return "\n".join([*lines, "", *_compiled(compiled, "for example" if shape is None else "here")])


def _example(layout: Layout, codec: str | None, params: Mapping[str, int] | None) -> CompiledLayout:
    """The layout bound to the first example that fits; raises what is wrong with the first where none does."""
    first: LayoutError | None = None
    for shape in EXAMPLES:
        try:
            return layout.compile(shape, codec=codec, params=params)
        except LayoutError as error:
            first = first or error
    assert first is not None
    raise first


def _placement(layout: Layout) -> str:
    aligned = f", pages aligned to {layout.align} bytes" if layout.align > 1 else ""
    if layout.placement == "linear":
        return f"linear{aligned}"
    c = layout.channels
    if layout.sharding is not None:
        rows, columns = (show_number(e) for e in (layout.sharding.rows, layout.sharding.columns))
        banks = f"banks {', '.join(map(str, layout.banks))}" if layout.banks else f"{c} channels"
        order = "columns" if layout.sharding.down else "rows"
        return (
            f"sharded: {rows} x {columns} pages each, numbered along the {order}, dealt to {banks}{aligned}"
        )
    return f"interleaved: page i is number i // {c} of channel i % {c}{aligned}"


def _of_piece(piece: Piece, where: str) -> list[tuple[str, str]]:
    return [
        *((f"split{where}", text) for text in piece.split_texts),
        *((f"rename{where}", text) for text in piece.rename_texts),
        (f"order{where}", piece.text),
    ]


def _part(part: Part) -> str:
    dims = "the dims that are left" if part.size is None else f"{show_number(part.size)} dims"
    codec = "" if part.codec is None else f", {part.codec}"
    return f"{dims}{codec}, {'behind the part before it in its pages' if part.inside else 'in buffers of its own'}"


def _scale(scale: Scale | None) -> str:
    if scale is None:
        return ""
    if scale.order is None:
        return f"constant {scale.value:g}" if scale.place == "constant" else "in the header of each page"
    where = "in buffers of their own" if scale.place == "buffer" else "behind the elements of each page"
    return f"{scale.codec} {where}: {scale.text or 'one for each'}" + (
        f", dims by {scale.group}" if "dim" in scale.text else ""
    )


def _kv_name(kv: int) -> str:
    return "KV"[kv] if kv < 2 else f"kv={kv}"


def _compiled(compiled: CompiledLayout, word: str) -> list[str]:
    extents: dict[Axis, int] = {axis: compiled.shape.extent(axis) for axis in AXES}
    box = ", ".join(f"{axis} {extent}" for axis, extent in extents.items())
    tensors = [t for t in compiled.tensors if not t.of_scales]
    lines = [f"{word}: {box}, {', '.join(dict.fromkeys(t.codec.name for t in tensors))}"]
    for tensor in tensors:
        lines += _tensor(tensor, tensor.name if len(tensors) > 1 else "")
        if tensor.scale is not None:
            lines += _tensor(tensor.scale, "")
    return lines


def _tensor(compiled: CompiledLayout, name: str) -> list[str]:
    extents: dict[Axis, int] = {axis: compiled.shape.extent(axis) for axis in AXES}
    what = "scales" if compiled.of_scales else "elements"
    size = f"{compiled.pieces[0].elements} {what} ({compiled.codec.name}) in {compiled.page_bytes} bytes"
    each = f"{compiled.channel_bytes} bytes" + (" in each channel" if compiled.channels > 1 else "")
    many = f"{compiled.buffer_count} buffer{'s' if compiled.buffer_count > 1 else ''}"
    many += " of scales" if compiled.of_scales else ""
    lines = [f"  {name}: dims {compiled.first}..{compiled.first + compiled.shape.dim - 1}"] if name else []
    lines += [
        f"  scales lie behind the elements of each page, from byte {compiled.inset} on"
        if compiled.of_scales and compiled.inset
        else f"  {many} of {compiled.pages} pages, {each}",
        f"  a page is {size}; the next{' in its channel' if compiled.channels > 1 else ''} begins "
        f"{compiled.page_stride} bytes on"
        + (
            f", each {compiled.inset} bytes into one of the part before"
            if compiled.inset and not compiled.of_scales
            else ""
        ),
    ]
    for piece in compiled.pieces:
        names = " and ".join(_kv_name(kv) for kv in piece.kvs)
        page, inside = show(piece.page, extents) or "0", show(piece.inside, extents) or "0"
        lines.append(f"  {names}: page {page} | element {inside}")
        if piece.stored:
            lines.append(f"    digits of dim are those of where it is stored: {_runs(piece)}")
        if piece.padded:
            lines.append("    positions beyond the extents are padding and hold 0")
        if compiled.of_scales:
            continue
        apart = "kv" in compiled.buffers or len(piece.kvs) == 1
        for kv in piece.kvs[: 1 if apart else None]:
            lines += _drawing(compiled, piece, kv)
    return lines


def _drawing(compiled: CompiledLayout, piece: CompiledPiece, kv: int) -> list[str]:
    """A table of `page:element` over the slots and dims at which some digit begins, for block 0 of head 0."""
    names = " or ".join(map(_kv_name, piece.kvs)) if "kv" in compiled.buffers else _kv_name(kv)
    dims, slots = _steps(compiled, piece, "dim"), _steps(compiled, piece, "slot")
    base = compiled.fixed_term(kv, 0)
    head = [f"{'slot / dim':>12}"] + [f"{dim:>10}" for dim in dims]
    lines = [
        f"    page:element in layer 0, {names}, head 0, block 0 (3:128 is element 128 of page 3)",
        "".join(head),
    ]
    for slot in slots:
        cells = []
        for dim in dims:
            page, inside = base, compiled.first_position(kv)
            here: tuple[tuple[Axis, int], ...] = (("slot", slot), ("dim", dim))
            for axis, index in here:
                at = np.asarray([index], dtype=np.int64)
                page += int(piece.page_term(axis, at)[0])
                inside += int(piece.inside_term(axis, at)[0])
            cells.append(f"{f'{page}:{inside}':>10}")
        lines.append(f"{slot:>12}" + "".join(cells))
    return lines


def _runs(piece: CompiledPiece) -> str:
    """The runs of a rename as text, the first few of them."""
    found = []
    for r in piece.stored[:4]:
        end = r.first + r.count - 1
        step = f" by {r.step}" if r.step != 1 else ""
        found.append(f"{r.first}..{end} from {r.to} on{step}")
    return ", ".join(found) + (", ..." if len(piece.stored) > 4 else "")


def _steps(compiled: CompiledLayout, piece: CompiledPiece, axis: Axis) -> list[int]:
    """Index 0, the first step of each digit of `axis`, and the last index."""
    last = compiled.shape.extent(axis) - 1
    digits = (*piece.page, *piece.inside)
    first = {r.first for r in piece.stored} if axis == "dim" and piece.stored else set()
    steps = sorted({0, *first, *(d.div for d in digits if d.axis == axis and d.div <= last)})
    return [*steps[: MAX_LINES - 1], *([last] if last > steps[-1] or len(steps) >= MAX_LINES else [])]
