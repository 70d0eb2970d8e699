"""Bounds of the numbers in a declaration, and errors that name them."""

from __future__ import annotations

from hawk.errors import LayoutError

MAX_CHANNELS = 65536
MAX_ALIGN = 2**30
BYTES = "bytes as an integer"


def short(value: object, limit: int = 64) -> str:
    """`value` for a message, whatever a peer sent: bounded in length and without control characters."""
    try:
        return repr(value)[:limit]
    except (ValueError, RecursionError):  # more than 4300 digits, or nested too deep
        return f"a {type(value).__name__} too large to show"


def bounded(value: object, limit: int, where: str, what: str = "an integer") -> int:
    """`value` if it is an integer in 1..limit; else `LayoutError` naming `where`."""
    expected = f"{what} in 1..{limit}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise LayoutError("of the wrong kind", field=where, got=short(value), expected=expected)
    if not 1 <= value <= limit:
        raise LayoutError("out of range", field=where, got=short(value), expected=expected)
    return value


def moved_error(error: LayoutError, old: str, new: str) -> LayoutError:
    """The error with its field `old...` as `new...`: what is compiled as a layout of its own is a table of another."""
    at = error.field or ""
    at = new + at.removeprefix(old) if at.startswith(old) else at
    return LayoutError(error.message, field=at, got=error.got, expected=error.expected, hint=error.hint)
