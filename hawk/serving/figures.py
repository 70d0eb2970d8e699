"""Numbers that say where they are from: each has a unit, a mark and a source."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from hawk.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

Mark = Literal["measured", "paper", "assumed"]
MARKS: tuple[Mark, ...] = get_args(Mark)
MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and where it is from.

    mark         `measured` by HAWK's own benchmarks, stated by (or solved from) the `paper`, or `assumed`
    source       in words: which table, which run, which data sheet
    low, high    between which values a calibration may choose; None where it is not chosen
    """

    value: float
    unit: str
    mark: Mark
    source: str
    low: float | None = None
    high: float | None = None

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        bounds = {} if self.low is None else {"low": self.low, "high": self.high}
        return {"value": self.value, "unit": self.unit, "mark": self.mark, "source": self.source} | bounds


def number(value: object, field: str, low: float = 0.0, high: float = math.inf) -> float:
    """The value as a finite number in `[low, high]`; raises `InvalidArgument` naming `field`."""
    found = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:  # a whole number with hundreds of digits
            found = math.inf
    if not math.isfinite(found) or not low <= found <= high:
        upto = "or more" if high == math.inf else f"to {high:g}"
        got = str(value)[:200]
        raise InvalidArgument("not such a number", field=field, got=got, expected=f"{low:g} {upto}")
    return found


def figure(table: object, field: str, unit: str = "") -> Figure:
    """A figure of a table `{value, unit, mark, source, low, high}`; raises `InvalidArgument` naming `field`.

    Values are in `unit`: a table that says another is refused, not converted.
    """
    known = ("value", "unit", "mark", "source", "low", "high")
    if not isinstance(table, dict):
        raise InvalidArgument("a figure is a table", field=field, got=table, expected=", ".join(known[:4]))
    for key in table:
        if key not in known:
            raise InvalidArgument("unknown key", field=f"{field}.{key}"[:200], expected=", ".join(known))
    value = number(table.get("value"), f"{field}.value")
    if unit and table.get("unit", unit) != unit:
        raise InvalidArgument(
            "this figure has another unit", field=f"{field}.unit", got=str(table["unit"])[:200], expected=unit
        )
    mark, source = table.get("mark"), table.get("source")
    if mark not in MARKS:
        raise InvalidArgument("unknown mark", field=f"{field}.mark", got=mark, expected=" or ".join(MARKS))
    if not isinstance(source, str) or not source:
        raise InvalidArgument(
            "every figure says where it is from", field=f"{field}.source", got=source, expected="a text"
        )
    low, high = (
        None if (bound := table.get(key)) is None else number(bound, f"{field}.{key}")
        for key in ("low", "high")
    )
    if (low is None) != (high is None) or (low is not None and high is not None and not low <= value <= high):
        raise InvalidArgument(
            "the value lies outside its bounds", field=field, got=value, expected=f"{low} to {high}"
        )
    return Figure(value, str(table.get("unit", unit)), mark, source, low, high)


def figures(
    tables: object, field: str, units: Mapping[str, str], *, all_of: bool = True
) -> dict[str, Figure]:
    """The figures of a table by name: those of `units` and no others, every one of them if `all_of`."""
    if not isinstance(tables, dict):
        raise InvalidArgument(
            "figures by name are needed", field=field, got=tables, expected=", ".join(units)
        )
    for name in tables:
        if name not in units:
            raise InvalidArgument("unknown figure", field=f"{field}.{name}"[:200], expected=", ".join(units))
    for name in units:
        if all_of and name not in tables:
            raise InvalidArgument("this figure is missing", field=f"{field}.{name}", expected=units[name])
    return {name: figure(tables[name], f"{field}.{name}", units[name]) for name in units if name in tables}


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file says; raises `InvalidArgument` naming the file."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise InvalidArgument("the file is too large", field=str(path), expected=f"{MOST_BYTES} bytes")
        return tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        raise InvalidArgument("cannot read this file", field=str(path), got=error.strerror) from error
    except ValueError as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument("the file cannot be read", field=str(path), got=str(error)[:200]) from None


def shipped(folder: str) -> list[str]:
    """Names of the files of `hawk/serving/FOLDER`, without their ending, sorted."""
    found = resources.files("hawk.serving").joinpath(folder).iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in found if entry.name.endswith(".toml"))


def read_shipped(folder: str, what: str, name_or_path: str | Path) -> tuple[dict[str, Any], str]:
    """The shipped table of that name, or that of a `.toml` file, and what to call it in errors."""
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".toml"):
        return read_toml(Path(text)), text
    if text not in shipped(folder):
        raise InvalidArgument(
            f"unknown {what}",
            field=what,
            got=text[:200],
            expected="one of " + ", ".join(shipped(folder)),
            hint="A file of one's own is named by a path that ends in .toml",
        )
    raw = resources.files("hawk.serving").joinpath(f"{folder}/{text}.toml").read_text(encoding="utf-8")
    return tomllib.loads(raw), text
