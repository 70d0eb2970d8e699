"""The paper's system beside the paper: what the calibration is said to reach, with few figures within bounds."""

import pytest

from hawk.serving import (
    Transfer,
    calibration_names,
    device_names,
    load_calibration,
    load_device,
    load_served,
    paper_scenario,
    simulate,
)

PAPER = load_calibration("paper")
SMALL, LARGE = 10e6, 1280e6


def latency(configuration: str, nbytes: float) -> float:
    return Transfer(configuration, PAPER).seconds(nbytes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("configuration", "of", "small", "large"),
    [
        ("gn-host", "gg-host", 8.91, 3.79),
        ("gg-direct", "gg-host", 0.6630, 0.1477),
        ("gn-hawk", "gg-host", 0.7725, 0.1469),
    ],
)
def test_lone_transfers_are_those_of_figure_9(
    configuration: str, of: str, small: float, large: float
) -> None:
    for nbytes, paper in ((SMALL, small), (LARGE, large)):
        assert latency(configuration, nbytes) / latency(of, nbytes) == pytest.approx(paper, rel=0.025)


@pytest.mark.parametrize(
    ("configuration", "told"),
    [
        ("gg-direct", (3.6, 7.1, 17.8, 61.9)),
        ("gn-hawk", (3.9, 7.3, 18.1, 62.2)),
        ("gg-host", (9.6, 23.3, 66.0, 241.3)),
        ("gn-host", (13.0, 34.8, 102.9, 382.3)),
    ],
)
def test_what_was_measured_is_met_as_far_as_the_documents_say(
    configuration: str, told: tuple[float, ...]
) -> None:
    transfer = Transfer(configuration, load_calibration("measured"))  # type: ignore[arg-type]
    found = [transfer.seconds(size) * 1e3 for size in (8.388608e6, 83.9e6, 318.8e6, 1283.5e6)]
    assert found == pytest.approx(told, abs=0.06)


def test_decode_and_prefill_gaps_are_those_of_table_1() -> None:
    model, tokens = load_served("llama-3.1-70b"), 512
    gpu, npu = (PAPER.device(name).rates(model, 4, 163_840) for name in ("a100", "p150a"))
    context = 32 * (tokens + 64)  # halfway through 128 tokens of answer
    assert npu.step(32, context) / gpu.step(32, context) == pytest.approx(1.16, rel=0.01)
    assert npu.prefill(tokens) / gpu.prefill(tokens) == pytest.approx(2.52, rel=0.01)


@pytest.mark.parametrize("workload", ["chatbot", "summarization"])
def test_the_four_configurations_keep_their_order(workload: str) -> None:
    for rate in (0.15, 0.3, 0.45, 0.6):
        kept = [
            simulate(paper_scenario(name, workload, rate, requests=800)).attainment  # type: ignore[arg-type]
            for name in ("gg-direct", "gn-hawk", "gg-host", "gn-host")
        ]
        assert kept == sorted(kept, reverse=True), (rate, kept)


def test_knees_lie_where_the_documents_say() -> None:
    def kept(configuration: str, workload: str, rate: float) -> float:
        return simulate(paper_scenario(configuration, workload, rate)).attainment  # type: ignore[arg-type]

    for configuration in ("gg-direct", "gn-hawk"):
        for workload in ("chatbot", "summarization"):
            assert kept(configuration, workload, 0.55) >= 0.9
            assert kept(configuration, workload, 0.8) < 0.9
    assert kept("gg-host", "chatbot", 0.2) >= 0.9 > kept("gg-host", "chatbot", 0.5)
    assert kept("gg-host", "summarization", 0.45) >= 0.9 > kept("gg-host", "summarization", 0.6)
    assert kept("gn-host", "chatbot", 0.05) < 0.9
    assert kept("gn-host", "summarization", 0.2) < 0.9


def test_every_figure_has_a_source_and_what_is_chosen_has_bounds() -> None:
    for name in calibration_names():
        for key, one in load_calibration(name).all_figures():
            assert one.source, key
            assert not one.source.startswith("chosen") or one.low is not None, key
    chosen = [key for key, one in PAPER.all_figures() if one.source.startswith("chosen")]
    assert chosen == ["transfer.staging", "a100.mfu"]  # all that serving results were looked at for
    for device in device_names():
        assert all(one.source for one in load_device(device).figures.values())
