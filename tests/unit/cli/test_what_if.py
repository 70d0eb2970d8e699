"""`hawk evaluate what-if`: what holds, the cheapest that does, and refusals that name what was wrong."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hawk.cli.what_if import what_if
from hawk.errors import HawkError, InvalidArgument

SMALL = ("--requests", "300", "--workers", "1", "--model", "llama-3.1-8b")


def asked(*arguments: str) -> str:
    done = CliRunner().invoke(what_if, [*arguments, *SMALL], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_cheapest_that_holds_comes_first() -> None:
    found = json.loads(
        asked(
            "--rate", "20", "--decode", "p150a", "--decode", "h100", "--tp", "1", "--ratio", "1:1", "--json"
        )
    )
    ways = found["options"]
    assert found["cheapest"] == ways[0]
    assert [way["holds"] for way in ways] == [True, True]
    assert ways[0]["cost"] <= ways[1]["cost"]
    for way in ways:
        assert way["attainment"] >= 0.9
        assert way["prefill_instances"] == way["decode_instances"] > 0
    assert found["asked"]["rate"] == 20


def test_layout_codec_and_link_are_what_is_asked() -> None:
    found = json.loads(
        asked(
            *("--rate", "2", "--tp", "1", "--json", "--link", "1GB/s", "--link", "25GB/s", "--most", "1"),
            *("--layout", "tenstorrent/kv-hf", "--codec", "bf16", "--channels", "7"),
        )
    )
    assert {(way["layout"], way["codec"]) for way in found["options"]} == {("tenstorrent/kv-hf", "bf16")}
    slow, fast = (min(w["ttft_p50"] for w in found["options"] if w["link"] == link) for link in (1e9, 25e9))
    assert slow > fast


def test_the_table_says_what_holds_what_does_not_and_what_cannot_be_built() -> None:
    text = asked(
        "--rate", "6", "--tp", "1", "--prefill", "p150a", "--prefill", "h100", "--most", "1", "--ttft", "1s"
    )
    assert "1 x 1 h100" in text
    assert "yes" in text
    assert "no" in text
    assert "Cheapest that keeps its promises for 90%: 1 x 1 h100" in text
    assert "out of memory" not in text
    text = asked("--rate", "1", "--tp", "1", "--way", "single-buffer")
    assert "single-buffer: only its time is simulated" in text
    text = asked("--rate", "20", "--tp", "1", "--ttft", "1us")
    assert "None keeps its promises" in text
    done = CliRunner().invoke(
        what_if, ["--rate", "1", "--tp", "4", "--tp", "1", "--requests", "100", "--workers", "1"]
    )
    assert "Left out: 1 a100 and 1 p150a: tp: the weights leave no room for KV" in " ".join(
        done.output.split()
    )


def test_what_ends_before_queues_are_long_does_not_hold() -> None:
    """300 requests are all in time where of 3000 one in a hundred would be: decoding takes twice what there is."""
    found = json.loads(asked("--rate", "20", "--tp", "1", "--prefill", "h100", "--most", "1", "--json"))
    assert found["options"][0]["attainment"] > 0.9
    assert found["options"][0]["load"] > 1
    assert not found["options"][0]["holds"]
    assert found["cheapest"] is None


def test_a_request_that_fits_into_one_device_leaves_only_others_out(tmp_path: Path) -> None:
    trace = tmp_path / "long.jsonl"
    trace.write_text('{"arrival": 0, "input": 300000, "output": 5}')
    found = json.loads(
        asked(
            "--workload",
            str(trace),
            "--decode",
            "p150a",
            "--decode",
            "h200",
            "--tp",
            "1:1",
            "--prefill",
            "h200",
            "--ttft",
            "1h",
            "--json",
        )
    )
    assert [(way["decode"], way["holds"]) for way in found["options"]] == [("h200", True), ("p150a", False)]
    assert "larger than an instance's KV" in found["options"][1]["reason"]


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    trace = tmp_path / "day.jsonl"
    rows = [{"arrival": i * 0.5, "input": 100 + i, "output": 5} for i in range(50)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    found = json.loads(asked("--workload", str(trace), "--tp", "1", "--json"))
    assert found["asked"]["rate"] is None
    assert found["cheapest"]["holds"]
    trace.write_text(json.dumps({"arrival": 0, "input": 9, "output": 1}))
    found = json.loads(asked("--workload", str(trace), "--tp", "1", "--json"), parse_constant=pytest.fail)
    assert found["cheapest"]["tpot_p90"] is None


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--rate", "-1"), "rate"),
        ((), "rate"),
        (("--rate", "1", "--prefill", "abacus"), "device"),
        (("--rate", "1", "--workload", "chess"), "workload"),
        (("--rate", "1", "--way", "by-foot"), "configuration"),
        (("--rate", "1", "--way", "gg-host", "--overlap"), "overlap"),
        (("--rate", "1", "--calibration", "none"), "calibration"),
        (("--rate", "1", "--tp", "1", "--model", "llama-3.1-405b"), "devices"),
        (("--rate", "1", "--layout", "no/such"), "layout"),
    ],
)
def test_what_is_wrong_is_named(arguments: tuple[str, ...], field: str) -> None:
    done = CliRunner().invoke(what_if, [*SMALL, *arguments])
    assert isinstance(done.exception, HawkError), done.output
    assert field in str(done.exception.field)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"arrival": -1, "input": 1, "output": 1}',
        '{"arrival": 0, "input": 0, "output": 1}',
        '{"arrival": 0, "input": 1, "output": true}',
        '{"arrival": NaN, "input": 1, "output": 1}',
    ],
)
def test_a_bad_line_of_a_trace_is_named(line: str, tmp_path: Path) -> None:
    trace = tmp_path / "bad.jsonl"
    trace.write_text('{"arrival": 0, "input": 1, "output": 1}\n' + line)
    done = CliRunner().invoke(what_if, ["--workload", str(trace), *SMALL])
    assert isinstance(done.exception, InvalidArgument)
    assert f"{trace}:2" in str(done.exception.field)
