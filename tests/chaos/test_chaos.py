"""Two minutes of `scripts/chaos`, and that it sees each promise that is broken on purpose."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SHOWS = {
    "flush": "wrong bytes",
    "abort": "bytes written that no job owned",
    "release": "nobody confirmed that the lease held",
    "lease": "stood still",
}
"""What the report says of each promise."""


def _chaos(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.chaos", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.timeout(300)
def test_every_promise_holds() -> None:
    with _chaos("--minutes", "1.6", "--seed", "20") as run:
        said, _ = run.communicate()
    print(said)  # for whoever reads the run of a tier
    assert run.returncode == 0, said


@pytest.mark.timeout(240)
def test_a_broken_promise_shows(short_path: Path) -> None:
    """All at once, since each waits more than it works."""
    runs = {
        name: _chaos("--minutes", "1", "--seed", "5", "--break", name, "--keep", str(short_path / name[0]))
        for name in SHOWS
    }
    for name, run in runs.items():
        with run:
            said, _ = run.communicate()
        assert run.returncode == 1, f"{name} was broken, and nobody noticed:\n{said}"
        broken = said.partition("chaos: BROKEN")[2]
        assert SHOWS[name] in broken, said
