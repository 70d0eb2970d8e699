"""Events that come again and again, told once and then counted: a log is to be read."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

WINDOW = 10.0
"""Seconds in which an event is told once."""

MOST = 256
"""Kinds of event that are counted at a time; of more, the oldest is told early."""

EXEMPT = ("job", "request", "task")
"""Fields that mark an event as one job's, one request's or one task's, which is told each time."""

_Key = tuple[str, int, str, str]


@dataclass(slots=True)
class _Seen:
    until: float
    last: logging.LogRecord | None = None
    count: int = 0


class Repeats:
    """Which records to write.

    Of events alike the first is written at once, those that follow within `WINDOW` seconds are counted, and then the
    last of them is written with `repeated`, how many they were.  Alike are an information whose fields are all the
    same, and a warning or error of the same words about the same peer: a stranger chooses what fills the rest.

    fields    `fields(record)` gives the event's words and fields; `repeated` is put into the latter
    """

    def __init__(
        self,
        fields: Callable[[logging.LogRecord], tuple[str, dict[str, object]]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fields = fields
        self._clock = clock
        self._seen: OrderedDict[_Key, _Seen] = OrderedDict()

    def take(self, record: logging.LogRecord) -> list[logging.LogRecord]:
        """What is to be written now that `record` came: what its time ran out for, and mostly itself."""
        due = self.due()
        what, fields = self._fields(record)
        if any(name in fields for name in EXEMPT):
            return [*due, record]
        key = self._key(record, what, fields)
        seen = self._seen.get(key)
        if seen is not None:
            seen.count += 1
            seen.last = record
            return due
        self._seen[key] = _Seen(self._clock() + WINDOW)
        if len(self._seen) > MOST:
            due += self._told(self._seen.popitem(last=False)[1])
        return [*due, record]

    def due(self, *, all_of_them: bool = False) -> list[logging.LogRecord]:
        """What is to be written because its time ran out, or at the end."""
        now, told = self._clock(), []
        while self._seen:
            key, seen = next(iter(self._seen.items()))
            if seen.until > now and not all_of_them:
                break
            del self._seen[key]
            told += self._told(seen)
        return told

    @property
    def waiting(self) -> bool:
        """Whether something is counted that was not told."""
        return any(seen.count for seen in self._seen.values())

    def _told(self, seen: _Seen) -> list[logging.LogRecord]:
        if seen.last is None:
            return []
        if seen.count > 1:
            self._fields(seen.last)[1]["repeated"] = seen.count
        return [seen.last]

    @staticmethod
    def _key(record: logging.LogRecord, what: str, fields: Mapping[str, object]) -> _Key:
        alike = (
            fields.get("peer", "") if record.levelno >= logging.WARNING else sorted(fields.items(), key=str)
        )
        return record.name, record.levelno, what, str(alike)
