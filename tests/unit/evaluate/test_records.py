"""What a figure, a table and an input may be, and what their CSV says."""

import csv
import io
import itertools

import pytest

from hawk.errors import InvalidArgument
from hawk.evaluate import output
from hawk.evaluate.records import Axis, Column, Figure, Input, Line, Origin, Panel, Point, Series, Table
from hawk.evaluate.styles import style
from hawk.evaluate.transfers import NAMES

X, Y = Axis("size", "MB", "size_mb", log=True), Axis("latency", "ms", "latency_ms")


def figure(*origins: Origin) -> Figure:
    series = tuple(Series("A", "gn-hawk", o, "a file", (Point(1, 2, 1.5, 3), Point(4, 0.1))) for o in origins)
    return Figure("a-figure", "A figure", "", X, Y, (Panel("left", series, (Line("SLO", 7.0),)),))


def rows(one: Figure | Table) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(output.as_csv(one))))


def test_every_point_and_line_is_in_the_csv_with_its_origin() -> None:
    first, second, line = rows(figure(Origin.SIMULATED))
    assert first["origin"] == "simulated"
    assert (first["size_mb"], first["measure"], first["value"]) == ("1", "latency_ms", "2")
    assert (first["low"], first["high"]) == ("1.5", "3")
    assert float(second["value"]) == 0.1
    assert (second["low"], second["high"]) == ("", "")
    assert (line["series"], line["value"], line["origin"]) == ("SLO", "7.0", "")


def test_numbers_in_a_csv_are_whole() -> None:
    table = Table("t", "T", "", (Column("a", "a", ".1f"), Column("b", "b")), ((1 / 3, None),))
    (row,) = rows(table)
    assert float(row["a"]) == 1 / 3
    assert row["b"] == ""


@pytest.mark.parametrize("text", ["=1+1", "@SUM(A1)", "-x", "+x"])
def test_no_text_from_outside_is_a_formula_in_a_spreadsheet(text: str) -> None:
    (row,) = rows(Table("t", "T", "", (Column("a", "a"),), ((text,),)))
    assert row["a"] == f"'{text}"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Input("g", "n", "1", Origin.SIMULATED, "s"),
        lambda: Input("g", "n", "1", Origin.PAPER, ""),
        lambda: Series("A", "gn-hawk", Origin.ASSUMED, "s", ()),
        lambda: Point(1.0, float("nan")),
        lambda: Point(1.0, 1.0, high=float("inf")),
        lambda: Table("../up", "T", "", (), ()),
        lambda: Table("t", "T", "", (Column("a", "a"),), (("x", "y"),)),
    ],
)
def test_what_makes_no_sense_is_refused(make: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make()  # type: ignore[operator]
    assert caught.value.field
    assert caught.value.got
    assert caught.value.expected


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (".1f", -0.04, "0.0"),
        ("+.1f", -0.04, "+0.0"),
        ("+.1f", -0.06, "-0.1"),
        (",.0f", 8192, "8,192"),
        ("digits", -0.0, "0"),
        ("d", 3, "3"),
        (".1f", None, ""),
    ],
)
def test_what_rounds_to_nothing_has_no_sign(form: str, value: float | None, text: str) -> None:
    assert Column("difference", "difference", form).shown(value) == text


def test_a_legend_says_where_numbers_come_from() -> None:
    for origin in set(Origin) - {Origin.ASSUMED}:
        assert origin.value in figure(origin).panels[0].series[0].told


@pytest.mark.parametrize("way", [*NAMES, "this machine", "another machine", "first-channel", ""])
def test_nothing_simulated_looks_measured(way: str) -> None:
    looks = {origin: style(way, origin) for origin in set(Origin) - {Origin.ASSUMED}}
    simulated = looks[Origin.SIMULATED]
    for origin in (Origin.HERE, Origin.ELSEWHERE):
        assert simulated.marker != looks[origin].marker
        assert simulated.fill == "none" != looks[origin].fill
        assert simulated.line != "-" == looks[origin].line
    for one, other in itertools.combinations(looks.values(), 2):
        assert (one.marker, one.fill, one.line) != (other.marker, other.fill, other.line)


@pytest.mark.parametrize("origin", [Origin.HERE, Origin.ELSEWHERE, Origin.SIMULATED])
def test_configurations_differ_without_colour(origin: Origin) -> None:
    looks = [style(way, origin) for way in NAMES]
    assert len({look.marker for look in looks}) == len(looks)
