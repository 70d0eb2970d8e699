"""Makes `.venv-ttnn` in the clone: ttnn, the driver's Python and HAWK's tests.  Quick when there is nothing to do.

ttnn has wheels for Python 3.12 and wants numpy below 2, so it has a place of its own.  `HAWK_TTNN_PYTHON` names a
Python that has all of it already; `HAWK_PYTHON312` the Python 3.12 to make the place with; `HAWK_TTNN` and
`HAWK_TT_UMD` are other versions of the two.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import venv_setup
from venv_setup import Environment, SetupError, ensure_place, say, tier_main

TTNN = os.environ.get("HAWK_TTNN") or "ttnn==0.81.1"
UMD = os.environ.get("HAWK_TT_UMD") or "tt-umd==0.9.14"
PART = "ttnn"
NEEDED_MB = 1500
WANTED = (3, 12)
HERE = "--with-this-python"


class TtnnEnvironment(Environment):
    """The clone's `.venv-ttnn`."""

    def __init__(self, root: Path = venv_setup.ROOT) -> None:
        super().__init__(root, ".venv-ttnn", (TTNN, UMD))

    @property
    def library(self) -> Path:
        """Where ttnn is, once it is installed."""
        return self.path / "lib" / "python{}.{}".format(*WANTED) / "site-packages" / "ttnn"


def find_python(named: str | None = None, home: Path | None = None) -> str:
    """A Python 3.12 that runs: the one named, of this name on the path, or of pyenv's versions."""
    if named:
        if not _is_wanted(named):
            raise SetupError(f"HAWK_PYTHON312={named} is no Python 3.12 that runs; set it to one that is")
        return named
    name = "python{}.{}".format(*WANTED)
    versions = (home or Path.home()) / ".pyenv" / "versions"
    beside = sorted(str(p) for p in versions.glob("{}.{}.*/bin/python".format(*WANTED)))
    for found in (sys.executable, shutil.which(name), *reversed(beside)):
        if found and _is_wanted(found):
            return found
    raise SetupError(
        f"ttnn has wheels for Python 3.12, and none is here; install {name}, or set HAWK_PYTHON312 to its path"
    )


def _is_wanted(python: str) -> bool:
    check = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != {WANTED})"
    try:
        return subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def stand_in(library: Path) -> str:
    """Puts a compiler in the place of the missing one that only says its version; returns where, or nothing.

    ttnn compiles the firmware of a device that is opened, with a compiler that its wheel does not bring, but takes what
    the wheel has ready where the compiler's version is that of its makers.  A mock device needs no more.  Kernels
    need the real one, for which this one has to be taken away (docs/ttnn.md).
    """
    if any(
        (place / "compiler").exists()
        for place in (library / "runtime" / "sfpi", Path("/opt/tenstorrent/sfpi"))
    ):
        return ""
    version = b""
    for file in sorted((library / "tt_metal" / "pre-compiled").glob("*/brisc/brisc.elf"))[:1]:
        found = re.search(rb"GCC: (\(tenstorrent/sfpi:[^)]+\) [0-9.]+)\0", file.read_bytes())
        version = found[1] if found else b""
    if not version:
        return ""  # another form of the wheel: tests that open a device say what is missing
    tool = library / "runtime" / "sfpi" / "compiler" / "bin" / "riscv-tt-elf-g++"
    tool.parent.mkdir(parents=True)
    tool.write_text(
        "#!/bin/sh\n"
        "# Made by scripts/test ttnn: says its version and compiles nothing.\n"
        f'[ "$1" = --version ] && echo "riscv-tt-elf-g++ {version.decode()}" && exit 0\n'
        'echo "this compiler only says its version: remove the folder runtime/sfpi of ttnn and install'
        ' tenstorrent/sfpi (docs/ttnn.md)" >&2\n'
        "exit 1\n"
    )
    tool.chmod(0o755)
    return str(tool)


LOOK = """
import sys
wrong = [] if sys.version_info[:2] == (3, 12) else [f"is Python {sys.version_info[0]}.{sys.version_info[1]}, not 3.12"]
import importlib.metadata as known
from importlib.util import find_spec
lacking = [name for name, module in NEEDED.items() if find_spec(module) is None]
wrong += ["lacks " + ", ".join(lacking)] if lacking else []
if "numpy" not in lacking and int(known.version("numpy").split(".")[0]) > 1:
    wrong.append("has numpy " + known.version("numpy") + ", not below 2")
print("; ".join(wrong))
"""
"""Run by a Python that was given, so that it says itself what it is and has; none of the packages is imported."""

NEEDED = {
    "ttnn": "ttnn",
    "tt-umd": "tt_umd",
    "numpy": "numpy",
    "uvloop": "uvloop",
    "xxhash": "xxhash",
    "pyzmq": "zmq",
    "msgspec": "msgspec",
    "structlog": "structlog",
    "prometheus-client": "prometheus_client",
    "click": "click",
    "rich": "rich",
    "pytest": "pytest",
    "pytest-asyncio": "pytest_asyncio",
    "pytest-timeout": "pytest_timeout",
}
"""Packages without which the tests do not run, and the module of each."""


def look(python: str) -> None:
    """Raises `SetupError` in one line unless `python` runs here and has all that the tests need."""
    named = f"HAWK_TTNN_PYTHON={python}"
    try:
        done = subprocess.run(
            [python, "-c", f"NEEDED = {NEEDED!r}\n{LOOK}"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise SetupError(f"{named} is not there; set it to a Python that has ttnn, or unset it") from None
    except OSError as error:
        raise SetupError(f"{named} cannot be run by this user ({error.strerror}); unset it") from None
    said = done.stdout.strip() if done.returncode == 0 else "does not run as a Python"
    if said:
        raise SetupError(f"{named} {said}; mend that (docs/testing.md says what it needs), or unset it")


def ensure(env: TtnnEnvironment) -> None:
    """Sets up what is missing."""
    if env.ready({PART}):
        return
    if HERE not in sys.argv:
        # The environment is made by the Python that it is to have.
        python = find_python(os.environ.get("HAWK_PYTHON312"))
        sys.stdout.flush()
        os.execv(python, [python, str(Path(__file__).resolve()), HERE])

    def last() -> None:
        if stand_in(env.library):
            say("no compiler for kernels is here: a stand-in opens mock devices, kernels do not run")

    ensure_place(
        env,
        PART,
        NEEDED_MB,
        "ttnn takes 700 MB and three to ten minutes, once",
        [
            (["numpy<2", TTNN, UMD], "ttnn and the driver's Python"),
            (["numpy<2", "-e", ".[test]"], "HAWK and what its tests need"),
        ],
        last,
    )


def main() -> None:
    """Exits with 1 and one line if it cannot be made."""
    tier_main("HAWK_TTNN_PYTHON", "ttnn", lambda: ensure(TtnnEnvironment()), look)


if __name__ == "__main__":
    main()
