"""scripts/lib/python.sh: the Python that really runs is found, and what is missing is told in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

LIB = Path(__file__).resolve().parents[3] / "scripts" / "lib"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def _put(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def _find(programs: Path, clone: Path, **env: str) -> subprocess.CompletedProcess[str]:
    script = f'. "{LIB}/python.sh"; hawk_python "{clone}"'
    return subprocess.run(
        ["/bin/bash", "-euc", script],
        env={"PATH": str(programs), **env},
        capture_output=True,
        text=True,
        check=False,
    )


def _without_venv(programs: Path, name: str) -> None:
    """A Python as a distribution ships it without its venv package: there is no ensurepip."""
    hidden = programs.parent / "hidden"
    hidden.mkdir(exist_ok=True)
    (hidden / "ensurepip.py").write_text("raise ImportError('not installed')\n")
    _put(programs / name, f'PYTHONPATH="{hidden}" exec "{sys.executable}" "$@"')


def test_a_shim_that_does_not_run_is_passed_over(programs: Path, tmp_path: Path) -> None:
    _put(programs / "python3.13", "echo 'python3.13: command not found' >&2; exit 127")
    _put(programs / "python3.12", f'exec "{sys.executable}" "$@"')
    done = _find(programs, tmp_path)
    assert done.stdout.strip() == str(programs / "python3.12")
    assert done.stderr == ""


def test_the_clone_own_python_comes_first(programs: Path, tmp_path: Path) -> None:
    own = _put(tmp_path / ".venv" / "bin" / "python", f'exec "{sys.executable}" "$@"')
    _put(programs / "python3.13", f'exec "{sys.executable}" "$@"')
    assert _find(programs, tmp_path).stdout.strip() == str(own)


def test_one_with_venv_is_preferred_to_one_without(programs: Path, tmp_path: Path) -> None:
    _without_venv(programs, "python3.13")
    _put(programs / "python3", f'exec "{sys.executable}" "$@"')
    assert _find(programs, tmp_path).stdout.strip() == str(programs / "python3")


def test_a_missing_venv_module_is_one_line_with_the_package(programs: Path, tmp_path: Path) -> None:
    _without_venv(programs, "python3")
    done = _find(programs, tmp_path)
    assert done.returncode == 1
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    assert done.stderr.count("\n") == 1
    assert f"install the package {version}-venv" in done.stderr


def test_no_python_at_all_is_one_line(programs: Path, tmp_path: Path) -> None:
    _put(programs / "python3", "exit 1")  # such as Python 3.9, which the check refuses
    done = _find(programs, tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "3.11 to 3.13" in done.stderr


def test_a_python_that_was_asked_for_is_used_or_refused(programs: Path, tmp_path: Path) -> None:
    asked = _put(tmp_path / "mine", f'exec "{sys.executable}" "$@"')
    assert _find(programs, tmp_path, HAWK_PYTHON=str(asked)).stdout.strip() == str(asked)
    done = _find(programs, tmp_path, HAWK_PYTHON=str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert "HAWK_PYTHON" in done.stderr
    assert done.stderr.count("\n") == 1
