"""Element by element: units that are not whole, and programs that no vector fits.

What the numpy core does to a piece, in the same terms: rows before `lo` stay as they are, what lies from `hi` or `cols`
on becomes zero.  Bytes are read and written singly, so that any address will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hawk.retile.cuda.moves import At, encoded, value
from hawk.retile.cuda.weighed import total

if TYPE_CHECKING:
    from hawk.layouts.compiled import CodecInfo
    from hawk.retile.cuda.box import Box
    from hawk.retile.cuda.spec import Spec


def slow(i: int, box: Box) -> str:
    """The function `slow_i` for the units of a program."""
    spec = box.spec
    n, group = spec.piece_elements, spec.dst_codec.group
    src, dst = spec.src_codec, spec.dst_codec
    same = src == dst and spec.scales is None
    lines = [
        f"const i64 *rows = q.rows + (i64)LOOK(q.flag) * {9 * spec.pieces};",
        f"for (u32 v = thread; v < {spec.elements // group}u; v += THREADS) {{",
        "(void)room;",
        f"const u32 piece = v / {n // group}u;",
        "const i64 *p = rows + piece * 9u;",
        f"const u32 first = v % {n // group}u * {group}u;",
        "const u64 from = (u64)(LOOK(q.base + LOOK(p)) + LOOK(p + 1));",
        f"const u64 to = (u64)(LOOK(q.base + {spec.src_channels} + LOOK(p + 3)) + LOOK(p + 4));",
        "const i64 start = LOOK(p + 2), lo = LOOK(p + 6), hi = LOOK(p + 7), cols = LOOK(p + 8);",
        f"u32 x[{group}], whole = 1;",
        "i64 into = 0, taken = 0;",
        f"for (u32 k = 0; k < {group}u; k++) {{",
        *_offsets(spec),
        *_scales(i, box),
        "if (row < lo) { whole = 2; break; }",
        "const u32 valid = row < hi && col < cols;",
        "if (k == 0) into = LOOK(p + 5) + d, taken = start + s;",
        "whole = whole && valid && start + s == taken + k;",
        f"x[k] = valid ? {_scaled(i, spec, _read(spec, same or spec.scales is not None))} : 0;",
        "}",
        "if (whole == 2) continue;",
        *(_write_group(spec, same) if group > 1 else _write_one(dst, same or _is_made(spec))),
        "}",
    ]
    body = "\n".join(f"    {line}" for line in lines)
    return f"SLOW void slow_{i}(struct place q, u32 thread, u8 *room)\n{{\n{body}\n}}"


def _offsets(spec: Spec) -> list[str]:
    """Lines for the offsets of element `first + k` of a piece on both sides, its row and its col."""
    lines, rest = ["u32 e0 = first + k;", *([] if spec.loops else ["(void)e0;"])], "e0"
    sums: dict[str, list[str]] = {"src": [], "dst": [], "row": [], "col": []}
    for j, loop in enumerate(reversed(spec.loops)):
        last = j == len(spec.loops) - 1
        digit = rest if last else f"{rest} % {loop.ext}u"
        lines.append(f"const i64 g{j} = {digit};")
        if not last:
            lines.append(f"const u32 e{j + 1} = {rest} / {loop.ext}u;")
            rest = f"e{j + 1}"
        for name, terms in sums.items():
            if getattr(loop, name):
                terms.append(f"g{j} * {getattr(loop, name)}")
    names = {"src": "s", "dst": "d", "row": "row", "col": "col"}
    lines += [f"const i64 {names[name]} = {' + '.join(terms) or '0'};" for name, terms in sums.items()]
    return lines


def _scales(i: int, box: Box) -> list[str]:
    """Lines that look up the scales of that element, of which `_offsets` has said the digits."""
    scales, lines = box.spec.scales, []
    if scales is None:
        return []

    def summed(name: str) -> str:
        return total(
            [f"(u32)g{j}" for j in range(len(box.loops))], [getattr(a, name) for a in box.loops[::-1]]
        )

    if scales.near:
        lines.append(f"const u32 near = row < hi && col < cols ? near_{i}(q, piece, {summed('near')}) : 0;")
    if scales.made is not None:
        first = total([f"(piece / {a.piece}u % {a.ext}u)" for a in box.pieces], [a.box for a in box.pieces])
        lines += [
            "u32 far;",
            f"get4(&far, room + {box.scales_at}u + 8 * ({first} + {summed('box')}));",
        ]
    return lines


def _scaled(i: int, spec: Spec, found: str) -> str:
    """What is made of an element's bits under the scales of both sides: its code where the target's are made."""
    scales = spec.scales
    if scales is None:
        return found
    near = "near" if scales.near else "0"
    return f"code_{i}({found}, {near}, far)" if scales.made is not None else f"value_{i}({found}, {near})"


def _is_made(spec: Spec) -> bool:
    return spec.scales is not None and spec.scales.made is not None


def _read(spec: Spec, same: bool) -> str:
    src = spec.src_codec
    where = f"from + {spec.src_header}u, (u64)(start + s)"
    found = f"code_at({where}, {src.bits}u)"
    if src.group > 1:
        shared = f"byte_at(from + (u64)(start + s) / {src.group}u)"
        return f"shared_{src.name}({found}, {shared})"
    return found if same else value(src, At(found, 0))


def _write_one(dst: CodecInfo, same: bool) -> list[str]:
    result = "x[0]" if same else encoded(dst, "x[0]")
    width = dst.bits // 8
    return [
        f"const u32 out = {result};",
        f"for (u32 k = 0; k < {width}u; k++) {{ u32 b = out >> 8 * k; store1(to + (u64)into * {width}u + k, &b); }}",
    ]


def _write_group(spec: Spec, same: bool) -> list[str]:
    src, dst = spec.src_codec, spec.dst_codec
    per = dst.group * dst.bits // 8
    at = f"to + {spec.dst_header}u + (u64)into / {dst.group}u * {per}u"
    lines = [f"u32 out[{per // 4}];", f"u32 shared = group_{dst.name}(x, out);"]
    if same:
        # Whole groups that both sides form alike keep their bytes: another packer may have rounded otherwise.
        lines += [
            f"if (whole && taken % {src.group} == 0) {{",
            f"shared = byte_at(from + (u64)taken / {src.group}u);",
            f"const u64 codes = from + {spec.src_header}u + (u64)taken * {src.bits}u / 8u;",
            f"for (u32 k = 0; k < {per // 4}u; k++) out[k] = code_at(codes, k, 32u);",
            "}",
        ]
    return [
        *lines,
        f"for (u32 k = 0; k < {per}u; k++) {{ u32 b = out[k / 4] >> k % 4 * 8; store1({at} + k, &b); }}",
        f"store1(to + (u64)into / {dst.group}u, &shared);",
    ]
