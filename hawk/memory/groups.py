"""Segments and ranges that repeat: a few lists of rows, and many groups that are one of these lists, shifted.

A plan of eighty layers has the same runs eighty times, at other places.  Written out, its rows are megabytes that
cost more to lay down than the plan did; as groups they are some kilobytes, and whoever moves bytes takes the rows in
batches that stay within a processor's cache.

Row k of group g is row `first[which[g]] + k` of the lists, `local` shifted by `up[g]`, `remote` by `on[g]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import InvalidArgument
from hawk.memory.region import ByteRanges, Segments
from hawk.retile import native

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from hawk.memory.region import Region

    I64 = NDArray[np.int64]
    I32 = NDArray[np.int32]

BATCH = 1 << 14
"""Rows of a batch: half a megabyte of columns, which fits into a core's own cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Lists and groups, see above.

    first, count            of each list, `int64[lists]`; none is empty
    local, remote, nbytes   rows of all lists, `int64[n]`
    which                   list of each group, `int64[groups]`
    region                  of each group, `int32[groups]`
    up, on                  bytes, `int64[groups]`
    """

    first: I64
    count: I64
    local: I64
    remote: I64
    nbytes: I64
    which: I64
    region: I32
    up: I64
    on: I64

    @property
    def sizes(self) -> I64:
        """Rows of each group, `int64[groups]`."""
        return self.count[self.which]

    def of_list(self, reduce: np.ufunc, column: I64) -> I64:
        """`reduce` over a column's rows of each list, `int64[lists]`."""
        ends = np.stack((self.first, self.first + self.count), axis=1).ravel()
        # A row behind the last, for the ends of lists are places to begin at here.
        found: I64 = reduce.reduceat(np.append(column, column[-1:]), ends)[::2]
        return found

    def extents(self) -> tuple[I64, I64, I64]:
        """First local byte of each group, one past its last, and one past its last remote byte; `int64[groups]`."""
        low = self.of_list(np.minimum, self.local)
        high = self.of_list(np.maximum, self.local + self.nbytes)
        far = self.of_list(np.maximum, self.remote + self.nbytes)
        return low[self.which] + self.up, high[self.which] + self.up, far[self.which] + self.on

    @property
    def total(self) -> int:
        """Bytes of all rows of all groups."""
        return int(self.of_list(np.add, self.nbytes)[self.which].sum())

    def rows(self, begin: int, end: int) -> tuple[I32, I64, I64, I64]:
        """Region, local, remote and nbytes of every row of groups `[begin, end)`."""
        which = self.which[begin:end]
        total = int(self.count[which].sum())
        core = native.planner()
        if core is not None:
            block, region = np.empty(3 * total, np.int64), np.empty(total, np.int32)
            local, remote, nbytes = block[:total], block[total : 2 * total], block[2 * total :]
            core.spread_rows(
                self.first,
                self.count,
                self.local,
                self.remote,
                self.nbytes,
                self.which,
                self.region,
                self.up,
                self.on,
                begin,
                end,
                region,
                local,
                remote,
                nbytes,
            )
            return region, local, remote, nbytes
        count = self.count[which]
        ends = np.cumsum(count)
        row = np.repeat(self.first[which] - (ends - count), count) + np.arange(total, dtype=np.int64)
        local = self.local[row] + np.repeat(self.up[begin:end], count)
        remote = self.remote[row] + np.repeat(self.on[begin:end], count)
        return np.repeat(self.region[begin:end], count), local, remote, self.nbytes[row]

    def cuts(self, most: int) -> Iterator[tuple[int, int]]:
        """Ranges of groups of at most `most` rows each, or one group where that alone has more."""
        ends = np.cumsum(self.sizes)
        begin, done = 0, 0
        while begin < len(ends):
            end = max(int(ends.searchsorted(done + most, "right")), begin + 1)
            yield begin, end
            begin, done = end, int(ends[end - 1])


_Rows = tuple["I32", "I64", "I64", "I64"]


