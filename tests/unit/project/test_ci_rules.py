"""The rules that CI adds: no unlisted skips, and the core that was asked for is the one that runs."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]

SKIPPING = """
import pytest

def test_runs():
    pass

def test_skips():
    pytest.skip("no device")

@pytest.mark.skip(reason="marked")
def test_marked():
    pass

@pytest.mark.xfail(reason="known", strict=True)
def test_known():
    raise AssertionError
"""


def _pytest(folder: Path, ci: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(TESTS / "conftest.py", folder / "conftest.py")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"CI": ci}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        str(folder),
    ]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)


def test_skips_are_allowed_at_home(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SKIPPING)
    done = _pytest(tmp_path, "")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 2 skipped, 1 xfailed" in done.stdout


def test_skips_fail_in_ci_with_their_reason(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SKIPPING)
    done = _pytest(tmp_path, "true")
    assert done.returncode == 1
    assert "1 failed, 1 passed, 1 xfailed, 1 error" in done.stdout  # a mark skips in the set-up
    assert "CI allows no skip" in done.stdout
    assert "no device" in done.stdout
    assert "marked" in done.stdout


def test_a_module_that_skips_itself_fails_in_ci(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text('import pytest\npytest.importorskip("no_such_module_at_all")\n')
    assert _pytest(tmp_path, "").returncode == 5  # nothing ran, and nothing failed
    done = _pytest(tmp_path, "true")
    assert done.returncode not in (0, 5)
    assert "no_such_module_at_all" in done.stdout


def test_the_core_asked_for_is_there() -> None:
    """CI sets HAWK_CORE=c for its first run, so a core that silently did not build fails it."""
    if os.environ.get("HAWK_CORE") == "c":
        assert importlib.import_module("hawk.retile._core").__file__
    else:
        assert os.environ.get("HAWK_CORE", "auto") in ("auto", "numpy")


@pytest.mark.parametrize(
    "name", ["scripts/test", "scripts/demo", "scripts/chaos", "scripts/vm-lab", ".ci/run"]
)
def test_entries_can_be_run(name: str) -> None:
    assert os.access(TESTS.parent / name, os.X_OK)
