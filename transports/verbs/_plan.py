"""Whether a read is pushed, and what is asked of the peer then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hawk.transports.verbs import _register, _wire
from hawk.transports.verbs._windows import Part, parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hawk.memory.region import I64, Region, Segments
    from hawk.transports.verbs._config import VerbsConfig
    from hawk.transports.verbs._register import Registered


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask for, in a line of bytes in which the regions are laid end to end.

    rows             offset in the served region, place in the line and length, by place: `int64[n, 3]`
    line             the registrations of the regions, as one
    parts            the stretches of the line that are written to, exactly
    """

    rows: NDArray[np.int64]
    line: Registered
    parts: list[Part]
    regions: tuple[Region, ...]

    @property
    def windows(self) -> list[int]:
        """Where in the line each part begins."""
        return [part.offset for part in self.parts]

    @property
    def bases(self) -> list[int]:
        """The address that byte 0 of the line would have, as each part has it."""
        return [int(self.line.address[p.slice]) - int(self.line.start[p.slice]) for p in self.parts]


def plan(
    segments: Segments, regions: Sequence[Region], registered: Sequence[Registered], config: VerbsConfig
) -> Plan | None:
    """How to have a read pushed; None where it is to be pulled.

    That is where its targets lie in more stretches than may be opened (each is opened by itself, so that nothing else
    can be written) or than a Push can name, and with `direction = "auto"` unless WRITEs take fewer requests: a READ
    takes neighbours in the arena in one, a WRITE neighbours in the target, either with as many pieces on the other side
    as a request may have.
    """
    begin = _register.line(regions)
    found: list[I64] = []
    for batch in segments.batches():
        place = begin[batch.region] + batch.local
        order = place.argsort(kind="stable")
        rows = np.stack((batch.remote, place, batch.nbytes), axis=1)[order]
        if len(_stretches(rows)) > config.push_windows:
            return None
        found.append(rows)
    rows = np.concatenate(found)
    if len(found) > 1:
        rows = rows[rows[:, 1].argsort(kind="stable")]
    stretches = _stretches(rows)
    line = _register.joined(registered, begin)
    opened = [part for low, high in stretches for part in parts(line, low, high - low)]
    many = len(opened) > _wire.MOST_WINDOWS or not _wire.asks(len(opened), config.queue_pairs)
    if len(stretches) > config.push_windows or many:
        return None
    rows = _joined(rows)
    if config.direction == "auto" and not _fewer(rows, len(stretches), config.max_sge):
        return None
    return Plan(rows, line, opened, tuple(regions))


def _stretches(rows: I64) -> list[tuple[int, int]]:
    """The bytes of the line that rows, which are in its order, fill: (begin, end) of each run of them."""
    ends = np.maximum.accumulate(rows[:, 1] + rows[:, 2])
    first = np.flatnonzero(np.concatenate(([True], rows[1:, 1] > ends[:-1])))
    last = np.append(first[1:], len(rows)) - 1
    return list(zip(rows[first, 1].tolist(), ends[last].tolist(), strict=True))


def _joined(rows: I64) -> I64:
    """The same bytes with rows joined that follow each other on both sides."""
    stop = rows[:-1, :2] + rows[:-1, 2:]
    first = np.flatnonzero(np.concatenate(([True], (rows[1:, :2] != stop).any(axis=1))))
    return np.column_stack((rows[first, :2], np.add.reduceat(rows[:, 2], first)))


def _fewer(rows: I64, stretches: int, max_sge: int) -> bool:
    """Whether WRITEs take fewer requests than READs, of which each begins anew where the other side has a gap."""
    arena = rows[rows[:, 0].argsort(kind="stable")]
    runs = 1 + int((arena[1:, 0] != arena[:-1, 0] + arena[:-1, 2]).sum())
    least = -(-len(rows) // max_sge)
    return max(stretches, least) < max(runs, least)
