"""Figures, tables and inputs of the report, as plain data: what plots, the page and the CSV files are made from."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from hawk.errors import InvalidArgument


class Origin(Enum):
    """Where a number comes from; the value is how the report says it."""

    HERE = "measured here"
    ELSEWHERE = "measured elsewhere"
    PAPER = "paper"
    ASSUMED = "assumed"
    SIMULATED = "simulated"

    @property
    def measured(self) -> bool:
        """Whether somebody's clock has seen it in a run of HAWK."""
        return self in (Origin.HERE, Origin.ELSEWHERE)


Value: TypeAlias = float | int | str | None
Form: TypeAlias = Literal["lines", "points", "bars", "key"]

REPLAYED = frozenset({"fragmentation"})
"""Benchmarks that replay a run on an allocator: no clock has a part in what they find."""

ORIGIN = "origin"
"""The column of a table whose cells say where their rows are from."""

_SLUG = re.compile(r"[a-z0-9][a-z0-9-]*")


def _named(name: str) -> None:
    if not _SLUG.fullmatch(name):
        raise InvalidArgument(
            "no name for a file", field="name", got=name, expected="small letters, digits, -"
        )


@dataclass(frozen=True)
class Axis:
    """One axis: `label` and `unit` as they are shown, `column` as the CSV calls it.

    names    what stands at 0, 1, 2 ... where the axis has no numbers
    """

    label: str
    unit: str
    column: str
    log: bool = False
    names: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """The label with its unit."""
        return f"{self.label}, {self.unit}" if self.unit else self.label


@dataclass(frozen=True)
class Point:
    """`low` and `high` are the ends of the spread, where one was seen."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        for name in ("x", "y", "low", "high"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise InvalidArgument(
                    "no place on an axis", field=name, got=value, expected="a finite number"
                )


@dataclass(frozen=True)
class Series:
    """Points that belong together.

    way       the configuration; colour follows from it, and markers and lines from it and from `origin`
    source    the file, or the words, that say where the points are from
    """

    label: str
    way: str
    origin: Origin
    source: str
    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        if self.origin is Origin.ASSUMED:
            raise InvalidArgument(
                "nothing assumed is drawn", field="origin", got=self.origin.value, expected="any other"
            )

    @property
    def told(self) -> str:
        """The label with where the points come from, which no legend leaves out."""
        return f"{self.label} ({self.origin.value})"


@dataclass(frozen=True)
class Line:
    """A line across a panel at `at` of the upright axis, such as an SLO."""

    label: str
    at: float


@dataclass(frozen=True)
class Panel:
    """One plot."""

    title: str
    series: tuple[Series, ...]
    lines: tuple[Line, ...] = ()
    y: Axis | None = None
    """In place of the figure's own."""


