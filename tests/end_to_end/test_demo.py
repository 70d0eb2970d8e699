"""`python -m hawk.demo` as a user runs it: what it says, that its check can fail, and that it leaves nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hawk.demo import agents

TOKENS = 200
"""Not a whole number of the device's blocks, so that there is padding."""


def command(*arguments: str, tokens: int = TOKENS) -> list[str]:
    return [sys.executable, "-m", "hawk.demo", "--tokens", str(tokens), *arguments]


def run(tmp: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "TMPDIR": str(tmp)},
    )
    assert list(tmp.iterdir()) == [], "files were left behind"
    return done


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_it_verifies(short_path: Path, transport: str) -> None:
    done = run(short_path, "--transport", transport, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["verified"] is True
    assert report["mismatch"] == ""
    assert report["transport"] == transport
    assert report["tokens"] == report["asked"] == TOKENS
    # 4 blocks of 64 tokens, 32 layers, K and V, 8 heads of 128 elements of 2 bytes
    assert report["bytes"] == 256 * 32 * 2 * 8 * 128 * 2
    assert len(report["per_channel"]) == 8
    assert sum(report["per_channel"]) == report["bytes"]
    # 6 blocks in the cache: those that had to stay were looked at, too
    assert sum(report["checked"]) == report["bytes"] // 4 * 6
    assert {"agents", "fill", "transfer", "check"} <= report["seconds"].keys()
    assert {"plan", "retile", "read", "release", "total"} <= report["phases"].keys()


def test_it_tells_a_story_that_ends_with_verified(short_path: Path) -> None:
    done = run(short_path, "--codec", "bfp8_b", "--channels", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "verified"
    assert "7 channels" in done.stdout
    assert "bfp8_b" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("damage", ["swap-channels", "flip-bit"])
def test_a_damaged_result_is_found(short_path: Path, damage: str) -> None:
    done = run(short_path, "--break", damage)
    assert done.returncode == 1
    assert "verified" not in done.stdout
    assert "WRONG: channel" in done.stdout.splitlines()[-1]


def test_one_token_is_one() -> None:
    done = subprocess.run(command(tokens=1), capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 1 token: " in done.stdout


def test_bad_usage_is_one_line(short_path: Path) -> None:
    done = run(short_path, "--channels", "0")
    assert done.returncode == 2
    assert "channels" in done.stderr


def alive(pid: int) -> bool:
    try:
        # A zombie has ended; whoever should reap it is not our concern.
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def signals_by_default() -> None:
    """In the child: under `nohup`, `&` or `trap "" INT` it would inherit that these are ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def interrupted(tmp: Path, number: int) -> tuple[int, list[int]]:
    """Sends the signal once the agents are up; the exit status and the agents' process numbers."""
    with subprocess.Popen(
        command(tokens=1024),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp)},
        preexec_fn=signals_by_default,
    ) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith("Two agents"))
            pids = [int(pid) for pid in re.findall(r"process (\d+)", line)]
            assert len(pids) == 2
            assert all(alive(pid) for pid in pids)
            process.send_signal(number)
            process.stdout.read()
            return process.wait(60), pids
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(short_path: Path, number: int) -> None:
    status, pids = interrupted(short_path, number)
    assert status == 130
    assert not any(alive(pid) for pid in pids)
    assert list(short_path.iterdir()) == []


def test_agents_do_not_outlive_a_killed_demo_nor_its_folder_the_next(short_path: Path) -> None:
    status, pids = interrupted(short_path, signal.SIGKILL)
    assert status == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "an agent lives on"
        time.sleep(0.02)  # nobody tells of the end of a process that is not our child
    (left,) = short_path.iterdir()
    assert (left / "prefill.key").exists()
    run(short_path)  # looks that nothing is left


async def test_an_agent_that_does_not_start_shows_its_log(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    settings = agents.Settings(1 << 20, 2, 64, transports=("pigeon",))
    with pytest.raises(agents.AgentFailed, match="prefill agent ended with status 2") as caught:
        await agents.Pair(settings).__aenter__()
    assert 'no transport is called "pigeon"' in caught.value.log
    assert os.listdir(short_path) == []
