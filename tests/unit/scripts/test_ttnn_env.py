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
    assert "tenstorrent/sfpi" in done.stderr
    assert ttnn_env.stand_in(library) == ""  # what is there is left alone


def given(folder: Path, version: str, modules: dict[str, str]) -> str:
    """A Python that says to be of this version, and has these modules and no others, with their versions."""
    place = folder / version
    place.mkdir()
    for module in modules:
        (place / f"{module}.py").touch()
    (place / "known.py").write_text(
        f"import sys, importlib.metadata, importlib.util\nsys.version_info = {tuple(map(int, version.split('.')))}\n"
        f"has = {modules!r}\n"
        "importlib.util.find_spec = lambda name: name if name in has else None\n"
        "importlib.metadata.version = has.__getitem__\nexec(sys.argv[2])\n"
    )
    python = place / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{place}/known.py" "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_a_python_that_is_given_is_looked_at_first(tmp_path: Path) -> None:
    def said(python: str) -> str:
        with pytest.raises(ttnn_env.SetupError) as caught:
            ttnn_env.look(python)
        text = str(caught.value)
        assert text.startswith(f"HAWK_TTNN_PYTHON={python} ")
        assert "\n" not in text
        return text

    modules = dict.fromkeys(ttnn_env.NEEDED.values(), "1.26.4")
    ttnn_env.look(given(tmp_path, "3.12.7", modules))
    assert "is Python 3.11, not 3.12" in said(given(tmp_path, "3.11.2", modules))
    few = {name: version for name, version in modules.items() if name not in ("tt_umd", "pytest")}
    assert "lacks tt-umd, pytest;" in said(given(tmp_path, "3.12.1", few))
    assert "has numpy 2.1.0, not below 2" in said(given(tmp_path, "3.12.2", modules | {"numpy": "2.1.0"}))
    assert "is not there" in said(str(tmp_path / "none"))
    (tmp_path / "text").write_text("text")
    assert "cannot be run by this user" in said(str(tmp_path / "text"))
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    assert "does not run as a Python" in said(str(broken))
