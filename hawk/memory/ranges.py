"""Which bytes of one range belong to whom: a pure, owner-tagged allocator.

No memory is touched here.  The arena, the channels of a device and the fragmentation bench all count on the
same few lines.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass

from hawk.errors import InternalError, InvalidArgument, OutOfMemory


@dataclass(frozen=True, slots=True)
class Range:
    """`nbytes` bytes at `offset`, owned by `owner` until freed.

    The object itself is the claim: `free` takes the one that `allocate` returned, not an equal one, so that a
    stale claim on an address that was given out anew is noticed.
    """

    offset: int
    nbytes: int
    owner: str

    @property
    def end(self) -> int:
        """First byte after the range."""
        return self.offset + self.nbytes


class RangeAllocator:
    """Hands out pieces of `[0, nbytes)`, lowest fitting address first.

    Every piece starts at a multiple of `alignment` bytes and holds whole multiples of it; a tail of `nbytes`
    shorter than that is never given out.  `free_bytes`, `owned` and `quarantined_bytes` count what is held, so
    they sum to `nbytes` at any time.  A byte is free, owned, or in quarantine: no longer its owner's, but not
    to be given out either, since something may still read or write it.

    Not thread-safe.  Costs are linear in the number of free pieces, logarithmic in that of ranges.
    """

    def __init__(self, nbytes: int, alignment: int = 64, name: str = "pool") -> None:
        if alignment <= 0:
            raise InvalidArgument("no alignment", field=name, got=alignment, expected="a positive number")
        if nbytes < alignment:
            raise InvalidArgument(
                "a pool smaller than its alignment",
                field=name,
                got=nbytes,
                expected=f"at least {alignment} bytes",
            )
        self.name = name
        self.alignment = alignment
        self.nbytes = nbytes // alignment * alignment
        # Free pieces, ascending and never adjacent: [starts[i], ends[i]).
        self._starts = [0]
        self._ends = [self.nbytes]
        self._live: dict[int, Range] = {}
        self._quarantine: dict[int, tuple[Range, str]] = {}
        self._free = self.nbytes
        self._quarantined = 0
        self._owned: Counter[str] = Counter()

    # -- allocating --------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, owner: str, alignment: int | None = None) -> Range:
        """The lowest free piece of `nbytes`, at a multiple of `alignment` (and of the pool's own).

        Raises `OutOfMemory` with the figures if there is none, `InvalidArgument` for a size or alignment that
        is not positive.
        """
        offset = self.first_fit(nbytes, alignment=alignment)
        if offset is None:
            raise self.out_of_memory(nbytes, alignment)
        return self.claim(offset, nbytes, owner)

    def first_fit(self, nbytes: int, start: int = 0, alignment: int | None = None) -> int | None:
        """The lowest offset at or after `start` where `nbytes` would fit, or None.  Changes nothing."""
        held, step = self._held(nbytes), self._step(alignment)
        for i in range(max(0, bisect_right(self._starts, start) - 1), len(self._starts)):
            offset = -(-max(self._starts[i], start) // step) * step
            if offset + held <= self._ends[i]:
                return offset
        return None

    def last_fit(self, nbytes: int, end: int | None = None, alignment: int | None = None) -> int | None:
        """The highest offset where `nbytes` would fit and end at or before `end`, or None.  Changes nothing."""
        held, step = self._held(nbytes), self._step(alignment)
        end = self.nbytes if end is None else end
        for i in range(bisect_left(self._starts, end) - 1, -1, -1):
            offset = (min(self._ends[i], end) - held) // step * step
            if offset >= self._starts[i]:
                return offset
        return None

    def claim(self, offset: int, nbytes: int, owner: str) -> Range:
        """Exactly the piece at `offset`.  Raises `InvalidArgument` if it is not aligned and wholly free."""
        held = self._held(nbytes)
        i = bisect_right(self._starts, offset) - 1
        if i < 0 or offset + held > self._ends[i] or offset % self.alignment:
            raise InvalidArgument(
                "not an aligned free piece", field=self.name, got=f"{nbytes} bytes at {offset}"
            )
        start, end = self._starts[i], self._ends[i]
        pieces = [(a, b) for a, b in ((start, offset), (offset + held, end)) if a < b]
        self._starts[i : i + 1] = [a for a, _ in pieces]
        self._ends[i : i + 1] = [b for _, b in pieces]
        taken = Range(offset, nbytes, owner)
        self._live[offset] = taken
        self._free -= held
        self._owned[owner] += held
        return taken

    # -- giving back -------------------------------------------------------------------------------------

    def free(self, taken: Range) -> None:
        """Gives a range back.  Raises `InvalidArgument` if it was freed before or is in quarantine."""
        self._disown(taken)
        self._give_back(taken)

    def quarantine(self, taken: Range, reason: str) -> None:
        """Takes a range from its owner without making it free: a byte may still move in it."""
        self._disown(taken)
        self._quarantine[taken.offset] = (taken, reason)
        self._quarantined += self._held(taken.nbytes)

    def release_quarantined(self, taken: Range) -> None:
        """Makes a range in quarantine free: it is proved that nothing moves in it any more."""
        entry = self._quarantine.get(taken.offset)
        if entry is None or entry[0] is not taken:
            raise InvalidArgument("the range is not in quarantine", field=self.name, got=taken)
        del self._quarantine[taken.offset]
        self._quarantined -= self._held(taken.nbytes)
        self._give_back(taken)

    def _disown(self, taken: Range) -> None:
        if self._live.get(taken.offset) is not taken:
            entry = self._quarantine.get(taken.offset)
            if entry is not None and entry[0] is taken:
                raise InvalidArgument(f"the range is in quarantine: {entry[1]}", field=self.name, got=taken)
            raise InvalidArgument("the range is not allocated (freed before?)", field=self.name, got=taken)
        del self._live[taken.offset]
        held = self._held(taken.nbytes)
        self._owned[taken.owner] -= held
        if not self._owned[taken.owner]:
            del self._owned[taken.owner]

    def _give_back(self, taken: Range) -> None:
        start, end = taken.offset, taken.offset + self._held(taken.nbytes)
        self._free += end - start
        i = bisect_left(self._starts, start)
        last = i
        if last < len(self._starts) and self._starts[last] == end:
            end = self._ends[last]
            last += 1
        if i > 0 and self._ends[i - 1] == start:
            i -= 1
            start = self._starts[i]
        self._starts[i:last] = [start]
        self._ends[i:last] = [end]

    # -- looking -----------------------------------------------------------------------------------------

    @property
    def free_bytes(self) -> int:
        """Bytes that are free, in however many pieces."""
        return self._free

    @property
    def largest_free(self) -> int:
        """Bytes in the largest free piece."""
        return max((b - a for a, b in zip(self._starts, self._ends, strict=True)), default=0)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes in quarantine."""
        return self._quarantined

    def owned(self) -> dict[str, int]:
        """Bytes held by each owner, quarantine not counted."""
        return dict(self._owned)

    def ranges(self) -> list[Range]:
        """All owned ranges, ascending."""
        return [self._live[k] for k in sorted(self._live)]

    def quarantined(self) -> list[tuple[Range, str]]:
        """Ranges in quarantine and why, ascending."""
        return [self._quarantine[k] for k in sorted(self._quarantine)]

    def free_pieces(self) -> list[tuple[int, int]]:
        """Free pieces as (start, end), ascending."""
        return list(zip(self._starts, self._ends, strict=True))

    def fits_empty(self, nbytes: int, alignment: int | None = None) -> bool:
        """Whether `nbytes` would fit if everything were free."""
        self._step(alignment)
        return self._held(nbytes) <= self.nbytes

    def out_of_memory(self, nbytes: int, alignment: int | None = None) -> OutOfMemory:
        """The error that says why `nbytes` do not fit now."""
        return OutOfMemory(
            "no free piece is large enough",
            field=self.name,
            asked=nbytes,
            free=self.free_bytes,
            largest_piece=self.largest_free,
            capacity=self.nbytes,
            quarantined=self.quarantined_bytes,
            alignment=self._step(alignment),
        )

    def check(self) -> None:
        """Raises `InternalError` unless every byte is accounted for exactly once.  For tests and debugging."""
        parts = [(a, b, "free") for a, b in self.free_pieces()]
        parts += [(r.offset, r.offset + self._held(r.nbytes), "owned") for r in self._live.values()]
        parts += [
            (r.offset, r.offset + self._held(r.nbytes), "quarantined") for r, _ in self._quarantine.values()
        ]
        parts.sort()
        at, before = 0, ""
        for start, end, state in parts:
            if start != at or end <= start or (state == before == "free") or start % self.alignment:
                raise InternalError(
                    "ranges overlap, leave gaps or are not merged", field=self.name, got=start
                )
            at, before = end, state
        sums = Counter[str]()
        for start, end, state in parts:
            sums[state] += end - start
        if at != self.nbytes or (sums["free"], sums["owned"], sums["quarantined"]) != (
            self._free,
            sum(self._owned.values()),
            self._quarantined,
        ):
            raise InternalError("the sums are wrong", field=self.name, got=dict(sums))

    def _held(self, nbytes: int) -> int:
        if nbytes <= 0:
            raise InvalidArgument("an empty range", field=self.name, got=nbytes, expected="a positive size")
        return -(-nbytes // self.alignment) * self.alignment

    def _step(self, alignment: int | None) -> int:
        if alignment is None:
            return self.alignment
        if alignment <= 0:
            raise InvalidArgument(
                "no alignment", field=self.name, got=alignment, expected="a positive number"
            )
        return math.lcm(alignment, self.alignment)
