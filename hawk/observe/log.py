"""Structured logs that never touch a host application's logging.

`get` gives a structlog logger that writes to the standard library's logger of the same name.  Embedded in
another program, that program's own logging decides what becomes of an event; in an agent's process, and there
only, `configure` decides: for people on a terminal, one JSON object a line elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO, cast

import structlog

from hawk.observe.repeats import WINDOW, Repeats

_encode = json.JSONEncoder(default=str).encode

_FIELDS = "hawk_fields"
"""Where a log record carries the event's fields; one attribute, so that no field can clash with the record's own."""


def get(name: str, **fields: object) -> structlog.stdlib.BoundLogger:
    """A logger for one module; `fields` go with every event.  `log.info("what happened", job=..., bytes=...)`."""
    logger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[structlog.stdlib.filter_by_level, _to_record],
        wrapper_class=_Logger,
        context_class=dict,
    )
    return cast("structlog.stdlib.BoundLogger", logger.bind(**fields))


class _Text:
    """What an event says in one line, put together when somebody wants it: HAWK's own handler does not."""

    __slots__ = ("_fields", "_what")

    def __init__(self, what: str, fields: dict[str, object]) -> None:
        self._what, self._fields = what, fields

    def __str__(self) -> str:
        return " ".join([self._what, *(f"{key}={value}" for key, value in self._fields.items())])


class _Logger(structlog.stdlib.BoundLogger):
    """One whose details cost next to nothing where nobody wants them, and whose news cost little: jobs have both."""

    def info(self, event: str | None = None, *args: Any, **fields: Any) -> Any:
        """An event that every job has: what `_to_record` would make of it, without the way there."""
        if args or self._context or "exc_info" in fields:
            return super().info(event, *args, **fields)
        if self._logger.isEnabledFor(logging.INFO):
            what = str(event or "")
            # As the logger itself would, but that it does not look for the caller, which would be this line.
            record = (
                logging.getLogRecordFactory()(  # the program's own, whose formatters may want what it adds
                    self._logger.name, logging.INFO, __file__, 0, _Text(what, fields), None, None
                )
            )
            setattr(record, _FIELDS, (what, fields))
            self._logger.handle(record)
        return None

    def debug(self, event: str | None = None, *args: Any, **fields: Any) -> Any:
        """An event that is seldom wanted."""
        if self._logger.isEnabledFor(logging.DEBUG):
            return super().debug(event, *args, **fields)
        return None


def _to_record(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> tuple[tuple[str], dict[str, object]]:
    """What the standard library's logger is called with: readable as it is, and the fields beside it."""
    what, exc_info = str(event.pop("event", "")), event.pop("exc_info", None)
    fields = dict(event)
    text = " ".join([what, *(f"{key}={value}" for key, value in fields.items())])
    return (text,), {"exc_info": exc_info, "extra": {_FIELDS: (what, fields)}}


class _Formatter(logging.Formatter):
    """One event as one line; events of other packages, which have no fields, alike."""

    def __init__(self, console: bool, colours: bool) -> None:
        super().__init__()
        self._console = structlog.dev.ConsoleRenderer(colors=colours) if console else None

    def format(self, record: logging.LogRecord) -> str:
        what, fields = getattr(record, _FIELDS, None) or (record.getMessage(), {})
        event: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": what,
        }
        event.update((f"{key}_" if key in event else key, value) for key, value in fields.items())
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        if self._console is None:
            return _encode(event)
        event["timestamp"] = event.pop("time")[11:23]
        return str(self._console(None, record.levelname.lower(), event))


def _event(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    """An event's words and fields; the fields are the record's own, so that one more shows."""
    what, fields = getattr(record, _FIELDS, None) or (record.getMessage(), {})
    setattr(record, _FIELDS, (what, fields))
    return what, fields


class _Handler(logging.StreamHandler[TextIO]):
    """Writes events, and those that repeat once in a while; what is still counted is written at the end."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._repeats = Repeats(_event)
        self._timer: threading.Timer | None = None

    def handle(self, record: logging.LogRecord) -> bool:
        with self.lock or contextlib.nullcontext():
            for told in self._repeats.take(record):
                self.emit(told)
            if self._repeats.waiting and self._timer is None:
                self._timer = threading.Timer(WINDOW, self._due)
                self._timer.daemon = True
                self._timer.start()
        return True

    def _due(self) -> None:
        with self.lock or contextlib.nullcontext():
            self._timer = None
            for told in self._repeats.due():
                self.emit(told)

    def close(self) -> None:
        with self.lock or contextlib.nullcontext():
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            for told in self._repeats.due(all_of_them=True):
                self.emit(told)
        super().close()


def set_level(level: str) -> None:
    """The least serious events of HAWK's that are logged from now on."""
    logging.getLogger("hawk").setLevel(level.upper())


def configure(
    level: str = "info", style: Literal["auto", "console", "json"] = "auto", stream: TextIO | None = None
) -> None:
    """Sets up this process's logging.  Only for processes that are HAWK's own; calling it again replaces it.

    `level` holds for HAWK's events; other packages are heard from warnings on.  Repeats are collapsed.
    """
    out = sys.stderr if stream is None else stream
    terminal = out.isatty()
    handler = _Handler(out)
    handler.setFormatter(_Formatter(style == "console" or (style == "auto" and terminal), terminal))
    handler.name = _FIELDS
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.name == _FIELDS]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    set_level(level)
