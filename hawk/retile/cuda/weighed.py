"""The text of what scales add to a kernel: the largest number under each is found, the scale made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hawk.retile import scaling
from hawk.retile.cuda.moves import At, encoded, loads, moved, packed, value
from hawk.retile.cuda.spec import THREADS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.retile.cuda.box import Box, Vector
    from hawk.retile.cuda.spec import Axis

_KINDS = {"fp32": 0, "bf16": 1, "fp16": 2}
_NOT_FINITE = {
    "fp32": 0x7F800000,
    "bf16": 0x7F80,
    "fp16": 0x7C00,
    "fp8_e4m3fn": 0x7F,
    "fp8_e5m2": 0x7C,
    "int8": 0x100,
}
"""The least magnitude of a code that is no finite number."""

_REACH = {"int8": "127.4f"}
"""Quotients up to which a codec needs no looking for its ends."""


def digits(outer: Sequence[Axis], number: str) -> tuple[list[str], list[str]]:
    """Lines that take a vector's number apart, and the digit of each axis."""
    lines, names, rest = [], [], number
    for i, axis in enumerate(reversed(outer)):
        last = i == len(outer) - 1
        lines.append(f"u32 d{i} = {rest}{'' if last else f' % {axis.ext}u'};")
        names.append(f"d{i}")
        if not last:
            lines.append(f"u32 n{i} = {rest} / {axis.ext}u;")
            rest = f"n{i}"
    return lines, names[::-1]


def total(names: Sequence[str], steps: Sequence[int], by: int = 1) -> str:
    """The sum of digits times steps, each step divided by `by`."""
    terms = [f"{name} * {step // by}u" for name, step in zip(names, steps, strict=True) if step]
    return " + ".join(terms) or "0u"


def phases(i: int, box: Box) -> str:
    """The functions `near_i`, and `look_i` and `decide_i` where scales are made."""
    spec = box.spec
    assert spec.scales is not None
    word, parts = "u64" if spec.wide else "u32", []
    first, channels = spec.src_words + spec.dst_words, spec.src_channels + spec.dst_channels
    if spec.scales.near:
        parts.append(f"""
FN u32 near_{i}(struct place q, u32 piece, u32 more)
{{
    return kept4((u64)LOOK(q.base + {channels}) + 4 * ((u64)LOOK(TABLE({word}, q.words) + {first}u + piece) + more));
}}""")
        first += spec.pieces
    if spec.scales.made is not None:
        parts += [slow_look(i, box), _look(i, box), _decide(i, box, word, first, channels)]
    return "\n".join(parts)


def _function(head: str, lines: Sequence[str]) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"{head}\n{{\n{body}\n}}"


def _look(i: int, box: Box) -> str:
    """Each thread looks through some vectors under one scale, and leaves the largest magnitude."""
    spec = box.spec
    head = f"FN void look_{i}(struct place q, u32 thread, u8 *room)"
    if not box.fast:
        return _function(head, [f"slow_look_{i}(q, thread, room);"])
    found, codec, lanes = box.look, spec.src_codec, box.lanes
    apart, names = digits(found.outer, "v")
    more, elements = loads(box, found, "at")
    words = moved(elements, codec.bits)
    values = ", ".join(value(codec, e) for e in elements)
    near = spec.scales is not None and spec.scales.near
    times = (lambda x: f"product({x}, scale)") if near else (lambda x: x)
    piece, steps = (total(names, [getattr(a, n) for a in found.outer]) for n in ("piece", "near"))
    each = found.count // box.boxes
    lines = [
        f"if (q.partial) {{ slow_look_{i}(q, thread, room); return; }}",
        f"for (u32 box = thread / {lanes}u; box < {box.boxes}u; box += {THREADS // lanes}u) {{",
        "u32 most = 0;",
        f"for (u32 k = thread % {lanes}u; k < {each}u; k += {lanes}u) {{",
        f"const u32 v = box * {each}u + k;",
        *apart,
        f"const u8 *at = room + ({total(names, [a.room for a in found.outer])}) / 8;",
        *more,
        *([f"const u32 scale = near_{i}(q, {piece}, {steps});"] if near else []),
        f"const u32 w[{len(words)}] = {{{', '.join(words)}}};",
        f"const u32 m = largest_{codec.name}(w, {len(words)}u);",
        f"u32 size = {times(value(codec, At('m', 0)))} & 0x7fffffff;",
        f"if (m >= {_NOT_FINITE[codec.name]}u || size >= 0x7f800000) {{",
        f"const u32 x[{len(elements)}] = {{{values}}};",
        "size = 0x80000000;",
        f"for (u32 e = 0; e < {len(elements)}u; e++) {{",
        f"const u32 one = {times('x[e]')} & 0x7fffffff;",
        "size = either(size, one < 0x7f800000 ? one : 0);",
        "}",
        "}",
        "most = either(most, size);",
        "}",
        f"put4(room + {box.largest_at}u + 4 * (box * {lanes}u + thread % {lanes}u), &most);",
        "}",
    ]
    return _function(head, lines)


