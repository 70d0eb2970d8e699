"""The text of kernels: one for a few programs, each the phases `take` and `give` of its units.

The text is C that a CUDA compiler reads as well: what differs between a GPU and a CPU is in the header before it.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from math import gcd
from typing import TYPE_CHECKING

from hawk.retile.cuda import shared
from hawk.retile.cuda.box import box_of, odd
from hawk.retile.cuda.moves import At, code, encoded, loads, moved, packed, value
from hawk.retile.cuda.slowly import slow
from hawk.retile.cuda.spec import THREADS, VECTOR
from hawk.retile.cuda.weighed import converted, digits, phases, reach, total

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.retile.cuda.box import Box, Vector
    from hawk.retile.cuda.spec import Spec

BATCH = 8
"""Vectors that a thread has under way at once."""

BLOCKS = 24
"""Blocks that a processor shall hold at once: the compiler makes do with that many registers."""

PART_FIELDS = ("units", "steps", "base", "words", "flags", "rows")
"""What the kernel is told of each program: numbers, then places in the table, in units of `VECTOR` bytes."""


def header(name: str) -> str:
    """A file that lies beside this one."""
    return resources.files("hawk.retile.cuda").joinpath(name).read_text(encoding="utf-8")


@lru_cache(maxsize=64)
def text(specs: tuple[Spec, ...], under: str | None = None) -> str:
    """The kernel `retile` for these programs; `under` is the header it stands on, that of a GPU by default."""
    parts = [
        f"#define THREADS {THREADS}",
        f"#define BLOCKS {min(_blocks(spec) for spec in specs)}",
        header("device.h") if under is None else under,
        header("codecs.h"),
        *([header("scales.h")] if any(spec.scales for spec in specs) else []),
        _types(len(specs)),
        *(_part(i, spec) for i, spec in enumerate(specs)),
        _kernel(specs),
    ]
    return "\n".join(parts)


def shared_bytes(specs: Sequence[Spec]) -> int:
    """Shared memory of a block."""
    return max(16, *(box_of(spec).shared_bytes for spec in specs))


def _types(count: int) -> str:
    fields = " ".join(f"u32 {name};" for name in PART_FIELDS)
    return f"""
struct part {{ {fields} }};
struct args {{ u64 table; struct part part[{count}]; }};
/* One unit: bases of its step, its words, whether it is not whole, and then at `flag` which of `rows` its pieces have.
 * Before the first elements can be asked for, the first word is looked up, and nothing else. */
struct place {{ const i64 *base; u64 words; const i32 *flag; const i64 *rows; u32 partial; }};
"""


def _part(i: int, spec: Spec) -> str:
    box = box_of(spec)
    return "\n".join(
        [
            f"/* {spec.src_codec.name} to {spec.dst_codec.name}: {spec.pieces} pieces of {spec.piece_elements} */",
            _find(i, spec),
            _address(i, spec, "src"),
            _address(i, spec, "dst"),
            *([] if spec.scales is None else [phases(i, box)]),
            *([] if spec.src_codec.group == 1 else [shared.by_call(i, spec)]),
            slow(i, box),
            _take(i, box),
            _give(i, box),
        ]
    )


def _find(i: int, spec: Spec) -> str:
    words = (8 if spec.wide else 4) * spec.words
    word = "u64" if spec.wide else "u32"
    return f"""
FN struct place find_{i}(u64 table, struct part part, u32 local)
{{
    u32 step = local / part.units, unit = local % part.units;
    struct place q;
    q.base = TABLE(i64, table + (u64)part.base * {VECTOR}) + step * {spec.bases}u;
    q.words = table + (u64)part.words * {VECTOR} + (u64)unit * {words}u;
    q.partial = LOOK(TABLE({word}, q.words)) == ({word})-1;
    q.flag = TABLE(i32, table + (u64)part.flags * {VECTOR}) + unit;
    q.rows = TABLE(i64, table + (u64)part.rows * {VECTOR});
    return q;
}}"""


def _address(i: int, spec: Spec, side: str) -> str:
    """A word of the table is a channel in its lowest bits, and above them a multiple of the side's unit."""
    count, unit, first = (
        (spec.src_channels, spec.src_unit, 0)
        if side == "src"
        else (spec.dst_channels, spec.dst_unit, spec.src_channels)
    )
    bits = (count - 1).bit_length()
    word = "u64" if spec.wide else "u32"
    channel = f" + (u32)(w & {(1 << bits) - 1}u)" if bits else ""
    return f"""
FN u64 {side}_{i}(struct place q, u32 number)
{{
    {word} w = LOOK(TABLE({word}, q.words) + number);
    return (u64)LOOK(q.base + {first}u{channel}) + (u64)(w >> {bits}) * {unit}u;
}}"""


