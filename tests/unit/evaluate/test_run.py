"""`hawk evaluate` from end to end with few requests, and what it says where it cannot."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hawk.cli import cli
from hawk.errors import InternalError, InvalidArgument, MissingDependency, OutOfMemory
from hawk.evaluate import Options, evaluate, here, output, run, simulated
from hawk.evaluate.records import Absent, Origin
from tests.unit.evaluate import made


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rates, few requests, and benchmarks that are made up: nothing is measured."""
    monkeypatch.setattr(simulated, "QUICK_RATES", (0.2, 0.6))
    monkeypatch.setattr(simulated, "QUICK_REQUESTS", 40)
    steps = [
        here.Step("between", "sizes", lambda: made.between()),
        here.Step("transfer", "jobs", lambda: _fails(OutOfMemory("no room", field="size"))),
    ]
    monkeypatch.setattr(here, "steps", lambda *_, **__: steps)


def _fails(error: Exception) -> dict[str, object]:
    raise error


def test_it_writes_what_it_says(little: None, tmp_path: Path) -> None:
    other = tmp_path / "gpus.json"
    other.write_text(json.dumps(made.load()))
    out = tmp_path / "out"
    done = CliRunner().invoke(
        cli, ["evaluate", "--out", str(out), "--quick", "--from", str(other), "--workers", "1", "--json"]
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["out"], told["report"], told["seed"]) == (str(out), "report.html", 0)
    assert {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()} == set(told["files"])
    assert told["measured"] == ["measured/between.json"]
    assert [one["file"] for one in told["elsewhere"]] == ["gpus.json"]
    assert any("no room" in one["why"] for one in told["absent"])
    assert set(told["knees"]) == {"chatbot", "summarization"}
    assert json.loads((out / "summary.json").read_text())["knees"] == told["knees"]
    # What was measured is a file like any other, for the next machine.
    assert json.loads((out / "measured" / "between.json").read_text())["benchmark"] == "between"


def test_the_same_seed_gives_the_same(little: None) -> None:
    first, again, other = (simulated.simulate(quick=True, seed=seed, workers=1) for seed in (3, 3, 4))
    assert first == again
    assert first.runs != other.runs


def test_bad_figures_are_refused_before_anything_is_written(little: None, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(InvalidArgument, match=r"bad\.json"):
        evaluate(Options(tmp_path / "out", (bad,)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("devices", ["gpu", "cuda:0", "cuda:98,cuda:99"])
def test_devices_that_are_not_there_are_refused_before_anything_is_written(
    tmp_path: Path, devices: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        evaluate(Options(tmp_path / "out", devices=devices))
    assert caught.value.field == "devices"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("count", "expected", "said"),
    [
        (0, "host,host", "no GPU can be used here: no driver"),
        (1, "cuda:0,cuda:0, for there is one GPU", "no such GPU"),
        (4, "cuda:0 to cuda:3", "no such GPU"),
    ],
)
def test_gpus_that_are_there_are_named(
    monkeypatch: pytest.MonkeyPatch, count: int, expected: str, said: str
) -> None:
    monkeypatch.setattr(here, "_gpus", lambda: (count, "" if count else "no driver"))
    with pytest.raises(InvalidArgument, match=said) as caught:
        here.chosen("cuda:0,cuda:4")
    assert caught.value.expected == expected


def test_what_a_run_that_ended_early_left_is_overwritten(little: None, tmp_path: Path) -> None:
    def ends(**_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(simulated, "simulate", ends)
        evaluate(Options(tmp_path, quick=True))
    assert (tmp_path / "measured" / "between.json").is_file()
    with pytest.raises(InvalidArgument, match="--overwrite"):
        output.claim(tmp_path, overwrite=False)
    output.remove(tmp_path, output.claim(tmp_path, overwrite=True))
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_wrong_byte_ends_it(tmp_path: Path) -> None:
    steps = [here.Step("between", "sizes", lambda: _fails(InternalError("a byte is wrong")))]
    with pytest.raises(InternalError):
        list(here.measure(steps, tmp_path))


def test_what_cannot_run_is_said(tmp_path: Path) -> None:
    steps = [here.Step("retile_cuda", "a GPU", lambda: _fails(MissingDependency("no CuPy", field="cupy")))]
    (one,) = here.measure(steps, tmp_path)
    assert isinstance(one, Absent)
    assert "no CuPy" in one.why


def test_a_real_benchmark_goes_the_whole_way(tmp_path: Path) -> None:
    (step,) = [
        s
        for s in here.steps(here.Machine("host,host", []), [], quick=True, seed=1)
        if s.benchmark == "fragmentation"
    ]
    (source,) = here.measure([step], tmp_path)
    assert not isinstance(source, Absent)
    assert source.origin is Origin.HERE
    assert source.data.seed == 1
    assert source.name == f"{tmp_path.name}/fragmentation.json"


def test_sizes_that_memory_is_too_short_for_are_left_out_and_said() -> None:
    fit, left = here.fitting(here.SIZES, 8 << 30)
    assert fit == sorted(fit) != list(here.SIZES)
    assert len(fit) + len(left) == len(here.SIZES)
    assert all("available" in one.why for one in left)
    assert here.fitting(here.SIZES, 1 << 50)[1] == []


def test_a_machine_says_what_it_lacks() -> None:
    found = here.look()
    assert found.devices
    assert all(one.what and one.why for one in found.absent)
    assert any("NPU" in one.what for one in found.absent)


@pytest.mark.parametrize("module", ["matplotlib", "jinja2", "simpy"])
def test_without_the_extra_it_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependency, match=r"\[evaluate\]") as caught:
        evaluate(Options(tmp_path / "out"))
    assert caught.value.field == module
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json"], "--out"),
        (["--from", "x.json"], "--out"),
        (["--out", "x", "--seed", "-1"], "--seed"),
        (["--out", "x", "--workers", "0"], "--workers"),
        (["--out", "x", "--no-measure", "--devices", "host,host"], "--devices"),
    ],
)
def test_usage(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(cli, ["evaluate", *arguments])
    assert done.exit_code == 2
    assert said in done.output


def test_alone_it_shows_its_help() -> None:
    done = CliRunner().invoke(cli, ["evaluate"])
    assert done.exit_code == 0
    assert "--out" in done.output


def test_where_nobody_looks_a_step_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with run._progress() as step:
        for words in ("retile", "simulating, 1 of 2", "simulating, 2 of 2", "writing", "simulating, 1 of 2"):
            step(words)
    assert capsys.readouterr().err.splitlines() == ["retile", "simulating", "writing", "simulating"]