class _Grouped:
    """What both kinds of table share: groups, and their rows once somebody has asked for columns."""

    __slots__ = ()

    groups: Groups
    _written: _Rows | None

    def __init__(self, groups: Groups) -> None:
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "_written", None)

    def _rows(self) -> _Rows:
        if self._written is None:
            object.__setattr__(self, "_written", self.groups.rows(0, len(self.groups.which)))
        assert self._written is not None
        return self._written

    def __len__(self) -> int:
        return int(self.groups.sizes.sum())

    @property
    def total(self) -> int:
        """Bytes in all rows together."""
        return self.groups.total

    @property
    def region(self) -> I32:
        """Column of that name."""
        return self._rows()[0]

    @property
    def nbytes(self) -> I64:
        """Column of that name."""
        return self._rows()[3]


class GroupedSegments(_Grouped, Segments):
    """`Segments` as groups: columns are written out when somebody asks for them, batches never all at once."""

    __slots__ = ("_written", "groups")

    @property
    def local(self) -> I64:
        """Column of that name."""
        return self._rows()[1]

    @property
    def remote(self) -> I64:
        """Column of that name."""
        return self._rows()[2]

    def batches(self) -> Iterator[Segments]:
        """See `Segments`."""
        for begin, end in self.groups.cuts(BATCH):
            yield Segments(*self.groups.rows(begin, end))

    def check(self, regions: Sequence[Region], remote_nbytes: int | None = None) -> None:
        """See `Segments`; looks at groups, not at rows: a group is as good as one segment that spans its rows."""
        groups = self.groups
        least = int(groups.nbytes.min(initial=1))
        if least <= 0:
            raise InvalidArgument("a segment is empty", field="segments.nbytes", got=least)
        low, high, far = groups.extents()
        near = groups.of_list(np.minimum, groups.remote)[groups.which] + groups.on
        Segments(groups.region, low, near, high - low).check(regions)
        if remote_nbytes is not None and int(far.max(initial=0)) > remote_nbytes:
            raise InvalidArgument(
                "a segment lies outside its region",
                field="segments.remote",
                got=f"up to byte {int(far.max())}",
                expected=f"within {remote_nbytes} remote bytes",
            )


class GroupedRanges(_Grouped, ByteRanges):
    """`ByteRanges` as groups, written out in the same way; their `remote` and `on` mean nothing."""

    __slots__ = ("_written", "groups")

    @property
    def start(self) -> I64:
        """Column of that name."""
        return self._rows()[1]

    def spans(self) -> ByteRanges:
        """See `ByteRanges`: one a group."""
        low, high, _ = self.groups.extents()
        return ByteRanges(self.groups.region, low, high - low)


class JoinedRanges(ByteRanges):
    """Several tables of ranges in the same regions as one, row after row; columns are written out when asked for."""

    __slots__ = ("_parts",)

    _parts: tuple[ByteRanges, ...]

    def __init__(self, parts: Sequence[ByteRanges]) -> None:
        object.__setattr__(self, "_parts", tuple(parts))

    @classmethod
    def of(cls, parts: Sequence[ByteRanges]) -> ByteRanges:
        """The parts as one: the part itself, where there is one."""
        return parts[0] if len(parts) == 1 else cls(parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def total(self) -> int:
        """Bytes in all rows together."""
        return sum(part.total for part in self._parts)

    @property
    def region(self) -> I32:
        """Column of that name."""
        return np.concatenate([np.empty(0, np.int32), *(part.region for part in self._parts)])

    @property
    def start(self) -> I64:
        """Column of that name."""
        return np.concatenate([np.empty(0, np.int64), *(part.start for part in self._parts)])

    @property
    def nbytes(self) -> I64:
        """Column of that name."""
        return np.concatenate([np.empty(0, np.int64), *(part.nbytes for part in self._parts)])

    def spans(self) -> ByteRanges:
        """See `ByteRanges`: those of all parts."""
        spans = [part.spans() for part in self._parts]
        columns = zip(*((each.region, each.start, each.nbytes) for each in spans), strict=True)
        return ByteRanges(*(np.concatenate(column) for column in columns)) if spans else ByteRanges()
