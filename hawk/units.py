"""Durations, sizes and rates as people write them: `"30s"`, `"150ms"`, `"64MiB"`, `"1GB"`, `"25GB/s"`, `"200Gb/s"`.

A leaf module.  `Duration`, `Size`, `Rate` and `Address` mark the fields of configuration dataclasses; to a type checker
they are plain `float` (seconds), `int` (bytes), `float` (bytes a second) and `int` (bytes).
"""

from __future__ import annotations

import math
import re
from typing import Annotated, TypeAlias

from hawk.errors import InvalidArgument

Duration: TypeAlias = Annotated[float, "duration"]
"""Seconds; written with a unit in configuration."""

Size: TypeAlias = Annotated[int, "size"]
"""Bytes; written with a unit, or as a plain number of bytes, in configuration."""

Rate: TypeAlias = Annotated[float, "rate"]
"""Bytes a second; written with a unit, or as a plain number, in configuration."""

Address: TypeAlias = Annotated[int, "address"]
"""Where a byte is; a number, which is shown as hexadecimal, or a size, in configuration."""

DURATION_EXPECTED = 'a duration with a unit: "150ms", "30s", "2m", "1h"'
SIZE_EXPECTED = 'a size: "64MiB", "1GB", or a whole number of bytes'
RATE_EXPECTED = 'a rate: bytes as "25GB/s" or "25GiB/s", bits as "200Gb/s" or "200Gbit/s"'
ADDRESS_EXPECTED = "an address: 0x100080, or a whole number of bytes"

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-zµ]*)\s*", re.ASCII)
_HEX = re.compile(r"\s*0[xX]([0-9a-fA-F]{1,16})\s*", re.ASCII)
_RATE = re.compile(
    r"\s*(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<scale>[kKmMgGtT]?i?)(?P<unit>B|b|[bB]its?)?\s*(?P<per>/s|ps)?\s*",
    re.ASCII,
)
_SECONDS = {
    "us": 1,
    "ms": 10**3,
    "s": 10**6,
    "m": 60 * 10**6,
    "min": 60 * 10**6,
    "h": 3600 * 10**6,
    "d": 86400 * 10**6,
}
"""Microseconds: that "50us" is the very 50e-6 that a program says takes a division."""
_DECIMAL = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_BYTES = _DECIMAL | _BINARY
_LARGEST_SIZE = 1 << 62
_FASTEST = 1e15


def parse_duration(value: object, field: str | None = None) -> float:
    """Seconds, from text with a unit (us, ms, s, m, h, d) or from a number of seconds.

    Text without a unit is refused, but for `"0"`: a reader cannot tell seconds from milliseconds there.
    Raises `InvalidArgument` naming `field` for anything that is not a finite duration of zero or more.
    """
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
    elif isinstance(value, str) and (match := _NUMBER.fullmatch(value)):
        number, unit = match.groups()
        if unit in _SECONDS:
            seconds = float(number) * _SECONDS[unit] / 1e6
        elif not unit and float(number) == 0:
            seconds = 0.0
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidArgument("not a duration", field=field, got=repr(value), expected=DURATION_EXPECTED)
    return seconds


def parse_size(value: object, field: str | None = None) -> int:
    """Bytes, from text (B, KB, MB, GB, TB in powers of 1000; KiB, MiB, GiB, TiB in powers of 1024) or an int.

    Upper and lower case are the same here: nobody means bits.  Raises `InvalidArgument` naming `field` for
    anything that is not a whole number of bytes from 0 to 2**62.
    """
    nbytes = -1
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    elif isinstance(value, str) and (match := _NUMBER.fullmatch(value)):
        number, unit = match.groups()
        scale = _BYTES.get(unit.lower() or "b")
        if scale is not None:
            whole, _, fraction = number.partition(".")
            scaled, rest = divmod(int((whole or "0") + fraction) * scale, 10 ** len(fraction))
            nbytes = scaled if rest == 0 else -1
    if not 0 <= nbytes <= _LARGEST_SIZE:
        raise InvalidArgument("not a size", field=field, got=repr(value), expected=SIZE_EXPECTED)
    return nbytes


