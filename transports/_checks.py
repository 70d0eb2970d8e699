"""Checks that the settings of the built-in transports share."""

from __future__ import annotations

from typing import Protocol

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


def choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises `InvalidArgument` for what is none of the choices."""
    if value not in choices:
        raise InvalidArgument("no such choice", field=field, got=repr(value), expected=" or ".join(choices))


def setting(field: str, entry: str) -> None:
    """Raises `InvalidArgument` unless `entry` is a NAME=VALUE that a list separated by commas can carry."""
    name, _, value = entry.partition("=")
    if not name.replace("_", "").isalnum() or not value or "," in value or name.upper().startswith("UCX_"):
        raise InvalidArgument(
            "not a setting",
            field=field,
            got=repr(entry),
            expected='"NAME=VALUE", without UCX_ and without commas',
        )


class _Listens(Protocol):
    """What every transport that listens on TCP has among its settings."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def advertise(self) -> str: ...


def listens(table: str, config: _Listens) -> None:
    """Raises `InvalidArgument` for a place to listen at that is none, or one that peers cannot be told of."""
    whole(f"{table}.port", config.port, 0, 65535)
    if not config.host:
        raise InvalidArgument("empty", field=f"{table}.host", expected="an address to listen on")
    if config.host in ("0.0.0.0", "::", "*") and not config.advertise:
        raise InvalidArgument(
            "peers need an address to connect to",
            field=f"{table}.advertise",
            expected=f"a host name or address of this machine, since {table}.host is {config.host}",
        )


def engine(table: str, config: _Listens) -> None:
    """The checks of what every transport on a foreign engine has among its settings, in `[transport.NAME]`."""
    for name, low, high in (
        ("chunk", 4096, 1 << 30),
        ("piece", 4096, 1 << 40),
        ("gather", 0, 1 << 30),
        ("max_connections", 1, 65536),
    ):
        whole(f"{table}.{name}", getattr(config, name), low, high)
    for name in ("grace", "drain_timeout", "handshake_timeout", "connect_timeout"):
        seconds(f"{table}.{name}", getattr(config, name))
    listens(table, config)
