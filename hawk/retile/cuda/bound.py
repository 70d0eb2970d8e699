"""A launch as a GPU is given it: what to compile, and the table that the kernel reads.

What depends on where memory lies stands at the front of the table.  The rest is the same for all chunks that differ in
nothing else, and stays where it was brought to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hawk.retile.cuda import source
from hawk.retile.cuda.spec import VECTOR

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.retile.cuda.spec import Spec

    I64 = NDArray[np.int64]
    U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Bound:
    """One launch.

    front     the bases of all steps, `int64[n]`
    rest      what is behind them in the table, `uint8[n]`
    parts     `uint32[programs, len(PART_FIELDS)]`
    blocks    of threads
    """

    specs: tuple[Spec, ...]
    front: I64
    rest: U8
    parts: NDArray[np.uint32]
    blocks: int

    @property
    def table(self) -> U8:
        """What the kernel reads, `uint8[n]`; it has to lie at a multiple of `VECTOR`."""
        return np.concatenate((self.front.view(np.uint8), self.rest))

    @property
    def key(self) -> tuple[object, ...]:
        """Of the kernel, which launches with the same have in common."""
        return self.specs

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return source.shared_bytes(self.specs)

    def text(self, under: str | None = None) -> str:
        """Of the kernel; see `hawk.retile.cuda.source.text`."""
        return source.text(self.specs, under)


class Part(NamedTuple):
    """Steps of one kind; `sections` in the order of `PART_FIELDS` from `base` on."""

    spec: Spec
    units: int
    steps: int
    sections: tuple[NDArray[np.generic], ...]


def joined(parts: list[Part]) -> Bound:
    """The launch of a few parts."""
    found, at = np.zeros((len(parts), 6), np.uint32), 0
    front = front_of([part.sections[0] for part in parts])
    sections: list[U8] = []
    for i, part in enumerate(parts):
        found[i, :3] = part.units, part.steps, at // VECTOR
        at += _padded(part.sections[0].nbytes)
    for i, part in enumerate(parts):
        for k, section in enumerate(part.sections[1:]):
            raw = np.ascontiguousarray(section).reshape(-1).view(np.uint8)
            found[i, 3 + k] = at // VECTOR
            padded = np.zeros(_padded(len(raw)), np.uint8)
            padded[: len(raw)] = raw
            sections.append(padded)
            at += len(padded)
    rest = np.concatenate(sections) if sections else np.zeros(VECTOR, np.uint8)
    return Bound(tuple(p.spec for p in parts), front, rest, found, sum(p.units * p.steps for p in parts))


def front_of(bases: list[NDArray[np.generic]]) -> I64:
    """The bases of each part, `int64[steps, channels]`, one behind the other."""
    out = np.zeros(sum(_padded(part.nbytes) for part in bases) // 8, np.int64)
    at = 0
    for part in bases:
        out[at : at + part.size] = part.ravel()
        at += _padded(part.nbytes) // 8
    return out


def _padded(nbytes: int) -> int:
    return -(-nbytes // VECTOR) * VECTOR