def parse_address(value: object, field: str | None = None) -> int:
    """An address, from text in hexadecimal (`"0x100080"`), or from anything that is a size.

    Raises `InvalidArgument` naming `field` for anything that is not a whole number from 0 to 2**62.
    """
    match = _HEX.fullmatch(value) if isinstance(value, str) else None
    try:
        return parse_size(int(match[1], 16) if match else value)
    except InvalidArgument:
        raise InvalidArgument(
            "not an address", field=field, got=repr(value), expected=ADDRESS_EXPECTED
        ) from None


def parse_rate(value: object, field: str | None = None) -> float:
    """Bytes a second, from text in bytes (`"25GB/s"`, `"25GiB/s"`, `"25GB"`) or bits (`"200Gb/s"`, `"200Gbps"`,
    `"200 gbit/s"`), or from a number of bytes a second.

    Text without a unit is refused, but for `"0"`, and so is one of small letters only (`"200gb/s"`): links are sold in
    bits, memory in bytes, and a reader cannot tell which is meant.
    Raises `InvalidArgument` naming `field` for anything that is not a rate of zero or more and below 10**15.
    """
    rate = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        rate = float(value) if abs(value) < _FASTEST else math.inf
    elif isinstance(value, str) and (match := _RATE.fullmatch(value)):
        rate = float(match["number"]) * _rate_scale(match)
    if not 0 <= rate < _FASTEST:
        raise InvalidArgument("not a rate", field=field, got=repr(value), expected=RATE_EXPECTED)
    return rate


def _rate_scale(match: re.Match[str]) -> float:
    """Bytes a second that a rate's unit is; NaN where it is none or may mean bits as well as bytes."""
    scale, unit = match["scale"], match["unit"]
    if unit is None:
        return 1.0 if not scale and not match["per"] and float(match["number"]) == 0 else math.nan
    if unit == "b" and (not match["per"] or not scale[:1].isupper()):
        return math.nan
    return _BYTES.get(f"{scale.lower()}b", math.nan) / (1 if unit == "B" else 8)


def kind_of(value: object) -> str:
    """What text with a unit is, whatever was asked for: `"a duration"`, `"a size"`, `"a rate"`; else empty."""
    text = value.strip() if isinstance(value, str) else ""
    match = _NUMBER.fullmatch(text.removesuffix("/s"))
    unit = match[2] if match else ""
    if unit in _SECONDS and not text.endswith("/s"):
        return "a duration"
    if unit.lower() in _BYTES:
        return "a rate" if text.endswith("/s") else "a size"
    rate = _RATE.fullmatch(text)
    return "a rate" if rate and not math.isnan(_rate_scale(rate)) and rate["unit"] else ""


def format_duration(seconds: float) -> str:
    """The duration as text that `parse_duration` reads back to the same number: `30.0` gives `"30s"`."""
    if seconds == 0:
        return "0s"
    for unit, scale in (("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= scale and seconds % scale == 0:
            return f"{int(seconds // scale)}{unit}"
    for unit, scale in (("s", 1), ("ms", 10**3), ("us", 10**6)):
        text = f"{_plain(seconds * scale)}{unit}"
        if seconds * scale >= 1 and parse_duration(text) == seconds:
            return text
    return f"{_plain(seconds)}s"


def format_size(nbytes: int) -> str:
    """The size as text that `parse_size` reads back to the same number: `1 << 26` gives `"64MiB"`."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale and nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if nbytes >= scale and nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
    return f"{nbytes}B"


def format_rate(rate: float) -> str:
    """The rate as text that `parse_rate` reads back to the same number: `25e9` gives `"25GB/s"`."""
    return f"{format_size(int(rate)) if rate == int(rate) else _plain(rate) + 'B'}/s"


def approximate_size(nbytes: float) -> str:
    """The size to three digits, for people: `1_234_567` gives `"1.18 MiB"`.  Not meant to be read back."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= scale:
            return (
                f"{nbytes / scale:.3g} {unit}"
                if abs(nbytes) < 1000 * scale
                else f"{nbytes / scale:.0f} {unit}"
            )
    return f"{nbytes:.0f} B"


def _plain(number: float) -> str:
    """Shortest digits that read back to the same number, never with an exponent."""
    text = repr(float(number))
    if "e" in text or "E" in text:
        text = f"{number:.20f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
