"""The page: it stands alone, every figure has its CSV, every input its mark, and nothing simulated looks measured."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hawk.bench import fragmentation
from hawk.evaluate import output, plots, sources
from hawk.evaluate.records import Absent, Figure, Input, Origin, Report, Series
from hawk.evaluate.run import Options, assemble
from tests.unit.evaluate import made

VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}


class Page(HTMLParser):
    """Tags with their attributes, and whether all that were opened are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def report() -> Report:
    """Something of every kind: measured here and elsewhere, simulated, and reality."""

    def source(tree: dict[str, Any], origin: Origin, name: str) -> sources.Source:
        return sources.source(json.loads(json.dumps(tree)), Path(name), origin, name)

    here = [
        source(made.between(devices="host,host"), Origin.HERE, "measured/between.json"),
        source(fragmentation.run(capacity=1 << 30).to_dict(), Origin.HERE, "measured/fragmentation.json"),
    ]
    elsewhere = [
        source(made.between(), Origin.ELSEWHERE, "two-gpus.json"),
        source(made.load(), Origin.ELSEWHERE, "<b>load</b>.json"),
    ]
    absent = [Absent("a <script>", "there is none & never was")]
    return assemble(here, elsewhere, absent, made.simulated(), Options(Path("out"), quick=True))


@pytest.fixture(scope="module")
def written(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    output.write(folder, report, {"seed": 0})
    return folder


@pytest.fixture(scope="module")
def text(written: Path) -> str:
    return (written / output.PAGE).read_text()


@pytest.fixture(scope="module")
def found(text: str) -> Page:
    return Page(text)


def test_it_needs_nothing_but_itself(text: str, found: Page) -> None:
    assert "://" not in text
    for tag in ("script", "link", "img", "iframe", "object", "embed", "image", "foreignobject"):
        assert found.of(tag) == []
    assert "@import" not in text
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", text))
    for _, attributes in found.tags:
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)


def test_every_link_leads_somewhere(written: Path, found: Page) -> None:
    ids = {attributes["id"] for _, attributes in found.tags if "id" in attributes}
    links = [a["href"] for a in found.of("a")]
    assert links
    for link in links:
        assert link[1:] in ids if link.startswith("#") else (written / link).is_file()
    for use in found.of("use"):
        assert use["href"][1:] in ids


def test_no_two_things_have_one_id(found: Page) -> None:
    counted = Counter(attributes["id"] for _, attributes in found.tags if "id" in attributes)
    assert [name for name, count in counted.items() if count > 1] == []


def test_every_figure_and_table_has_its_csv(report: Report, written: Path, found: Page) -> None:
    links = {a["href"] for a in found.of("a")}
    names = [one.name for one in report.items()] + ["inputs"]
    assert {"figure-9-here", "figure-10", "figure-11", "figure-12", "figure-13", "table-8", "table-9"} <= set(
        names
    )
    for name in names:
        assert f"{name}.csv" in links
        with (written / f"{name}.csv").open(newline="") as file:
            head, *rows = csv.reader(file)
        assert rows
        assert all(len(row) == len(head) for row in rows)
    assert len(found.of("figure")) == sum(isinstance(one, Figure) for one in report.items())


def test_every_drawing_is_told_in_words(found: Page) -> None:
    ids = {attributes["id"] for _, attributes in found.tags if "id" in attributes}
    drawings = found.of("svg")
    assert len(drawings) == len(found.of("figure")) + 1  # and the key
    for drawing in drawings:
        assert drawing["role"] == "img"
        assert set(drawing["aria-labelledby"].split()) <= ids


def test_what_comes_from_outside_is_text(text: str) -> None:
    assert "a <script>" not in text
    assert "a &lt;script&gt;" in text
    assert "<b>load" not in text


def test_a_column_called_as_what_its_numbers_are_is_called_so_once(text: str) -> None:
    heads = re.findall(r"<th[^>]*>(.*?)</th>", text)
    assert '<span class="tag paper">paper</span>' in heads
    assert not [head for head in heads if re.match(r"(paper|simulated)<br>", head)]


def test_every_input_has_a_mark_and_a_source(report: Report, written: Path) -> None:
    with (written / "inputs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(report.inputs) > 30
    marks = {"measured here", "measured elsewhere", "paper", "assumed"}
    replayed = [row for row in rows if row["how"].startswith("replayed")]
    assert {row["origin"] for row in rows if row not in replayed} == marks
    assert [(row["input"], row["origin"]) for row in replayed] == [("fragmentation", "simulated")]
    # What the paper states, and what was solved from that, do not read alike.
    assert {row["how"] for row in rows if row["origin"] == "paper"} == {"stated", "solved from the paper"}
    assert all(row["source"] and row["value"] for row in rows)
    assert all(isinstance(one, Input) for one in report.inputs)


def test_every_axis_is_named_with_its_unit(report: Report) -> None:
    for one in report.items():
        if isinstance(one, Figure):
            for axis in (one.x, *(panel.y or one.y for panel in one.panels)):
                assert axis.label
                assert axis.unit or axis.names or axis.column in ("ratio", "channel")


def test_sizes_stand_on_a_logarithmic_axis(report: Report) -> None:
    by_size = [one for one in report.items() if isinstance(one, Figure) and one.x.unit == "MB"]
    assert len(by_size) >= 4
    assert all(one.x.log for one in by_size)


def lines_of(one: Series) -> tuple[bool, bool]:
    """Whether the series alone is drawn with broken lines, and with hollow markers."""
    from hawk.evaluate.records import Axis, Panel

    axis = Axis("a", "b", "c")
    drawn = plots.svg(Figure("alone", "", "", axis, axis, (Panel("", (one,)),)))
    markers = re.findall(r'<use [^>]*style="([^"]*)"', drawn)
    assert markers
    return "stroke-dasharray" in drawn, all(
        "fill: #ffffff" in style for style in markers if "stroke: #009e73" in style
    )


def test_drawn_simulated_series_are_broken_and_hollow() -> None:
    (first, *_) = [s for s in made.simulated().latencies if s.way == "gn-hawk"]
    assert lines_of(first) == (True, True)
    measured = Series(first.label, first.way, Origin.HERE, first.source, first.points)
    assert lines_of(measured) == (False, False)


def test_the_summary_says_what_stood_in_for_what(report: Report) -> None:
    told = " ".join(report.summary)
    assert "memory of this host in place of both devices" in told
    assert "runs out of memory" in told
    assert "GN-Host never (paper: never)" in told
    assert "not every percentile" in told
    assert "no measurement" in told


def test_the_same_figure_is_the_same_drawing(report: Report, text: str) -> None:
    (one,) = [o for o in report.items() if o.name == "figure-9-here"]
    assert isinstance(one, Figure)
    assert plots.svg(one) in text


def test_the_figure_of_reality_has_both_kinds(report: Report) -> None:
    (one,) = [o for o in report.items() if o.name == "reality"]
    assert isinstance(one, Figure)
    assert {o.value for o in one.origins} == {"measured elsewhere", "simulated"}
    (table,) = [o for o in report.items() if o.name == "reality-table"]
    assert [row[-1] for row in table.rows()[1]] == ["yes", "no", "no"]