def slow_look(i: int, box: Box) -> str:
    """The same element by element, for units that are not whole."""
    spec, lanes = box.spec, box.lanes
    order = [*_across(box), *(a for a in (*box.pieces, *box.loops) if a.ext > 1 and not a.box)]
    apart, names = digits(order, "v")
    each = spec.elements // box.boxes

    def summed(name: str, loops: bool = True) -> str:
        return total(names, [getattr(a, name) if not (loops and a.piece) else 0 for a in order])

    found = value(spec.src_codec, At("code", 0))
    if spec.scales is not None and spec.scales.near:
        found = f"product({found}, near_{i}(q, piece, {summed('near')}))"
    src, bits = spec.src_codec, spec.src_codec.bits
    lines = [
        f"const i64 *rows = q.rows + (i64)LOOK(q.flag) * {9 * spec.pieces};",
        f"for (u32 box = thread / {lanes}u; box < {box.boxes}u; box += {THREADS // lanes}u) {{",
        "u32 most = 0;",
        f"for (u32 k = thread % {lanes}u; k < {each}u; k += {lanes}u) {{",
        f"const u32 v = box * {each}u + k;",
        *apart,
        f"const u32 piece = {summed('piece', loops=False)};",
        "const i64 *p = rows + piece * 9u;",
        f"const i64 row = {summed('row')}, col = {summed('col')};",
        "if (row < LOOK(p + 6) || row >= LOOK(p + 7) || col >= LOOK(p + 8)) continue;",
        f"const u64 from = (u64)(LOOK(q.base + LOOK(p)) + LOOK(p + 1)) + {spec.src_header}u;",
        f"const u32 code = code_at(from, (u64)(LOOK(p + 2) + {summed('src')}), {bits}u);",
        f"const u32 one = {found} & 0x7fffffff;",
        "most = either(most, one < 0x7f800000 ? one : 0x80000000);",
        "}",
        f"put4(room + {box.largest_at}u + 4 * (box * {lanes}u + thread % {lanes}u), &most);",
        "}",
    ]
    assert src.group == 1
    return _function(f"SLOW void slow_look_{i}(struct place q, u32 thread, u8 *room)", lines)


def _across(box: Box) -> list[Axis]:
    """The axes that count the scales of a unit, the most significant first."""
    return sorted((a for a in (*box.pieces, *box.loops) if a.ext > 1 and a.box), key=lambda a: -a.box)


def _decide(i: int, box: Box, word: str, first: int, channels: int) -> str:
    """A thread for each scale: of what the others found, for all threads and for the table of scales."""
    spec, order = box.spec, _across(box)
    assert spec.scales is not None
    assert spec.scales.made is not None
    kind, codec = spec.scales.made, spec.dst_codec
    low, high = (int(np.float32(end).view(np.uint32)) for end in scaling.ends(kind))
    most = int(np.float64(scaling.most(codec)).view(np.int64))
    apart, names = digits(order, "box")
    piece = total(names, [a.piece for a in order])
    reach = _REACH.get(codec.name, "1.0e30f")
    lines = [
        f"for (u32 box = thread; box < {box.boxes}u; box += THREADS) {{",
        "u32 found = 0, two[2];",
        f"UNROLL for (u32 k = 0; k < {box.lanes}u; k++) {{",
        "u32 one;",
        f"get4(&one, room + {box.largest_at}u + 4 * (box * {box.lanes}u + k));",
        "found = either(found, one);",
        "}",
        *apart,
        f"two[0] = scale_of(found & 0x7fffffff, 0x{most:x}ull, {_KINDS[kind]}u, 0x{low:x}u, 0x{high:x}u);",
        f"two[1] = quick_by(found, two[0], {reach});",
        f"put8(room + {box.scales_at}u + 8 * box, two);",
        f"const u64 first = (u64)LOOK(TABLE({word}, q.words) + {first}u + ({piece}));",
        f"const u64 number = first + ({total(names, [a.far for a in order])});",
        f"store4((u64)LOOK(q.base + {channels + 1}) + 4 * number, two);",
        "}",
    ]
    return _function(f"FN void decide_{i}(struct place q, u32 thread, u8 *room)", lines)


