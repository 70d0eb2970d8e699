"""Checks that the settings of the built-in transports share."""

from __future__ import annotations

from hawk.errors import InvalidArgument

TOKEN_BYTES = 16
"""Bytes of the token by which a transport's server admits a connection."""


def whole(field: str, value: object, low: int, high: int) -> None:
    """Raises `InvalidArgument` unless `value` is an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgument(
            "out of range", field=field, got=repr(value), expected=f"a whole number {low}..{high}"
        )


def seconds(field: str, value: object) -> None:
    """Raises `InvalidArgument` unless `value` is a positive, finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise InvalidArgument("not a duration", field=field, got=repr(value), expected="seconds above 0")


def token_of(text: str) -> bytes | None:
    """The bytes that an endpoint's token spells in hex, or None."""
    try:
        token = bytes.fromhex(text)
    except ValueError:
        return None
    return token if len(token) == TOKEN_BYTES else None


def number_of(text: str) -> int:
    """The number of up to five digits that an endpoint's field spells; 0 for what is none."""
    return int(text) if len(text) <= 5 and text.isdecimal() else 0
