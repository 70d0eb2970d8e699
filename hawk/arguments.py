"""What callers hand to a client, checked before it travels."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from hawk.control.messages import MOST_CONSUMERS, MOST_PARTS, pack_blocks
from hawk.errors import BadFrame, HawkError, InvalidArgument
from hawk.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Sized

    from numpy.typing import ArrayLike

T = TypeVar("T")

LONGEST = 7 * 86_400.0
"""Seconds: the longest duration that travels."""

_AT = re.compile(r"(?P<what>.*) - at `(?:key in )?\$(?P<path>.*)`", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def shown(value: object) -> str:
    """`value` for a message: short, whatever it is."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):  # arrays and tensors print their elements
        kind = type(value)
        return f"a {kind.__module__}.{kind.__qualname__} of shape {tuple(value.shape)}, {value.dtype}"[:120]
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def block_table(blocks: ArrayLike, field: str = "blocks") -> bytes:
    """A block table for the wire; raises `InvalidArgument` unless it is a flat list of block numbers."""
    try:
        table = np.asarray(blocks)
    except (ValueError, TypeError, OverflowError) as error:  # ragged, or a class that is no array
        raise InvalidArgument(
            "a block table is a flat, non-empty list of integers",
            field=field,
            got=shown(blocks),
            expected="block numbers, one after the other",
        ) from error
    if table.size == 0:
        raise InvalidArgument(
            "the block table is empty",
            field=field,
            got=shown(blocks),
            expected="the number of a block at least",
        )
    if table.ndim != 1 or table.dtype.kind not in "iu":
        raise InvalidArgument(
            "a block table is a flat, non-empty list of integers",
            field=field,
            got=f"shape {table.shape}, {table.dtype}",
        )
    if int(table.min()) < 0 or int(table.max()) > 2**31 - 1:
        bad = int(np.flatnonzero((table < 0) | (table > 2**31 - 1))[0])
        raise InvalidArgument(
            "no block number", field=f"{field}[{bad}]", got=int(table[bad]), expected="0 or more"
        )
    return pack_blocks(table)


def text(value: Any, field: str, longest: int, *, shortest: int = 0) -> str:
    """A string of that many characters that can be sent."""
    expected = f"text of {shortest} to {longest} characters"
    if not isinstance(value, str) or not shortest <= len(value) <= longest:
        got = f"{len(value)} characters" if isinstance(value, str) and len(value) > longest else shown(value)
        raise InvalidArgument("not such a text", field=field, got=got, expected=expected)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            "this text cannot be sent", field=field, got=shown(value), expected=f"{expected} of Unicode"
        ) from error
    return value


def request_id(request: Any) -> str:
    """The request id, if it can be one."""
    return text(request, "request", 512, shortest=1)


def ticket_text(ticket: Any) -> str:
    """The ticket of an offer, or the text of one; empty for None.  Raises `BadFrame` for a text too long."""
    if ticket is None:
        return ""
    ticket = getattr(ticket, "ticket", ticket)
    if not isinstance(ticket, str):
        raise InvalidArgument(
            "not a ticket", field="ticket", got=shown(ticket), expected="a ticket, an offer, or None"
        )
    if len(ticket) > 2048:
        raise BadFrame(
            "not a HAWK ticket",
            field="ticket",
            got=f"{len(ticket)} characters",
            expected="hawk1..., at most 2048 characters",
        )
    return text(ticket, "ticket", 2048)


def _parts(given: Sized, what: str, field: str, unit: str = "") -> None:
    """Raises `InvalidArgument` unless there are as many as a request can have parts."""
    if not 1 <= len(given) <= MOST_PARTS:
        unit = unit or what
        raise InvalidArgument(
            f"no number of {what}",
            field=field,
            got=f"{len(given)} {unit}",
            expected=f"1..{MOST_PARTS} {unit}",
        )


def ticket_texts(tickets: Any) -> list[str]:
    """The tickets of offers: of one, of a list, or none for None."""
    if isinstance(tickets, list | tuple):
        _parts(tickets, "tickets", "ticket")
        found = [ticket_text(ticket) for ticket in tickets]
        if not all(found):
            raise InvalidArgument(
                "no ticket", field=f"ticket[{found.index('')}]", got="''", expected="a ticket"
            )
        return found
    found = [ticket_text(tickets)]
    return found if found[0] else []


