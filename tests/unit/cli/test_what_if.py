"""`hawk evaluate what-if`: what holds, the cheapest that does, and refusals that name what was wrong."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hawk.cli.what_if import what_if

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
        "--rate", "6", "--tp", "1", "--prefill", "a100", "--prefill", "h100", "--most", "1", "--ttft", "1s"
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


def test_ways_are_between_devices_of_their_kinds() -> None:
    pairs = ("--rate", "2", "--tp", "1", "--decode", "p150a", "--decode", "h100", "--json")
    wanted = {("p150a", "gn-hawk"), ("h100", "gg-direct")}
    for ways in ((), ("--way", "gn-hawk", "--way", "gg-direct")):
        found = json.loads(asked(*pairs, *ways))
        assert {(way["decode"], way["configuration"]) for way in found["options"]} == wanted


def test_a_single_buffer_is_never_the_cheapest() -> None:
    alone = ("--rate", "1", "--tp", "1", "--way", "single-buffer")
    found = json.loads(asked(*alone, "--json"))
    assert found["options"][0]["holds"]
    assert found["cheapest"] is None
    assert "Cheapest" not in asked(*alone)
    found = json.loads(asked(*alone, "--way", "gn-hawk", "--json"))
    assert found["cheapest"]["configuration"] == "gn-hawk"


def test_what_fails_is_said_and_more_instances_are_tried_only_where_they_help() -> None:
    found = json.loads(asked("--rate", "2", "--tp", "1", "--ttft", "1ms", "--json"))["options"][0]
    assert found["reason"].startswith("TTFT: an idle cluster keeps it for 0% at most")
    assert found["prefill_utilisation"] > 0.01  # of few instances, not of 256
    found = json.loads(asked("--rate", "2", "--tp", "1", "--tpot", "1ms", "--json"))["options"][0]
    assert found["reason"].startswith("TPOT: an idle cluster")
    found = json.loads(asked("--rate", "90", "--tp", "1", "--most", "1", "--json"))["options"][0]
    assert found["reason"].startswith("queues grow: ")


def test_the_table_says_what_is_promised_to_whom_and_what_is_assumed() -> None:
    text = " ".join(asked("--rate", "2", "--tp", "1", "--attainment", "0.8", "--tpot", "150ms").split())
    assert "Promise: TTFT 2s and TPOT 150ms, both for 80% of requests." in text
    assert "chatbot at 2 requests a second, llama-3.1-8b, calibration paper." in text
    assert "Assumed: 13 of 15 figures of a100" in text


@pytest.mark.parametrize(
    ("arguments", "option", "said"),
    [
        (("--rate", "-1"), "--rate", "got -1; expected above 0, in requests a second"),
        (("--rate", "nan"), "--rate", "got nan; expected above 0"),
        (("--rate", "inf"), "--rate", "got inf"),
        (("--rate", "1", "--attainment", "90"), "--attainment", "1 at most: 0.9 for 90%"),
        (("--rate", "1", "--attainment", "0"), "--attainment", "such as 0.9 for 90%"),
        (("--rate", "1", "--attainment", "nan"), "--attainment", "got nan"),
        (("--rate", "1", "--ratio", "3"), "--ratio", "3:1, if 3 is prefill by decode"),
        (("--rate", "1", "--ratio", "1.5"), "--ratio", "3:2, if 1.5 is prefill by decode"),
        (("--rate", "1", "--ratio", "1.5:1"), "--ratio", "decode instances: 3:2"),
        (("--rate", "1", "--ratio", "0:1"), "--ratio", "such as 3:1"),
        (("--rate", "1", "--ratio", "1:2:3"), "--ratio", "such as 3:1"),
        (("--rate", "1", "--ratio", "-3:1"), "--ratio", "such as 3:1"),
        (("--rate", "1", "--ratio", "1e999999999"), "--ratio", "such as 3:1"),
        (("--rate", "1", "--ratio", "many"), "--ratio", "got 'many'"),
        (("--rate", "1", "--ttft", "0"), "--ttft", 'expected above 0, such as "500ms"'),
        (("--rate", "1", "--tpot", "0ms"), "--tpot", "got '0ms'"),
        ((), "--rate", "expected a number"),
        (("--rate", "1", "--prefill", "abacus"), "--prefill", "got abacus"),
        (("--rate", "1", "--decode", "abacus"), "--decode", "got abacus"),
        (("--rate", "1", "--workload", "chess"), "--workload", "got chess"),
        (("--rate", "1", "--way", "by-foot"), "--way", "got by-foot"),
        (("--rate", "1", "--way", "gg-direct"), "--way", "an NPU; expected a GPU that prefills"),
        (("--rate", "1", "--prefill", "p150a"), "--prefill", "got p150a, an NPU"),
        (("--rate", "1", "--prefill", "p150a", "--decode", "h100"), "--prefill", "got p150a, an NPU"),
        (("--rate", "1", "--prefill", "p150a", "--way", "gn-hawk"), "--way", "got p150a, an NPU"),
        (("--rate", "1", "--way", "gn-host", "--overlap"), "--overlap", "expected none"),
        (("--rate", "1", "--calibration", "none"), "--calibration", "got none"),
        (("--rate", "1", "--tp", "1", "--model", "llama-3.1-405b"), "", "expected more than"),
        (("--rate", "1", "--model", "gpt"), "--model", "got gpt"),
        (("--rate", "1", "--tp", "4:3"), "--tp", "got 3 for 8 KV heads"),
        (("--rate", "1", "--tp", "1", "--block-size", "100"), "--block-size", "expected a multiple of 32"),
        (("--rate", "1", "--tp", "1", "--block-size", "16"), "--block-size", "expected a multiple of 32"),
        (("--rate", "1", "--tp", "1", "--layout", "no/such"), "--layout", "got no/such"),
        (("--rate", "1", "--tp", "1", "--source-layout", "no/such"), "--source-layout", "got no/such"),
        (("--rate", "1", "--tp", "1", "--codec", "int3"), "--codec", "got 'int3'"),
        (("--rate", "1", "--link", "25"), "--link", "got '25'"),
        (("--rate", "1", "--link", "0B/s"), "--link", "expected above 0"),
        (("--rate", "1", "--ttft", "soon"), "--ttft", "got 'soon'"),
    ],
)
def test_what_is_wrong_is_named(arguments: tuple[str, ...], option: str, said: str) -> None:
    done = CliRunner().invoke(what_if, [*SMALL, *arguments])
    assert done.exit_code == 2, done.output
    text = " ".join(done.output.split())
    assert f"Invalid value for '{option}'" in text if option else "Error: " in text
    assert said in text
    assert text.count("; expected") == 1


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
    assert done.exit_code == 2
    assert f"Invalid value for '--workload': {trace}:2" in done.output
