"""The text that makes values of codes that share something: by products where all is ordinary, else by calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hawk.retile.cuda.moves import code, encoded, moved, packed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.layouts.compiled import CodecInfo
    from hawk.retile.cuda.moves import At
    from hawk.retile.cuda.spec import Spec

_ELEMENTS = {"mxfp8_e4m3": "fp8_e4m3fn", "mxfp8_e5m2": "fp8_e5m2", "mxfp4_e2m1": "e2m1"}
_SPECIAL = {"mxfp8_e4m3": "any_nan_e4m3", "mxfp8_e5m2": "any_special_e5m2"}
_LEAST, _MOST = 32, 222
"""Scales under which no element of theirs comes near the ends of binary32."""


def by_call(i: int, spec: Spec) -> str:
    """The function `any_i`: the value of any code whatever."""
    name = spec.src_codec.name
    return f"SLOW u32 any_{i}(u32 code, u32 shared) {{ return shared_{name}(code, shared); }}"


def converted(i: int, spec: Spec, elements: Sequence[At], shared: Sequence[str], shift: str) -> list[str]:
    """Lines that make `out`, and `shared` of grouped targets, of elements of which each shares what `shared` names."""
    src, dst, n = spec.src_codec, spec.dst_codec, len(elements)
    lines, usual, quick = _quick(src, elements, shared, shift)
    slow = [f"any_{i}({code(e, src.bits, shift)}, {x})" for e, x in zip(elements, shared, strict=True)]
    lines.append(f"u32 out[{max(1, -(-n * dst.bits // 32))}];")
    if dst.name == "bf16":
        # Values that are ordinary have few enough bits; so have all of block floats.
        last = _halves(slow) if src.name not in _ELEMENTS else packed([encoded(dst, v) for v in slow], 16)
        return [
            *lines,
            f"if ({usual}) {{",
            *_into("out", _halves(quick)),
            "} else {",
            *_into("out", last),
            "}",
        ]
    lines += [
        f"u32 x[{n}];",
        f"if ({usual}) {{",
        *_into("x", quick),
        "} else {",
        *_into("x", slow),
        "}",
    ]
    if dst.group > 1:
        return [*lines, f"u32 shared = group_{dst.name}(x, out);"]
    return [*lines, *_into("out", packed([encoded(dst, f"x[{k}]") for k in range(n)], dst.bits))]


def _into(name: str, values: Sequence[str]) -> list[str]:
    return [f"{name}[{k}] = {v};" for k, v in enumerate(values)]


def _halves(values: Sequence[str]) -> list[str]:
    """Words of the upper halves of values."""
    if len(values) == 1:
        return [f"({values[0]}) >> 16"]
    return [f"PERMUTE({a}, {b}, 0x7632)" for a, b in zip(values[::2], values[1::2], strict=True)]


def _quick(
    src: CodecInfo, elements: Sequence[At], shared: Sequence[str], shift: str
) -> tuple[list[str], str, list[str]]:
    """Lines before, when the quick way will do, and the values by that."""
    every = list(dict.fromkeys(shared))
    if src.name not in _ELEMENTS:
        # A product of whole numbers and 2^(E - 126 - keep), whose exponent field is E + 1 - keep.
        keep = src.bits - 1
        lines = [f"const float by_{x} = TO_FLOAT(({x} - {keep - 1}u) << 23);" for x in every]
        usual = [f"{x} >= {keep}u" for x in every]
        codes = [code(e, src.bits, shift) for e in elements]
        quick = [f"quick_bfp({c}, {keep}, by_{x})" for c, x in zip(codes, shared, strict=True)]
        return lines, " && ".join(usual), quick
    lines = [f"const float by_{x} = TO_FLOAT({x} << 23);" for x in every]
    usual = [f"{x} - {_LEAST}u < {_MOST - _LEAST}u" for x in every]
    if src.bits == 8:
        words = moved(elements, 8)
        lines.append(f"const u32 w[{len(words)}] = {{{', '.join(words)}}};")
        usual.append(f"!{_SPECIAL[src.name]}(w, {len(words)}u)")
        values = [f"quick_{_ELEMENTS[src.name]}({e.word}, {24 - e.bit}u)" for e in elements]
    else:
        values = [f"quick_{_ELEMENTS[src.name]}({code(e, 4, shift)})" for e in elements]
    quick = [f"TO_BITS(TIMES(TO_FLOAT({v}), by_{x}))" for v, x in zip(values, shared, strict=True)]
    return lines, " && ".join(usual), quick
