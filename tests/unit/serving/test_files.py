"""Devices and calibrations in files: what is read, and refusals that name file and key."""

from pathlib import Path

import pytest

from hawk.errors import InvalidArgument
from hawk.serving import (
    Device,
    Lengths,
    Side,
    Workload,
    device_names,
    load_calibration,
    load_device,
    load_served,
)
from hawk.serving.device import UNITS


def text_of(name: str = "a100") -> str:
    lines = ['name = "mine"', 'summary = "of my own"']
    for key, one in load_device(name).figures.items():
        lines += [
            f"[figures.{key}]",
            f"value = {one.value!r}",
            f'mark = "{one.mark}"',
            f'source = "{one.source}"',
        ]
    return "\n".join(lines)


def test_a_device_of_ones_own_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text_of())
    mine, shipped, model = load_device(path), load_device("a100"), load_served("llama-3.1-70b")
    assert mine.rates(model, 4) == shipped.rates(model, 4)
    assert set(mine.figures) == set(UNITS)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('mark = "paper"', 'mark = "heard"', "price.mark"),
        ('source = "', 'source = ""\n#', "flops.source"),
        ("[figures.mbu]", "[figures.speed]", "figures.speed"),
        ("value = 0.4", "value = 40.0", "figures.mfu"),
        ("value = 0.4", 'value = "fast"', "mfu.value"),
        ("value = 0.4", "value = nan", "mfu.value"),
        ('name = "mine"', "", "name"),
        ('summary = "of my own"', "colour = 1", "colour"),
        ('summary = "of my own"', 'summary = "of my own"\nkind = "tpu"', "kind"),
        ("[figures.mfu]", "[figures", "mine.toml"),
        ("value = 312000000000000.0", 'value = 312.0\nunit = "TFLOP/s"', "flops.unit"),
        ("value = 312000000000000.0", "value = 1" + "0" * 400, "flops.value"),
    ],
)
def test_what_is_wrong_in_a_device_is_named(tmp_path: Path, old: str, new: str, field: str) -> None:
    path = tmp_path / "mine.toml"
    assert old in text_of()
    path.write_text(text_of().replace(old, new, 1))
    with pytest.raises(InvalidArgument) as caught:
        load_device(path)
    assert str(path) in str(caught.value.field)
    assert field in str(caught.value.field)


def test_a_calibration_is_held_to_its_bounds(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[3] / "hawk/serving/calibrations/paper.toml"
    path = tmp_path / "far.toml"
    path.write_text(shipped.read_text().replace("value = 0.162", "value = 0.9"))
    with pytest.raises(InvalidArgument, match=r"devices\.a100\.mfu: the value lies outside its bounds"):
        load_calibration(path)


def test_a_calibration_sets_nothing_that_no_device_has(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[3] / "hawk/serving/calibrations/paper.toml"
    path = tmp_path / "wrong.toml"
    for key, value in (("mbu", 1.5), ("flops", 0.0)):
        more = f'\n[devices.h100.{key}]\nvalue = {value}\nmark = "assumed"\nsource = "a guess"\n'
        path.write_text(shipped.read_text() + more)
        with pytest.raises(InvalidArgument) as caught:
            load_calibration(path)
        assert str(caught.value.field) == f"{path}: devices.h100.{key}"


def test_more_devices_take_less_time_and_hold_more() -> None:
    model = load_served("llama-3.1-70b")
    for name in device_names():
        few, many = (load_device(name).rates(model, tp) for tp in (4, 8))
        assert many.prefill(1000) < few.prefill(1000)
        assert many.step(8, 8000) < few.step(8, 8000)
        assert many.kv_tokens > few.kv_tokens


def test_a_prompt_in_chunks_is_the_prompt() -> None:
    rates = load_device("h100").rates(load_served("llama-3.1-8b"), 1)
    points = Device.measured("x", prefill={100: 0.02, 1000: 0.1, 4000: 0.9}).rates(
        load_served("llama-3.1-8b"), 1
    )
    for one in (rates, points):
        parts = sum(one.work(at, 500) for at in range(0, 3000, 500))
        assert parts == pytest.approx(one.work(0, 3000))


def test_measured_points_are_met() -> None:
    model = load_served("llama-3.1-8b")
    found = Device.measured("x", prefill={100: 0.02, 1000: 0.1}, decode={1: 0.01, 8: 0.024}).rates(model, 1)
    assert [found.prefill(n) for n in (100, 550, 1000)] == pytest.approx([0.02, 0.06, 0.1])
    assert [found.step(n, 0) for n in (1, 4.5, 8)] == pytest.approx([0.01, 0.017, 0.024])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument) as caught:
        Device.measured("x", prefill={100: 0.1, 200: 0.05})
    assert caught.value.field == "prefill"


@pytest.mark.parametrize("workload", [Workload.chatbot(), Workload.summarization()])
def test_lengths_have_the_means_that_are_said(workload: Workload) -> None:
    drawn = workload.draw(1.0, 60_000, 0)
    assert drawn.input.mean() == pytest.approx(workload.input.mean, rel=0.02)
    assert drawn.output.mean() == pytest.approx(workload.output.mean, rel=0.02)
    assert drawn.input.max() <= 2048


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ((float("nan"), 1, 1), "arrival"),
        ((-1.0, 1, 1), "arrival"),
        ((10**400, 1, 1), "arrival"),
        ((0.0, 0, 1), "input"),
        ((0.0, 1, True), "output"),
        ((0.0, 1.5, 1), "input"),
    ],
)
def test_a_row_of_a_trace_that_cannot_be_is_named(row: tuple[float, int, int], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Workload.of([(0.0, 1, 1), row], "day")
    assert caught.value.field == f"day[1]: {field}"


@pytest.mark.parametrize("line", ["[" * 60_000, "1" * (1 << 17), '{"arrival": 1' + "0" * 400 + "}"])
def test_a_line_of_a_trace_is_not_followed_into_the_depths(tmp_path: Path, line: str) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text(line)
    with pytest.raises(InvalidArgument) as caught:
        Workload.trace(path)
    assert str(caught.value.field).startswith(f"{path}:1")
    assert len(str(caught.value)) < 1000


def test_a_trace_without_gaps_has_no_rate() -> None:
    burst = Workload.of([(3.0, 10, 10), (3.0, 20, 20)])
    assert burst.draw(None, None, 0).arrival.tolist() == [0.0, 0.0]
    with pytest.raises(InvalidArgument) as caught:
        burst.draw(5.0, None, 0)
    assert caught.value.field == "rate"


def test_sides_and_ways_of_arriving_that_cannot_be_are_refused() -> None:
    one = Lengths("fixed", 1)
    with pytest.raises(InvalidArgument, match="arrivals"):
        Workload("any", one, one, "sometimes")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="block"):
        Side("vllm/nhd", block=0)


def test_lengths_that_cannot_be_are_refused() -> None:
    for wrong in (
        {"mean": 5000.0, "longest": 2048},
        {"mean": 10.0, "spread": -1.0},
        {"mean": 0.5},
        {"mean": float("nan")},
    ):
        with pytest.raises(InvalidArgument):
            Lengths("lognormal", **wrong)  # type: ignore[arg-type]
