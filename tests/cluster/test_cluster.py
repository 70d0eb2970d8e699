"""`scripts/cluster`, and that it sees jobs that a restart loses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _cluster(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.cluster", "--plain", *arguments]
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


@pytest.mark.timeout(300)
def test_every_promise_holds() -> None:
    run = _cluster()
    print(run.stdout)  # for whoever reads the run of a tier
    assert run.returncode == 0, run.stdout
    assert "every promise held" in run.stdout


@pytest.mark.timeout(300)
def test_a_restart_that_loses_jobs_shows() -> None:
    run = _cluster("--break", "drain")
    assert run.returncode == 1, run.stdout
    assert "BROKEN: the rolling restart lost jobs" in run.stdout