@dataclass(frozen=True)
class Figure:
    """Panels that share their axes; `name` is that of the CSV file, `caption` what a reader has to know.

    form    points joined by lines, points alone, bars, or the page's own key
    """

    name: str
    title: str
    caption: str
    x: Axis
    y: Axis
    panels: tuple[Panel, ...]
    form: Form = "lines"

    def __post_init__(self) -> None:
        _named(self.name)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Of its series, each once."""
        return tuple(dict.fromkeys(s.origin for panel in self.panels for s in panel.series))

    def rows(self) -> tuple[list[str], list[list[Value]]]:
        """Head and rows of its CSV: every point, and every line."""
        head = ["panel", "series", "configuration", "origin", "source"]
        head += [self.x.column, "measure", "value", "low", "high"]
        rows: list[list[Value]] = []
        for panel in self.panels:
            measure = (panel.y or self.y).column
            for one in panel.series:
                about = [panel.title, one.label, one.way, one.origin.value, one.source]
                rows += [[*about, p.x, measure, p.y, p.low, p.high] for p in one.points]
            rows += [
                [panel.title, line.label, "", "", "", None, measure, line.at, None, None]
                for line in panel.lines
            ]
        return head, rows

    def _at(self, x: float) -> str:
        return self.x.names[int(x)] if self.x.names else f"{x:g} {self.x.unit}".strip()

    def described(self) -> str:
        """What the figure shows in words, for those who do not see it."""
        parts = []
        for panel in self.panels:
            y = panel.y or self.y
            for one in panel.series:
                if one.points:
                    first, last = one.points[0], one.points[-1]
                    parts.append(
                        f"{panel.title}: {one.told}, {y.told} from {first.y:.4g} at {self._at(first.x)} "
                        f"to {last.y:.4g} at {self._at(last.x)}"
                    )
            parts += [f"{panel.title}: a line at {line.at:g}, {line.label}" for line in panel.lines]
        return f"{self.title}. " + "; ".join(parts) + "."


@dataclass(frozen=True)
class Column:
    """A table's column.

    form      a format for numbers, or "digits" for four significant ones without an exponent
    origin    where all of its numbers come from, if from one
    right     whether it stands to the right as numbers do; those with a form always
    """

    title: str
    column: str
    form: str = ""
    origin: Origin | None = None
    right: bool = False

    def shown(self, value: Value) -> str:
        """The value as the page shows it."""
        if value is None:
            return ""
        if isinstance(value, str) or not self.form:
            return str(value)
        if self.form == "digits":
            return f"{float(f'{value:.4g}'):z,.15g}"
        if self.form.endswith("d"):
            return format(value, self.form)
        # What rounds to nothing has no sign of its own.
        sign = self.form[0] if self.form[0] in "+- " else ""
        return format(value, f"{sign}z{self.form[len(sign) :]}")


@dataclass(frozen=True)
class Table:
    """A table; `name` is that of the CSV file.  Every row has a value, or None, for each column."""

    name: str
    title: str
    caption: str
    columns: tuple[Column, ...]
    body: tuple[tuple[Value, ...], ...]

    def __post_init__(self) -> None:
        _named(self.name)
        for row in self.body:
            if len(row) != len(self.columns):
                raise InvalidArgument(
                    "a row that does not fit", field=self.name, got=len(row), expected=len(self.columns)
                )

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Of its columns, and of those cells that say one, each once."""
        by_text: dict[Value, Origin] = {origin.value: origin for origin in Origin}
        said = [c.origin for c in self.columns if c.origin is not None]
        for at, column in enumerate(self.columns):
            if column.column == ORIGIN:
                said += [by_text[row[at]] for row in self.body]
        return tuple(dict.fromkeys(said))

    def rows(self) -> tuple[list[str], list[list[Value]]]:
        """Head and rows of its CSV."""
        return [c.column for c in self.columns], [list(row) for row in self.body]


@dataclass(frozen=True)
class Input:
    """Something that the report's numbers follow from.

    origin    where it comes from; nothing simulated is an input, but a file of a benchmark that replays
    source    the file, the section, or the reason why it is assumed
    how       how it was had from there: stated or solved, timed or replayed, assumed or chosen
    """

    group: str
    name: str
    value: str
    origin: Origin
    source: str
    how: str = ""

    def __post_init__(self) -> None:
        if self.origin is Origin.SIMULATED and not self.how.startswith("replayed"):
            raise InvalidArgument(
                "nothing simulated is an input", field=self.name, got=self.origin.value, expected="any other"
            )
        if not self.source:
            raise InvalidArgument("an input without a source", field=self.name, got="nothing", expected="one")


@dataclass(frozen=True)
class Absent:
    """What this machine could not run, and why."""

    what: str
    why: str


@dataclass
class Section:
    """A part of the report: words, then figures and tables in order."""

    title: str
    words: list[str] = field(default_factory=list)
    items: list[Figure | Table] = field(default_factory=list)


@dataclass
class Report:
    """The whole of it; `summary` are plain sentences."""

    title: str
    machine: str
    date: str
    summary: list[str] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)

    def items(self) -> list[Figure | Table]:
        """Every figure and table, in order."""
        return [item for section in self.sections for item in section.items]


def inputs_table(inputs: list[Input]) -> Table:
    """The inputs as a table, one row each."""
    columns = tuple(Column(t, t) for t in ("group", "input", "value", "origin", "how", "source"))
    rows = tuple((i.group, i.name, i.value, i.origin.value, i.how, i.source) for i in inputs)
    return Table(
        "inputs",
        "What the numbers follow from",
        "Every input, and where it comes from.",
        columns,
        rows,
    )
