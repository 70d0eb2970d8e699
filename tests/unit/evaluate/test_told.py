"""What the summary says of figures from files, which may be anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hawk.evaluate import here, plots, reality, sources, told, transfers
from hawk.evaluate.records import Origin, Table
from tests.unit.evaluate import made


def source(tree: dict[str, Any], name: str = "figures.json") -> sources.Source:
    return sources.source(json.loads(json.dumps(tree)), Path(name), Origin.ELSEWHERE, name)


def said(*found: sources.Source) -> str:
    return "\n".join(told.summary([], found, made.simulated(), quick=False))


@pytest.mark.parametrize(("factor", "words"), [(1.0, "not every"), (1.15, "every")])
def test_whether_a_model_holds_follows_from_its_numbers(factor: float, words: str) -> None:
    tree = made.load()
    for one in tree["rates"][0]["compared"]:
        one["predicted"] = one["measured"] * (factor if factor > 1 else 2.0)
    del tree["rates"][1:]
    assert f"'alone' foretold {words} percentile" in said(source(tree | {"holds": {"alone": factor == 1.0}}))


def test_a_rate_at_which_nothing_could_be_compared_is_missed() -> None:
    tree = made.load()
    for one in tree["rates"][0]["compared"]:
        one["predicted"] = one["measured"]
    assert "'alone' foretold not every percentile" in said(source(tree))


def test_a_pair_that_answered_nothing_is_not_passed_over() -> None:
    tree = made.load()
    tree["rates"] = tree["rates"][1:]
    assert "too few requests" in said(source(tree))


def test_long_times_have_no_exponent() -> None:
    tree = made.between()
    for size in tree["sizes"]:
        size["ways"]["GN-Host"]["host"] = made.sample(123.4567)
        size["ways"]["GN-HAWK"]["paced"] = made.sample(0.5)
    text = said(source(tree))
    assert "GN-Host 123,457 ms" in text
    assert "takes 247 times" in text


def test_ways_whose_runs_overlap_are_not_compared() -> None:
    tree = made.between()
    for size in tree["sizes"]:
        size["ways"]["GN-Host"]["host"] = {"seconds": 0.20, "fastest": 0.10, "slowest": 0.30}
        size["ways"]["GN-HAWK"]["paced"] = {"seconds": 0.09, "fastest": 0.08, "slowest": 0.11}
    text = said(source(tree))
    assert "times as long" not in text
    assert "GN-HAWK 90 ms (80 to 110)" in text
    assert "within the spread of their runs" in text
    for size in tree["sizes"]:
        size["ways"]["GN-HAWK"]["paced"]["slowest"] = 0.099
    assert "takes 2.2 times as long" in said(source(tree))


def test_how_many_runs_a_sentence_stands_on_is_said() -> None:
    assert "median of 5 runs" in said(source(made.between()))
    assert "one run of each, which has no spread" in said(source(made.between(runs=1)))


def test_a_straw_man_is_said() -> None:
    assert "too kind" not in said(source(made.between()))
    tree = made.between()
    tree["sizes"][-1]["naive_ratio"] = {"sockets": 0.9, "tile": 0.55}
    assert "tile at 0.55, below 0.8" in said(source(tree))


@pytest.mark.parametrize(("load", "busy"), [(0.0, False), (1e4, True)])
def test_a_busy_machine_is_said(load: float, busy: bool) -> None:
    found = source(made.between())
    text = "\n".join(told.summary([found], [], made.simulated(), quick=False, load=load))
    assert ("busy" in text) == busy
    assert "busy" not in "\n".join(told.summary([], [found], made.simulated(), quick=False, load=load))


def test_the_replay_is_pointed_to_only_where_it_is() -> None:
    (figure,) = transfers.section([source(made.between())]).items[:1]
    assert "below" not in figure.caption
    assert "below" in transfers.latency(source(made.between()), "a", "A", buffer=True).caption


def test_two_files_of_one_machine_are_two_in_the_legend() -> None:
    figure = transfers.ratios([source(made.between(), "a.json"), source(made.between(), "b.json")])
    labels = [one.told for one in figure.panels[0].series]
    assert len(set(labels)) == len(labels) == 3


@pytest.mark.parametrize("name", ["_x", "$", r"$\frac{$ and $\nosuch$", "a" * 5000, "<b>&amp;"])
def test_a_name_is_drawn_as_it_is_whatever_it_has_in_it(name: str) -> None:
    text = plots.svg(transfers.ratios([source(made.between(names=[name, name]))]))
    assert "(measured elsewhere)" in text.partition("</desc>")[2]
    assert "<b>" not in text
    assert "a" * 100 not in text.partition("</desc>")[2]


def test_sizes_that_a_benchmark_left_out_are_said() -> None:
    tree = {
        "benchmark": "transfer",
        "runs": 1,
        "sizes": [],
        "left_out": [{"asked": 10**9, "reason": "no room"}],
    }
    (one,) = here.left_out(source(tree))
    assert ("1000 MB" in one.what, one.why) == (True, "no room")
    assert here.left_out(source(made.between())) == []


def test_a_rate_at_which_too_many_failed_has_its_row() -> None:
    tree = made.load()
    tree["rates"][1]["requests"] = [{"error": "503"}, {}, {"error": "503"}]
    tree["rates"][1]["fetched"] = 1
    (section,) = reality.sections([source(tree)])
    (table,) = [item for item in section.items if isinstance(item, Table)]
    head, rows = table.rows()
    found = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row["failed"] for row in found] == [0, 0, 2]
    last = found[-1]
    assert (last["requests"], last["fetched"], last["percentile"], last["within"]) == (3, 1, "none", "no")
