"""Figures from elsewhere: what is read, and how what is wrong is refused."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk.bench import fragmentation, load, load_result
from hawk.bench.samples import stamped
from hawk.errors import InvalidArgument
from hawk.evaluate import sources
from hawk.evaluate.records import Origin
from tests.unit.evaluate import made

ROOT = Path(__file__).resolve().parents[3]


def read(folder: Path, tree: Any) -> sources.Source:
    path = folder / "figures.json"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return sources.read(path, Origin.ELSEWHERE)


def test_a_file_says_what_it_is_of(tmp_path: Path) -> None:
    found = read(tmp_path, stamped("fragmentation", fragmentation.run(capacity=1 << 30).to_dict()))
    assert found.benchmark == "fragmentation"
    assert found.origin is Origin.ELSEWHERE
    assert "CPUs" in found.machine
    assert found.date.startswith("20")
    assert "figures.json" in found.told


def test_older_files_are_known_by_their_fields(tmp_path: Path) -> None:
    found = read(tmp_path, made.between())
    assert found.benchmark == "between"
    assert found.machine.startswith("2 A GPU")
    assert found.date == "date not said"
    assert read(tmp_path, fragmentation.run(capacity=1 << 30).to_dict()).benchmark == "fragmentation"


def test_what_was_measured_on_gpus_is_in_the_repository_and_is_read() -> None:
    found = sources.gather([ROOT / "docs" / "measured" / "two-h200"], Origin.ELSEWHERE)
    assert {s.benchmark for s in found} == {"between", "gpu", "overlap", "retile_cuda"}
    assert all("H200" in s.machine for s in found)


def test_what_a_pair_under_load_writes_is_read(tmp_path: Path) -> None:
    def request(first: float | None) -> load_result.Request:
        return load_result.Request(
            due=0.5, sent=0.5, first=first, last=first, input=8, output=2, error="" if first else "503"
        )

    compared = [load_result.Compared(model="alone", percentile=90, measured=0.5, predicted=0.45)]
    rates = [
        load_result.Rate(
            fraction=0.4, per_second=2.0, warm_up=0, requests=[request(0.7)], fetched=1, compared=compared
        ),
        load_result.Rate(fraction=0.8, per_second=4.0, warm_up=0, requests=[request(None)], fetched=0),
    ]
    whole = load_result.Measured(
        date="2026-01-02",
        machine=made.MACHINE,
        versions={},
        seed=1,
        setting=load.SETTING,
        rates=rates,
        lacks=["a line"],
    )
    found = read(tmp_path, stamped("load", whole.to_dict()))
    assert found.benchmark == "load"
    assert found.data.rates[0].compared[0].predicted == 0.45
    assert found.data.lacks == ["a line"]


def test_a_benchmark_that_no_report_shows_is_known(tmp_path: Path) -> None:
    found = read(tmp_path, {"benchmark": "jobs", "machine": made.MACHINE, "anything": [1]})
    assert found.data is None


def changed(path: str, value: Any) -> dict[str, Any]:
    tree = made.between()
    *above, last = path.split(".")
    at: Any = tree
    for key in above:
        at = at[int(key)] if isinstance(at, list) else at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return tree


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("sizes.0.ways.GG-Host.host.seconds", "fast", "sizes[0].ways"),
        ("sizes.0.ways.GG-Host.host.seconds", -1.0, "sizes[0].ways"),
        ("sizes.0.ways.GG-Host.host.seconds", 0, "sizes[0].ways"),
        ("sizes.0.bytes", 0, "sizes[0].bytes"),
        ("sizes.1.bytes", True, "sizes[1].bytes"),
        ("sizes.1.bytes", ..., "sizes[1].bytes"),
        ("sizes", [], "sizes"),
        ("runs", None, "runs"),
        ("correct", False, "correct"),
        ("machine", "big", "machine"),
        ("machine", {"cpus": "many"}, "machine.cpus"),
        ("benchmark", "nothing", "benchmark"),
        ("benchmark", ["between"], "benchmark"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, path: str, value: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(tmp_path, changed(path, value) if path != "benchmark" else made.between(benchmark=value))
    assert "figures.json" in str(caught.value)
    assert field in (caught.value.field or "")
    assert caught.value.got
    assert caught.value.expected


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '{"a": NaN}', '{"runs": 1e999}', "[" * 100_000, '{"other": 1}', "{}"]
)
def test_what_is_no_benchmark_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(tmp_path, text)
    assert "figures.json" in str(caught.value)
    assert caught.value.expected


@pytest.mark.parametrize(
    ("text", "said", "got"),
    [
        ("# HAWK\nmore\n", "line 1, column 1", "'# HAWK'"),
        ('{"a": 1', "line 1, column 8", "the end of the file"),
        ('{"a": NaN}', "this is no JSON", "NaN is no number"),
    ],
)
def test_what_is_no_json_says_what_stands_where(tmp_path: Path, text: str, said: str, got: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as caught:
        read(tmp_path, text)
    assert caught.value.got == got


def test_the_same_bytes_are_no_second_machine(tmp_path: Path) -> None:
    one, again, other = (tmp_path / name for name in ("one.json", "again.json", "other.json"))
    one.write_text(json.dumps(made.between()))
    again.write_text(one.read_text())
    other.write_text(json.dumps(made.between(runs=4)))
    found = sources.gather([one, one, again, other, tmp_path], Origin.ELSEWHERE)
    assert [s.name for s in found] == ["one.json", "other.json"]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("none.json", "empty"):
        with pytest.raises(InvalidArgument, match=name):
            sources.gather([tmp_path / name], Origin.ELSEWHERE)


def test_a_folder_of_folders_says_which_have_figures(tmp_path: Path) -> None:
    for name in ("two-gpus", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "two-gpus" / "jobs.json").write_text(json.dumps(made.between()))
    with pytest.raises(InvalidArgument, match="two-gpus in it has some"):
        sources.gather([tmp_path], Origin.ELSEWHERE)


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for runs, name in enumerate(("b", "a"), 1):
        (tmp_path / f"{name}.json").write_text(json.dumps(made.between(runs=runs)))
    found = sources.gather([tmp_path], Origin.ELSEWHERE)
    assert [s.name for s in found] == [f"{tmp_path.name}/a.json", f"{tmp_path.name}/b.json"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(made.between() | made.load())), _JSON, st.booleans())
def test_whatever_stands_in_a_field_is_read_or_refused(field: str, value: Any, of_load: bool) -> None:
    tree = (made.load() if of_load else made.between()) | {field: value}
    with contextlib.suppress(InvalidArgument):
        sources.source(tree, Path("a.json"), Origin.ELSEWHERE, "a.json")


def test_half_a_character_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"figures\.json"):
        read(tmp_path, made.between(names=["\ud800", "b"]))


def test_a_name_that_is_no_text_is_told_as_well_as_it_can_be(tmp_path: Path) -> None:
    path = tmp_path / "a\udcff.json"
    path.write_text(json.dumps(made.between()))
    (found,) = sources.gather([path], Origin.ELSEWHERE)
    found.told.encode()
    assert found.path == path


def test_every_benchmark_of_the_command_line_is_known() -> None:
    text = (ROOT / "hawk" / "cli" / "bench.py").read_text()
    modules = set(re.findall(r'_bench\(\s*"(\w+)"', text))
    assert len(modules) > 10
    assert modules <= set(sources.KINDS)


@pytest.mark.parametrize("changes", [{"fastest": 2.0}, {"slowest": 0.5}, {"seconds": 3.0}])
def test_a_median_outside_its_own_spread_is_refused(tmp_path: Path, changes: dict[str, float]) -> None:
    tree = made.between()
    tree["sizes"][0]["ways"]["GG-Host"]["host"] = {"seconds": 1.0, "fastest": 0.9, "slowest": 1.2} | changes
    with pytest.raises(InvalidArgument, match="fastest <= seconds"):
        read(tmp_path, tree)
