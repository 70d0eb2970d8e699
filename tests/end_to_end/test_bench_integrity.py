"""`hawk bench integrity` as a user runs it; no figure of it is judged here."""

import json
import subprocess
import sys

from tests.end_to_end.test_bench import SAMPLE


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from hawk.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "bench", "integrity", "--quick", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_its_json_is_as_documented() -> None:
    done = bench("--json", "--way", "shm, full", "--way", "tcp+tls")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.keys() == {
        "benchmark", "date", "hawk",
        "machine", "runs", "bytes", "tokens", "check", "alone", "jobs", "left_out", "correct"
    }  # fmt: skip
    assert told["correct"] is True
    assert told["left_out"] == {}
    assert {"copy", "sent", "landed", "sent_ratio", "landed_ratio"} == told["check"].keys()
    assert told["check"]["sent"].keys() == SAMPLE
    assert told["alone"].keys() == {"tcp", "tcp+tls"}
    for way in told["alone"].values():
        assert way["one"].keys() == way["pieces"].keys() == SAMPLE | {"ratio"}
    assert told["alone"]["tcp"]["one"]["ratio"] == 1
    assert list(told["jobs"]) == ["shm", "shm, full", "tcp", "tcp+tls"]
    for name, job in told["jobs"].items():
        assert job["beside"] == name.partition(",")[0].partition("+")[0]
        assert job["over"] > 0
        assert ("verify" in job["phases"]) == (name == "shm, full")


def test_an_unknown_way_is_one_line() -> None:
    done = bench("--way", "pigeon")
    assert done.returncode == 1
    assert done.stderr.startswith("hawk: way: no such way")
    assert len(done.stderr.splitlines()) == 1