def converted(i: int, box: Box, found: Vector, elements: list[At], names: list[str]) -> list[str]:
    """Lines that make `out`, and `shared` of grouped targets, of the loaded elements and their scales."""
    spec = box.spec
    assert spec.scales is not None
    src, dst, n = spec.src_codec, spec.dst_codec, len(elements)
    lines = [f"u32 x[{n}] = {{{', '.join(value(src, e) for e in elements)}}};"]
    if spec.scales.near:
        lines += _multiplied(i, box, found, names)
    if dst.group > 1:
        return [*lines, f"u32 out[{n * dst.bits // 32}];", f"u32 shared = group_{dst.name}(x, out);"]
    x = [f"x[{k}]" for k in range(n)]
    words = max(1, n * dst.bits // 32)
    if spec.scales.made is None:
        return [
            *lines,
            f"u32 out[{words}];",
            *_into(_packed(dst.name, dst.bits, x, [encoded(dst, v) for v in x])),
        ]
    offsets = found.offsets("box")
    which = list(dict.fromkeys(offsets))
    at = total(names, [a.box for a in found.outer])
    lines += [f"u32 f{q}[2];\nget8(f{q}, room + {box.scales_at}u + 8 * ({at} + {q}u));" for q in which]
    by = [f"f{o}" for o in offsets]
    quick = [f"quick_quotient({v}, {f}[0], {f}[1])" for v, f in zip(x, by, strict=True)]
    signed = [f"({q} | ({v} & 0x80000000))" for q, v in zip(quick, x, strict=True)]
    codes = [f"whole({q})" for q in quick] if dst.name == "int8" else [encoded(dst, q) for q in signed]
    slow = [encoded(dst, f"quotient({v}, {f}[0])") for v, f in zip(x, by, strict=True)]
    return [
        *lines,
        f"u32 out[{words}];",
        f"if ({' && '.join(f'f{q}[1]' for q in which)}) {{",
        *_into(_bytes(codes) if dst.bits == 8 else packed(codes, dst.bits)),
        "} else {",
        f"for (u32 e = 0; e < {n}u; e++) x[e] = quotient(x[e], {_chosen(by)});" if len(which) == 1 else "",
        *_into(packed([encoded(dst, v) for v in x] if len(which) == 1 else slow, dst.bits)),
        "}",
    ]


def _chosen(by: Sequence[str]) -> str:
    return f"{by[0]}[0]"


def _into(words: Sequence[str]) -> list[str]:
    return [f"out[{j}] = {w};" for j, w in enumerate(words)]


def _bytes(codes: Sequence[str]) -> list[str]:
    """Words of the lowest bytes of these."""
    if len(codes) % 4:
        return packed([f"({c} & 0xff)" for c in codes], 8)
    return [
        f"PERMUTE(PERMUTE({a}, {b}, 0x0040), PERMUTE({c}, {d}, 0x0040), 0x5410)"
        for a, b, c, d in zip(codes[::4], codes[1::4], codes[2::4], codes[3::4], strict=True)
    ]


def _packed(name: str, bits: int, values: Sequence[str], codes: Sequence[str]) -> list[str]:
    if name == "bf16" and len(values) % 2 == 0:
        return [f"two_bf16({a}, {b})" for a, b in zip(values[::2], values[1::2], strict=True)]
    return packed(codes, bits)


def _multiplied(i: int, box: Box, found: Vector, names: list[str]) -> list[str]:
    """Lines that multiply `x` by the source's scales."""
    keys = list(zip(found.offsets("piece"), found.offsets("near"), strict=True))
    which = list(dict.fromkeys(keys))
    piece, near = (total(names, [getattr(a, n) for a in found.outer]) for n in ("piece", "near"))
    lines = [
        f"const u32 s{j} = near_{i}(q, {piece} + {p}u, {near} + {more}u);"
        for j, (p, more) in enumerate(which)
    ]
    by = [f"s{which.index(key)}" for key in keys]
    every = [f"x[{k}] = product(x[{k}], {s});" for k, s in enumerate(by)]
    if len(which) == 1:
        every = [f"UNROLL for (u32 e = 0; e < {len(by)}u; e++) x[e] = product(x[e], s0);"]
    if box.spec.src_codec.name != "int8":
        return [*lines, *every]
    # A whole number times what is finite is no NaN.
    usual = [f"x[{k}] = TO_BITS(TIMES(TO_FLOAT(x[{k}]), TO_FLOAT({s})));" for k, s in enumerate(by)]
    finite = " && ".join(f"is_finite(s{j})" for j in range(len(which)))
    return [*lines, f"if ({finite}) {{", *usual, "} else {", *every, "}"]