def source_names(source: Any) -> list[str]:
    """Names of agents: one, a list, or none for an empty text."""
    if isinstance(source, list | tuple):
        _parts(source, "sources", "source", "names")
        return [text(name, f"source[{i}]", 128, shortest=1) for i, name in enumerate(source)]
    return [text(source, "source", 128)] if source != "" else []


def count(value: Any, field: str) -> int:
    """An integer of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= int(value) < 2**48:
        raise InvalidArgument("not a count", field=field, got=shown(value), expected="an integer, 0 or more")
    return int(value)


def rank(value: Any, field: str) -> int:
    """A priority, an integer from -100 to 100."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not -100 <= int(value) <= 100:
        raise InvalidArgument("not a priority", field=field, got=shown(value), expected="-100 to 100")
    return int(value)


def consumer_names(consumers: Any) -> tuple[list[str], int]:
    """Names of consumers and how many there are; no names where only a count was given."""
    expected = f"1 to {MOST_CONSUMERS}, or the names of agents"
    if isinstance(consumers, int | np.integer) and not isinstance(consumers, bool):
        if 1 <= int(consumers) <= MOST_CONSUMERS:
            return [], int(consumers)
    elif isinstance(consumers, list | tuple) and 1 <= len(consumers) <= MOST_CONSUMERS:
        names = [text(name, f"consumers[{i}]", 128, shortest=1) for i, name in enumerate(consumers)]
        return names, len(names)
    raise InvalidArgument("no consumers", field="consumers", got=shown(consumers), expected=expected)


def small_note(note: Any) -> bytes:
    """A note that may travel with an offer."""
    if not isinstance(note, bytes | bytearray | memoryview):
        raise InvalidArgument(
            "a note is bytes", field="note", got=shown(note), expected="bytes, at most 4096"
        )
    raw = bytes(note)
    if len(raw) > 4096:
        raise InvalidArgument(
            "a note is a few bytes", field="note", got=f"{len(raw)} bytes", expected="bytes, at most 4096"
        )
    return raw


def duration(value: Any, field: str) -> float:
    """Seconds, at most `LONGEST`."""
    seconds = parse_duration(value, field=field)
    if seconds > LONGEST:
        raise InvalidArgument("too long a duration", field=field, got=shown(value), expected="at most 7 days")
    return seconds


def instance(value: Any, cls: type[T], field: str, expected: str) -> T:
    """`value`, if it is a `cls`."""
    if not isinstance(value, cls):
        raise InvalidArgument("not what belongs here", field=field, got=shown(value), expected=expected)
    return value


# -- messages that the schema refuses ----------------------------------------------------------------------


def refused_by_schema(message: msgspec.Struct, fault: str) -> InvalidArgument:
    """What the schema said about a message, told at the field that it means and with the value that is there."""
    fault = fault.removeprefix("the body cannot be decoded: ")
    found = _AT.fullmatch(fault)
    if found is None:
        return InvalidArgument("a value cannot be sent", field=type(message).__name__, expected=fault)
    value: Any = message
    path = found["path"].lstrip(".")
    with contextlib.suppress(AttributeError, LookupError, TypeError):
        for name, index in _STEP.findall(found["path"]):
            value = getattr(value, name) if name else value[int(index)]
    expected = found["what"].removeprefix("Expected ").partition(", got ")[0].replace("`", "")
    return InvalidArgument("the value is out of its bounds", field=path, got=shown(value), expected=expected)


def refused_by_encoder(message: msgspec.Struct, fault: HawkError) -> InvalidArgument:
    """The same for a message that has no bytes at all: the first field whose value cannot be written."""
    where, value = _unwritable(message, "")
    return InvalidArgument(
        "the value cannot be sent",
        field=where or type(message).__name__,
        got=shown(value),
        expected=f"numbers, bytes or text ({fault.message})",
    )


def _unwritable(value: Any, path: str) -> tuple[str, Any]:
    """The deepest part of `value` that cannot be encoded, and its path."""
    below: list[tuple[str, Any]] = []
    if isinstance(value, msgspec.Struct):
        below = [
            (f"{path}.{name}" if path else name, getattr(value, name)) for name in value.__struct_fields__
        ]
    elif isinstance(value, list | tuple):
        below = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    elif isinstance(value, dict):
        below = [(f"{path}.{key}", item) for key, item in value.items()]
    for where, item in below:
        try:
            msgspec.msgpack.encode(item)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
            return _unwritable(item, where)
    return path, value
