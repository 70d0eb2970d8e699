"""`hawk bench transfer` as a user runs it; no figure of it is judged here."""

import json
import subprocess
import sys

import pytest

STAMP = {"benchmark", "date", "hawk", "machine"}
SAMPLE = {"seconds", "fastest", "slowest", "gb_per_s", "gb_per_s_most", "gb_per_s_least"}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from hawk.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "bench", "transfer", "--quick", "--size", "8MB", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_its_json_is_as_documented() -> None:
    done = bench("--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.keys() == STAMP | {"runs", "sizes", "left_out", "correct"}
    assert told["benchmark"] == "transfer"
    assert told["correct"] is True
    assert told["left_out"] == []
    assert told["runs"] == 1
    (size,) = told["sizes"]
    assert size["bytes"] == size["tokens"] * (128 << 10)
    assert size["sockets"].keys() == size["memcpy"].keys() == SAMPLE
    beside = {name: (t["beside"], t["goal"]) for name, t in size["transports"].items()}
    assert beside == {"tcp": ("sockets", 0.95), "shm": ("memcpy", 0.9)}
    for transport in size["transports"].values():
        assert transport["one"].keys() == transport["pieces"].keys() == SAMPLE
        assert transport["one_ratio"] > 0
        assert transport["pieces_ratio"] > 0
        job = transport["job"]
        assert job["bytes"] == size["bytes"]
        assert job["mode"] in ("direct", "staged")
        assert job["parts"].keys() == {"plan", "retile", "read", "finish"}
        assert job["parts_sum"] == pytest.approx(sum(job["parts"][p] for p in ("retile", "read", "finish")))
        assert job["over_sum"] == pytest.approx(job["seconds"] / job["parts_sum"])
        assert {"connect", "accept", "read", "release", "client"} <= job["phases"].keys()


def test_its_tables_name_what_they_show() -> None:
    done = bench("--transport", "shm")
    assert done.returncode == 0, done.stderr
    for words in ("The bytes alone", "shm, 2 KB segments", "The whole job", "Its parts alone", "job/sum"):
        assert words in done.stdout
    assert "tcp," not in done.stdout


def test_an_unknown_transport_is_one_line() -> None:
    done = bench("--transport", "pigeon")
    assert done.returncode == 1
    assert done.stderr.startswith("hawk: transport: no such transport")
    assert len(done.stderr.splitlines()) == 1


def test_many_small_jobs_are_right_and_told() -> None:
    code = "from hawk.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "jobs", "--quick", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["correct"] is True
    assert told["goals"] == {"embedded": 1.3, "separate": 2.5}
    light = told["light"]["shm"]
    assert light["first"].keys() == light["whole"].keys() == light["ratio"].keys() == told["goals"].keys()
    assert 0 < light["ping"] < told["far"]["shm"]["ping"]
    assert all(0 < light["first"][where] <= light["whole"][where] for where in told["goals"])
    assert told["at_once"]["shm"]["jobs"] == 20
    assert [crowd["jobs"] for crowd in told["queued"]["shm"]] == [10, 20]
