"""One vector's way through registers, as text: out of shared memory, converted, packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hawk.retile.cuda.box import chunks, odd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.layouts.compiled import CodecInfo
    from hawk.retile.cuda.box import Box, Vector


class At(NamedTuple):
    """Where an element is: a 32-bit register and the bit in it at which it begins."""

    word: str
    bit: int


def loads(box: Box, found: Vector, base: str) -> tuple[list[str], list[At]]:
    """Lines that load all elements of the vector whose place in shared memory is `base`, and where each is then."""
    bits = box.spec.src_codec.bits
    offsets = found.offsets("room")
    lines: list[str] = []
    where: dict[int, At] = {}
    for i, chunk in enumerate(chunks(offsets, bits, box.room_align(found), odd(found))):
        lines += [f"u32 r{i}[{-(-chunk.width // 4)}];", f"get{chunk.width}(r{i}, {base} + {chunk.at}u);"]
        for byte in range(chunk.width):
            where.setdefault(chunk.at + byte, At(f"r{i}[{byte // 4}]", byte % 4 * 8))
    return lines, [At(where[o // 8].word, where[o // 8].bit + o % 8) for o in offsets]


def word(parts: Sequence[At]) -> str:
    """Four bytes of registers as one word."""
    names = list(dict.fromkeys(p.word for p in parts))
    if len(parts) < 4:
        parts = [*parts, *[parts[-1]] * (4 - len(parts))]
    if len(names) <= 2:
        if len(names) == 1 and [p.bit for p in parts] == [0, 8, 16, 24]:
            return names[0]
        which = sum((names.index(p.word) * 4 + p.bit // 8) << 4 * i for i, p in enumerate(parts))
        return f"PERMUTE({names[0]}, {names[-1]}, 0x{which:04x})"
    return f"PERMUTE({word(parts[:2])}, {word(parts[2:])}, 0x5410)"


def code(at: At, bits: int, shift: str = "") -> str:
    """The element alone; `shift` says what to add to its bit."""
    if bits == 32:
        return at.word
    by = " + ".join(part for part in (f"{at.bit}" if at.bit else "", shift) if part)
    moved = f"({at.word} >> ({by}))" if by else at.word
    return f"({moved} & 0x{(1 << bits) - 1:x}u)"


def moved(elements: Sequence[At], bits: int) -> list[str]:
    """The elements packed one after another, bits as they are; 8 bits and more."""
    single = [At(e.word, e.bit + 8 * i) for e in elements for i in range(bits // 8)]
    return [word(single[i : i + 4]) for i in range(0, len(single), 4)]


def value(codec: CodecInfo, at: At, shift: str = "") -> str:
    """The bits of binary32 of an element that shares nothing."""
    if codec.name == "bf16":
        return f"({at.word} << 16)" if at.bit == 0 else f"({at.word} & 0xffff0000u)"
    found = f"value_{codec.name}({code(at, codec.bits, shift)})"
    return found if codec.factor == 1.0 else f"multiplied({found}, {factor_bits(codec)})"


def encoded(codec: CodecInfo, bits: str) -> str:
    """The code of a value whose codec shares nothing."""
    if codec.factor != 1.0:
        bits = f"divided({bits}, {factor_bits(codec)})"
    return f"code_{codec.name}({bits})"


def factor_bits(codec: CodecInfo) -> str:
    """Its factor as C."""
    return f"0x{int(np.float32(codec.factor).view(np.uint32)):08x}u"


def packed(codes: Sequence[str], bits: int) -> list[str]:
    """Words of codes, the first in the lowest bits."""
    per = 32 // bits
    return [
        " | ".join(f"{c} << {i * bits}" if i else c for i, c in enumerate(codes[k : k + per]))
        for k in range(0, len(codes), per)
    ]
