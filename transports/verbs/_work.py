"""One read or push: what of it is still to be posted, what is under way, and how it ended."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import AccessDenied, HawkError, TransferFailed
from hawk.transports import _pieces
from hawk.transports.verbs import _abi, _register
from hawk.transports.verbs._numa import UNKNOWN
from hawk.transports.verbs._wire import BadWire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from hawk.memory.region import I64, Region, Segments
    from hawk.transports.verbs._abi import Batch, Places, Shape
    from hawk.transports.verbs._register import Registered
    from hawk.transports.verbs._wire import Entered, Push

MOST_TRIES = 4
"""How often a batch is posted, or a push asked for, before its read fails: each time a queue pair broke under it."""


def built_at_a_time(shape: Shape) -> int:
    """Bytes whose requests are built at a time: however small a peer's largest message is, these are not too many."""
    return _abi.BUILD_ROWS * max(shape.message // 2, 1)


class Flight:
    """A batch that is posted or to be posted.

    first, last  its ids on the queue pair that it is on
    node         NUMA node of the memory here that it begins with
    """

    __slots__ = ("avoid", "batch", "first", "last", "node", "tries", "work")

    def __init__(self, work: Work, batch: Batch, node: int = UNKNOWN) -> None:
        self.work = work
        self.batch = batch
        self.node = node
        self.tries = 0
        self.avoid = -1
        self.first = self.last = 0


class Work:
    """What this side moves by batches of one kind.

    keys       remote keys by queue pair, None where there are none, or they have to be asked for
    flying     batches that are posted
    done       set when nothing of it is posted and nothing is to be
    """

    def __init__(self, local: Registered) -> None:
        self.error: HawkError | None = None
        self.flying = 0
        self.moved = 0
        self.keys: list[NDArray[np.uint32] | None] = []
        self._local = local
        self._again: deque[Flight] = deque()
        self._batches: Iterator[Batch] | None = None
        self._next: Flight | None = None
        self._locals: dict[int, NDArray[np.uint32]] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def local_keys(self, device: int) -> NDArray[np.uint32]:
        """Keys of all registrations, in the order of `Places.start`, for one device."""
        if device not in self._locals:
            self._locals[device] = self._local.keys(device)
        return self._locals[device]

    # -- what is to be posted ------------------------------------------------------------------------------------

    def _advance(self) -> None:
        assert self._batches is not None
        batch = next(self._batches, None)
        self._next = None if batch is None else Flight(self, batch, self._local.nodes[int(batch.mr[0])])

    @property
    def waiting(self) -> bool:
        """Whether something is to be posted, or not known yet."""
        return self.error is None and (self._batches is None or bool(self._again) or self._next is not None)

    def peek(self) -> Flight | None:
        """What is to be posted next."""
        return self._again[0] if self._again else self._next

    def take(self) -> bool:
        """What `peek` gave is to be posted; False where the read has failed instead, on what follows."""
        if self._again:
            self._again.popleft()
        else:
            try:
                self._advance()
            except HawkError as error:
                self.stop(error)
                return False
        self.flying += 1
        return True

    def landed(self, flight: Flight) -> None:
        """A batch is in place."""
        self.flying -= 1
        self.moved += flight.batch.nbytes
        self._settle()

    def lost(self, flight: Flight, error: HawkError | None) -> None:
        """A batch did not get through, and nothing of it can land any more; with an error the read fails."""
        self.flying -= 1
        if error is not None:
            self.error = self.error or error
        if self.error is None:
            self._again.append(flight)
        self._settle()

    def stop(self, error: HawkError | None) -> None:
        """Posts no more; `error` is how it ends, None where nobody asks."""
        self.error = self.error or error or HawkError("stopped")
        self._again.clear()
        self._next = None
        self._settle()

    def _settle(self) -> None:
        if self.flying == 0 and not self.waiting and not self.done.done():
            self._forget()
            self.done.set_result(None)

    def _forget(self) -> None:
        """Lets go what is not posted any more: it refers to us in turn, and we to the regions."""
        self._batches = iter(())
        self._again.clear()
        self._next = None


class Reading(Work):
    """One read, by READs.

    asking     whether keys are being asked for
    """

    def __init__(
        self, key: bytes, segments: Segments, regions: Sequence[Region], registered: Sequence[Registered]
    ) -> None:
        self._begin = _register.line(regions)
        super().__init__(_register.joined(registered, self._begin))
        self.key = key
        self.asking = False
        self._segments = segments
        self._regions = tuple(regions)  # kept alive, since bytes land in them
        self._windows: tuple[int, ...] = ()

    def enter(self, entered: Entered, shape: Shape) -> None:
        """The grant is open: what may be read of it is known.

        Raises `AccessDenied` for segments outside it, `BadWire` for other windows than requests were laid out for.
        """
        if self._windows != (windows := tuple(entered.windows)) and self._batches is not None:
            raise BadWire("the windows of a grant changed")
        self._windows = windows
        self.keys = [np.asarray(keys, np.uint32) if keys else None for keys in entered.keys]
        if self._batches is None:
            self._batches = self._cut(self._places(entered), shape, entered)
            self._advance()

    def _places(self, entered: Entered) -> Places:
        windows = np.asarray(entered.windows, np.int64)
        return _abi.Places(
            begin=self._begin,
            start=self._local.start,
            address=self._local.address,
            windows=windows,
            remote=np.full(len(windows), entered.base, np.int64),
        )

    def _cut(self, places: Places, shape: Shape, entered: Entered) -> Iterator[Batch]:
        low, high = entered.offset, entered.offset + entered.nbytes
        for piece in _pieces.cut(self._segments, built_at_a_time(shape), _abi.BUILD_ROWS):
            if piece.low < low or piece.high > high:
                raise AccessDenied(
                    "the key does not cover the range",
                    got=f"remote bytes {piece.low}..{piece.high}",
                    expected=f"within {low}..{high}",
                )
            yield from _abi.batches(_pieces.join(piece), places, shape)


class Writing(Work):
    """One push, by WRITEs: when all of them are posted, each queue pair that it may use is to say its mark.

    marks      what each queue pair has still to say, by its index
    broken     whether a queue pair broke under it; nothing is posted again, for the reader counts marks
    """

    def __init__(self, local: Registered, push: Push, rows: I64, shape: Shape) -> None:
        super().__init__(local)
        self.keys = [np.asarray(keys, np.uint32) if keys else None for keys in push.keys]
        self.broken = False
        self._batches = written(push, rows, local, shape)
        self._advance()
        first = push.bases[0] + push.windows[0]
        self.marks = {
            index: Flight(self, _abi.marker(push.mark, first))
            for index, keys in enumerate(self.keys)
            if keys is not None
        }

    @property
    def waiting(self) -> bool:
        """See `Work.waiting`."""
        return super().waiting or (self.error is None and bool(self.marks))

    def mark(self, index: int) -> Flight:
        """What this queue pair is to say is to be posted."""
        self.flying += 1
        return self.marks.pop(index)

    def lost(self, flight: Flight, error: HawkError | None) -> None:
        """See `Work.lost`."""
        self.broken = self.broken or error is None
        if isinstance(error, AccessDenied):  # as of a read; but here it was the reader's memory that refused
            error = TransferFailed("the reader's memory did not let it in", got=error.got)
        super().lost(flight, error or TransferFailed("a queue pair broke under the push"))

    def stop(self, error: HawkError | None) -> None:
        """See `Work.stop`."""
        self.marks.clear()
        super().stop(error)

    def _forget(self) -> None:
        super()._forget()
        self.marks.clear()


def written(push: Push, rows: I64, local: Registered, shape: Shape) -> Iterator[Batch]:
    """The batches of a push, whose rows are `int64[n, 3]`, out of the served region, registered as `local`."""
    places = _abi.Places(
        begin=np.zeros(1, np.int64),
        start=local.start,
        address=local.address,
        windows=np.asarray(push.windows, np.int64),
        remote=np.asarray(push.bases, np.int64),
    )
    offset, place, nbytes = (np.ascontiguousarray(column) for column in rows.T)
    whole = _pieces.Piece(np.zeros(len(rows), np.int32), offset, place, nbytes, int(nbytes.sum()))
    for piece in _pieces.cut(whole, built_at_a_time(shape), _abi.BUILD_ROWS):
        yield from _abi.batches(_pieces.join(piece), places, shape)
