"""The text of what scales add to a kernel: the largest number under each is found, the scale made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hawk.retile import scaling
from hawk.retile.cuda.moves import At, code, encoded, factor_bits, loads, moved, packed, value
from hawk.retile.cuda.spec import THREADS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.layouts.compiled import CodecInfo
    from hawk.retile.cuda.box import Box, Vector
    from hawk.retile.cuda.spec import Axis, Spec

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

_SPECIAL = {"fp8_e4m3fn": "any_nan_e4m3", "fp8_e5m2": "any_special_e5m2"}
"""What tells whether words hold codes that are no finite numbers, where values of the others are quickly made."""

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


def reach(axes: Sequence[Axis], names: Sequence[str], steps: Sequence[int]) -> str:
    """`total` of steps in memory, in 64 bits where a unit reaches so far: from head to head of a large cache."""
    if sum((axis.ext - 1) * step for axis, step in zip(axes, steps, strict=True)) < 1 << 32:
        return total(names, steps)
    return " + ".join(f"(u64){name} * {step}u" for name, step in zip(names, steps, strict=True) if step)


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
    parts.append(_one(i, spec))
    if spec.scales.made is not None:
        parts += [slow_look(i, box), _look(i, box), _decide(i, box, word, first, channels)]
    return "\n".join(parts)


def _one(i: int, spec: Spec) -> str:
    """The functions `value_i`, of an element under the source's scale, and `code_i` of that under the target's.

    They do for whatever comes, and are called where something out of the ordinary does.
    """
    assert spec.scales is not None
    found = value(spec.src_codec, At("code", 0))
    lines = [f"return product({found}, scale);" if spec.scales.near else f"(void)scale; return {found};"]
    parts = [_function(f"SLOW u32 value_{i}(u32 code, u32 scale)", lines)]
    if spec.scales.made is not None:
        result = encoded(spec.dst_codec, f"quotient(value_{i}(code, near), far)")
        parts.append(_function(f"SLOW u32 code_{i}(u32 code, u32 near, u32 far)", [f"return {result};"]))
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
    # A single element of 16 bits is half a word, and what stands in the other half counts as well.
    words = (
        [code(elements[0], 16)]
        if len(elements) * codec.bits == 16 == codec.bits
        else moved(elements, codec.bits)
    )
    near = spec.scales is not None and spec.scales.near
    largest = value(codec, At("m", 0))
    if near:
        largest = f"TO_BITS(TIMES(TO_FLOAT({largest}), TO_FLOAT(scale)))"
    piece, steps = (total(names, [getattr(a, n) for a in found.outer]) for n in ("piece", "near"))
    each = found.count // box.boxes
    load = [
        f"const u32 v = box * {each}u + k;",
        "(void)v;",
        *apart,
        f"const u8 *at = room + ({total(names, [a.room for a in found.outer])}) / 8;",
        *more,
        *([f"const u32 scale = near_{i}(q, {piece}, {steps});"] if near else []),
    ]
    again = [
        "(void)q;",
        "u32 size = 0;",
        f"for (u32 k = lane; k < {each}u; k += {lanes}u) {{",
        *load,
        *(
            f"size = counted(size, value_{i}({code(e, codec.bits)}, {'scale' if near else '0'}));"
            for e in elements
        ),
        "}",
        "return size;",
    ]
    lines = [
        f"if (q.partial) {{ slow_look_{i}(q, thread, room); return; }}",
        f"for (u32 box = thread / {lanes}u; box < {box.boxes}u; box += {THREADS // lanes}u) {{",
        f"u32 most = 0, unusual = 0, lane = thread % {lanes}u;",
        f"FEW for (u32 k = lane; k < {each}u; k += {lanes}u) {{",
        *load,
        f"const u32 w[{len(words)}] = {{{', '.join(words)}}};",
        f"const u32 m = largest_{codec.name}(w, {len(words)}u);",
        f"const u32 size = {largest} & 0x7fffffff;",
        f"unusual |= m >= {_NOT_FINITE[codec.name]}u || size >= 0x7f800000;",
        "most = size > most ? size : most;",
        "}",
        f"if (unusual) most = again_{i}(q, box, lane, room);",
        f"put4(room + {box.largest_at}u + 4 * (box * {lanes}u + lane), &most);",
        "}",
    ]
    return "\n".join(
        [
            _function(f"SLOW u32 again_{i}(struct place q, u32 box, u32 lane, const u8 *room)", again),
            _function(head, lines),
        ]
    )


def slow_look(i: int, box: Box) -> str:
    """The same element by element, for units that are not whole."""
    spec, lanes = box.spec, box.lanes
    order = [*_across(box), *(a for a in (*box.pieces, *box.loops) if a.ext > 1 and not a.box)]
    apart, names = digits(order, "v")
    each = spec.elements // box.boxes

    def summed(name: str, loops: bool = True) -> str:
        return total(names, [getattr(a, name) if not (loops and a.piece) else 0 for a in order])

    near = f"near_{i}(q, piece, {summed('near')})" if spec.scales is not None and spec.scales.near else "0"
    src, bits = spec.src_codec, spec.src_codec.bits
    src_at = reach(order, names, [0 if a.piece else a.src for a in order])
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
        f"const u32 code = code_at(from, (u64)LOOK(p + 2) + ({src_at}), {bits}u);",
        f"most = counted(most, value_{i}(code, {near}));",
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
        f"two[0] = scale_of(found & 0x7fffffff, {scaling.most(codec):.1f}f, {_KINDS[kind]}u, 0x{low:x}u, 0x{high:x}u);",
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
    near, far, usual, lines = ["0"] * n, ["0"] * n, [], []
    if spec.scales.near:
        more, near = _near(i, found, names)
        lines += more
    if spec.scales.made is not None:
        offsets = found.offsets("box")
        at = total(names, [a.box for a in found.outer])
        for q in dict.fromkeys(offsets):
            lines += [f"u32 f{q}[2];", f"get8(f{q}, room + {box.scales_at}u + 8 * ({at} + {q}u));"]
            usual.append(f"f{q}[1]")
        far = [f"f{o}" for o in offsets]
    else:
        usual += [f"is_finite({s})" for s in dict.fromkeys(near)]
        if src.name in _SPECIAL:
            words = moved(elements, 8)
            lines.append(f"const u32 w[{len(words)}] = {{{', '.join(words)}}};")
            usual.append(f"!{_SPECIAL[src.name]}(w, {len(words)}u)")
    quick = [_quick(src, e, s) for e, s in zip(elements, near, strict=True)]
    raw = [code(e, src.bits) for e in elements]
    lines.append(f"u32 out[{max(1, n * dst.bits // 32)}];")
    if spec.scales.made is None:
        return [
            *lines,
            f"u32 x[{n}];",
            f"if ({' && '.join(usual)}) {{",
            *(f"x[{k}] = {v};" for k, v in enumerate(quick)),
            "} else {",
            *(f"x[{k}] = value_{i}({c}, {s});" for k, (c, s) in enumerate(zip(raw, near, strict=True))),
            "}",
            *_encoded(dst, [f"x[{k}]" for k in range(n)]),
        ]
    codes = [
        f"whole(quick_quotient({v}, {f}[0], {f}[1]))"
        if dst.name == "int8"
        else encoded(dst, f"signed_quotient({v}, {f}[0], {f}[1])")
        for v, f in zip(quick, far, strict=True)
    ]
    slow = [f"code_{i}({c}, {s}, {f}[0])" for c, s, f in zip(raw, near, far, strict=True)]
    return [
        *lines,
        f"if ({' && '.join(usual)}) {{",
        *_into(_bytes(codes)),
        "} else {",
        *_into(packed(slow, dst.bits)),
        "}",
    ]


def _quick(codec: CodecInfo, at: At, scale: str) -> str:
    """The value of an element that is a finite number, under a scale that is one."""
    if codec.name in _SPECIAL:
        found = f"quick_{codec.name}({at.word}, {24 - at.bit}u)"
        if codec.factor != 1.0:
            found = f"TO_BITS(TIMES(TO_FLOAT({found}), TO_FLOAT({factor_bits(codec)})))"
    else:
        found = value(codec, at)
    return found if scale == "0" else f"TO_BITS(TIMES(TO_FLOAT({found}), TO_FLOAT({scale})))"


def _encoded(dst: CodecInfo, x: Sequence[str]) -> list[str]:
    """Lines that make `out` of values."""
    if dst.group > 1:
        return [f"u32 shared = group_{dst.name}(x, out);"]
    if dst.name == "bf16" and len(x) % 2 == 0:
        return _into([f"two_bf16({a}, {b})" for a, b in zip(x[::2], x[1::2], strict=True)])
    return _into(packed([encoded(dst, v) for v in x], dst.bits))


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


def _near(i: int, found: Vector, names: list[str]) -> tuple[list[str], list[str]]:
    """Lines that look up the source's scales, and the name of that of each element."""
    keys = list(zip(found.offsets("piece"), found.offsets("near"), strict=True))
    which = list(dict.fromkeys(keys))
    piece, near = (total(names, [getattr(a, n) for a in found.outer]) for n in ("piece", "near"))
    lines = [
        f"const u32 s{j} = near_{i}(q, {piece} + {p}u, {near} + {more}u);"
        for j, (p, more) in enumerate(which)
    ]
    return lines, [f"s{which.index(key)}" for key in keys]
