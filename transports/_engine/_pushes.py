"""What the serving side writes for readers that asked for it: pushes under way, and whose word still counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from hawk.transports._engine import _wire

if TYPE_CHECKING:
    from hawk.memory.region import I64
    from hawk.transports._engine._seam import Engine, Handle
    from hawk.transports._grants import GrantTable, Held

Reader = TypeVar("Reader")


class _Push(Generic[Reader]):
    """One push under way; its reader is None once that has hung up, and nobody hears of the end."""

    __slots__ = ("handle", "held", "number", "reader")

    def __init__(self, reader: Reader, number: int) -> None:
        self.reader: Reader | None = reader
        self.number = number
        self.held: Held | None = None
        self.handle: Handle | None = None


class Pushes(Generic[Reader]):
    """Those of one server, whose engine they use.  A push is inside its range until the engine has let go of it."""

    def __init__(self, grants: GrantTable) -> None:
        self._grants = grants
        self._under_way: list[_Push[Reader]] = []
        self.done = 0

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def of(self, reader: Reader) -> int:
        """How many of a reader's are under way."""
        return sum(push.reader is reader for push in self._under_way)

    def begin(
        self,
        engine: Engine,
        reader: Reader,
        peer: object,
        number: int,
        key: bytes,
        span: tuple[int, int],
        rows: I64,
        gpu: int,
    ) -> int:
        """Begins to write rows (offset, target address, bytes) that lie in `span`; `OK`, or the verdict at once.

        gpu    the reader's GPU that the targets are memory of, or -1
        """
        low, high = span
        offset, address, nbytes = rows[:, 0], rows[:, 1], rows[:, 2]
        inside = low < high and bool(((nbytes > 0) & (nbytes <= high - low)).all())
        inside = inside and bool(((offset >= low) & (offset <= high - nbytes)).all())
        push = _Push(reader, number)
        push.held = self._grants.enter(key, low, high, push) if inside else None
        region = self._grants.region
        if push.held is None or region is None:
            return _wire.DENIED
        try:
            push.handle = engine.post(
                peer,
                True,
                offset + region.address,
                address,
                nbytes,
                _wire.NOTICE.pack(number),
                here=region.gpu,
                there=gpu,
            )
        except OSError:
            self._grants.leave(push.held, push)
            return _wire.FAILED
        self._under_way.append(push)
        return _wire.OK

    def ended(self, engine: Engine) -> list[tuple[Reader | None, int, int]]:
        """What has ended since the last look: reader, number, verdict."""
        ended: list[tuple[Reader | None, int, int]] = []
        for push in list(self._under_way):
            try:
                if not engine.poll(push.handle):
                    continue
                verdict = _wire.OK
            except OSError:
                verdict = _wire.FAILED
            self._under_way.remove(push)
            self.done += 1
            if push.held is not None and not self._grants.leave(push.held, push):
                verdict = _wire.DENIED
            ended.append((push.reader, push.number, verdict))
        return ended

    def part(self, reader: Reader) -> None:
        """A reader has hung up; the engine may still read the ranges of what it asked for."""
        for push in self._under_way:
            if push.reader is reader:
                push.reader = None

    def close(self) -> None:
        """The engine is closed: nothing reads their ranges any more."""
        under_way, self._under_way = self._under_way, []
        for push in under_way:
            if push.held is not None:
                self._grants.leave(push.held, push)