def _each(count: int, first: int, batch: int, body: list[str], unroll: str = "UNROLL") -> list[str]:
    """A loop over this thread's vectors from batch number `first` on."""
    guard = (first + batch) * THREADS > count
    lines = [f"{unroll} for (u32 k = 0; k < {batch}; k++) {{", f"u32 v = thread + (k + {first}u) * THREADS;"]
    if guard:
        lines.append(f"if (v < {count}u) {{")
    lines += body
    return [*lines, "}" * (1 + guard)]


def _take(i: int, box: Box) -> str:
    head = f"FN void take_{i}(struct place q, u32 thread, u8 *room)\n{{\n"
    spec, found = box.spec, box.take
    if found is None or not box.fast:
        return f"{head}    (void)q, (void)thread, (void)room;\n}}"
    bits = spec.src_codec.bits
    width = found.elements * bits // 8
    words = -(-width // 4)
    lines = []
    if not spec.src_own:
        lines.append(f"const u64 from = src_{i}(q, 0);")
    if spec.src_codec.group > 1:
        lines += _take_exponents(i, box)
    lines += _batches(i, box, found, width, words)
    body = "\n".join(f"    {line}" for line in lines)
    return f"{head}    if (q.partial) return;\n{body}\n}}"


def _batches(i: int, box: Box, found: Vector, width: int, words: int) -> list[str]:
    spec, bits = box.spec, box.spec.src_codec.bits
    apart, names = digits(found.outer, "v")
    own = spec.src_own
    piece = total(names, [a.piece for a in found.outer])
    base = f"src_{i}(q, {_per(spec.src_codec.group, piece)})" if own else "from"
    steps = [0 if own and a.piece else a.src * bits // 8 for a in found.outer]
    read = [*apart, f"load{width}(t + k * {words}, {base} + ({reach(found.outer, names, steps)}));"]
    write = [
        *apart,
        f"put{width}(room + ({total(names, [a.room for a in found.outer], 8)}), t + k * {words});",
    ]
    lines, every = [], -(-found.count // THREADS)
    # Looked up while the first elements are on their way; needed only behind the barrier.
    into = [
        f"for (u32 k = thread; k < {spec.dst_words}u; k += THREADS)",
        f"    PUT_ADDRESS(room + {box.addresses_at}u + 8 * k, dst_{i}(q, {spec.src_words}u + k));",
    ]
    for first in range(0, every, BATCH):
        batch = min(BATCH, every - first)
        lines += [
            "{",
            f"u32 t[{batch * words}];",
            *_each(found.count, first, batch, read),
            *([] if first else into),
            *_each(found.count, first, batch, write),
            "}",
        ]
    return lines


def _per(group: int, piece: str) -> str:
    """Number of the word of a piece's elements, where groups have words of their own behind each."""
    return f"2 * ({piece})" if group > 1 else piece


def _take_exponents(i: int, box: Box) -> list[str]:
    spec, found = box.spec, box.exponents
    assert found is not None
    group = spec.src_codec.group
    width = found.elements // group
    apart, names = digits(found.outer, "v")
    piece = total(names, [a.piece for a in found.outer])
    steps = [0 if a.piece else a.src // group for a in found.outer]
    return [
        f"for (u32 v = thread; v < {found.count}u; v += THREADS) {{",
        *apart,
        f"u32 t[{-(-width // 4)}];",
        f"load{width}(t, src_{i}(q, 2 * ({piece}) + 1) + ({reach(found.outer, names, steps)}));",
        f"put{width}(room + {box.exponents_at}u + ({total(names, [a.dense for a in found.outer], group)}), t);",
        "}",
    ]


def _give(i: int, box: Box) -> str:
    head = f"FN void give_{i}(struct place q, u32 thread, u8 *room)\n{{\n"
    if not box.fast:
        return f"{head}    slow_{i}(q, thread, room);\n}}"
    spec, found = box.spec, box.give
    assert found is not None
    apart, names = digits(found.outer, "v")
    own, codec = spec.dst_own, spec.dst_codec
    lines = [*apart]
    if odd(found):
        lines.append(f"const u32 odd = ({total(names, [a.room for a in found.outer])}) & 4;")
    lines.append(f"const u8 *at = room + ({total(names, [a.room for a in found.outer])}) / 8;")
    more, elements = loads(box, found, "at")
    lines += more
    lines += (
        _converted(i, box, found, elements, names)
        if spec.scales is None
        else converted(i, box, found, elements, names)
    )
    piece = total(names, [a.piece if own else 0 for a in found.outer])
    address = f"GET_ADDRESS(room + {box.addresses_at}u + 8 * ({{}}))"
    steps = [0 if own and a.piece else a.dst * codec.bits // 8 for a in found.outer]
    lines.append(
        f"const u64 to = {address.format(_per(codec.group, piece))} + ({reach(found.outer, names, steps)});"
    )
    nbytes, step = found.elements * codec.bits // 8, box.store_bytes
    for first in range(0, nbytes, step):
        if step >= 4 or nbytes == step:
            lines.append(f"store{step}(to + {first}, out + {first // 4});")
        else:
            part = f"u32 b{first} = out[{first // 4}] >> {first % 4 * 8};"
            lines.append(f"{part} store{step}(to + {first}, &b{first});")
    if codec.group > 1:
        groups = [0 if a.piece else a.dst // codec.group for a in found.outer]
        lines.append(
            f"store1({address.format(f'2 * ({piece}) + 1')} + ({reach(found.outer, names, groups)}), &shared);"
        )
    every = -(-found.count // THREADS)
    heavy = not _same(spec) and (codec.group > 1 or codec.bits == 8)
    body = _each(found.count, 0, every, lines, "SOME" if heavy else "UNROLL")
    return (
        head
        + f"    if (q.partial) {{\n        slow_{i}(q, thread, room);\n        return;\n    }}\n"
        + "\n".join(f"    {line}" for line in body)
        + "\n}"
    )


def _is_paired(spec: Spec) -> bool:
    """Whether bf16 becomes block floats, two elements to a word."""
    return spec.src_codec.name == "bf16" and spec.dst_codec.name in ("bfp8_b", "bfp4_b")


def _blocks(spec: Spec) -> int:
    """Blocks that a processor shall hold at once; whole groups formed of values take all the registers there are."""
    if spec.dst_codec.group > 1 and not _same(spec) and not _is_paired(spec):
        return 1
    return BLOCKS if spec.scales is None else 16


def _same(spec: Spec) -> bool:
    return spec.src_codec == spec.dst_codec and spec.scales is None


def _converted(i: int, box: Box, found: Vector, elements: list[At], names: list[str]) -> list[str]:
    """Lines that make `out`, and `shared` of grouped targets, of the loaded elements."""
    spec = box.spec
    src, dst = spec.src_codec, spec.dst_codec
    if _same(spec) and src.group == 1:
        return _out(moved(elements, src.bits))
    shift = "odd" if odd(found) else ""
    lines, exponent = _exponents(box, found, names) if src.group > 1 else ([], [])
    if _same(spec) and _keeps(found, src.group):
        lines += [f"u32 shared = {exponent[0]};"]
        if src.bits == 8:
            return [*lines, *_out(moved(elements, 8))]
        return [*lines, *_out(packed([code(e, 4) for e in elements], 4))]
    if _is_paired(spec):
        pairs = ", ".join(moved(elements, 16))
        return [
            f"u32 w[8] = {{{pairs}}};",
            f"u32 out[{dst.bits // 2}];",
            f"u32 shared = pairs_{dst.name}(w, out);",
        ]
    if src.group > 1:
        return [*lines, *shared.converted(i, spec, elements, exponent, shift)]
    values = [value(src, e, shift) for e in elements]
    if dst.group == 1:
        return _out(packed([encoded(dst, v) for v in values], dst.bits))
    return [
        f"u32 x[{dst.group}];",
        *(f"x[{k}] = {v};" for k, v in enumerate(values)),
        f"u32 out[{dst.group * dst.bits // 32}];",
        f"u32 shared = group_{dst.name}(x, out);",
    ]


def _keeps(found: Vector, group: int) -> bool:
    """Whether the target's groups are the source's."""
    first = found.offsets("src")
    return first == tuple(range(group)) and all(a.src % group == 0 for a in found.outer)


def _exponents(box: Box, found: Vector, names: list[str]) -> tuple[list[str], list[str]]:
    """Lines that look up what the elements of a vector share in the source, and the name of it for each."""
    group = box.spec.src_codec.group
    step = gcd(group, *(a.dense for a in found.outer))
    which = [o // step for o in found.offsets("dense")]
    lines = [f"const u32 dense = {total(names, [a.dense for a in found.outer])};"]
    lines += [
        f"const u32 e{q} = room[{box.exponents_at}u + (dense + {q * step}u) / {group}u];"
        for q in dict.fromkeys(which)
    ]
    return lines, [f"e{q}" for q in which]


def _out(words: list[str]) -> list[str]:
    return [f"u32 out[{len(words)}];", *(f"out[{j}] = {w};" for j, w in enumerate(words))]


def _kernel(specs: Sequence[Spec]) -> str:
    count, made = len(specs), [i for i, spec in enumerate(specs) if spec.scales and spec.scales.made]

    def phase(name: str) -> str:
        lines = ["{", "u32 local = block;"]
        for i in range(count):
            blocks = f"a.part[{i}].units * a.part[{i}].steps"
            call = f"{name}_{i}(find_{i}(a.table, a.part[{i}], local), thread, room);"
            if name in ("look", "decide") and i not in made:
                call = ";"
            if i == count - 1:
                lines.append(call)
            else:
                lines += [f"if (local < {blocks}) {{ {call} }} else {{ local -= {blocks};"]
        return "\n".join(lines) + "}" * count

    text = "\nBARRIER\n".join(phase(n) for n in ("take", *(("look", "decide") if made else ()), "give"))
    return f"\nKERNEL(retile, const struct args a)\nPHASES(room)\n{text}\nEND\n"
