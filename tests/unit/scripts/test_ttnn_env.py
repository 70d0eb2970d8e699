"""scripts/lib/ttnn_env.py: which Python it takes, and what stands in for a compiler that is not there."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts" / "lib"))

import ttnn_env


def test_ttnn_wants_python_3_12(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(python: str) -> bool:
        return "3.12" in python

    monkeypatch.setattr(ttnn_env, "_is_wanted", runs)
    monkeypatch.setattr(ttnn_env.sys, "executable", "/usr/bin/python3.11")
    monkeypatch.setattr(ttnn_env.shutil, "which", lambda name: None)
    with pytest.raises(ttnn_env.SetupError, match=r"install python3\.12, or set HAWK_PYTHON312"):
        ttnn_env.find_python(home=tmp_path)
    for version in ("3.11.9", "3.12.1", "3.12.7"):
        (tmp_path / ".pyenv" / "versions" / version / "bin").mkdir(parents=True)
        (tmp_path / ".pyenv" / "versions" / version / "bin" / "python").touch()
    assert "3.12.7" in ttnn_env.find_python(home=tmp_path)
    monkeypatch.setattr(ttnn_env.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert ttnn_env.find_python(home=tmp_path) == "/usr/bin/python3.12"
    assert ttnn_env.find_python("/opt/3.12/python") == "/opt/3.12/python"
    with pytest.raises(ttnn_env.SetupError, match=r"no Python 3\.12 that runs"):
        ttnn_env.find_python("/opt/3.13/python")


def test_a_stand_in_only_tells_the_version_of_the_compiler(tmp_path: Path) -> None:
    library = tmp_path / "ttnn"
    assert ttnn_env.stand_in(library) == ""  # a wheel of another form
    brisc = library / "tt_metal" / "pre-compiled" / "123" / "brisc"
    brisc.mkdir(parents=True)
    (brisc / "brisc.elf").write_bytes(b"\x7fELF..GCC: (tenstorrent/sfpi:7.89.0[1050]) 15.1.0\0..")
    tool = ttnn_env.stand_in(library)
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    assert said == "riscv-tt-elf-g++ (tenstorrent/sfpi:7.89.0[1050]) 15.1.0\n"
    done = subprocess.run([tool, "-c", "x.cc"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "download_sfpi" in done.stderr
    assert ttnn_env.stand_in(library) == ""  # what is there is left alone
