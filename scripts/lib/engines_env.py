"""Makes `.venv-engines` in the clone: NIXL, Mooncake's engine and HAWK's tests.  Quick when nothing is to be done.

NIXL's wheel asks for torch and CUDA's libraries, gigabytes that it does not need for memory of the host, so it has a
place of its own.  `HAWK_ENGINES_PYTHON` names a Python that has all of it already; `HAWK_NIXL`, `HAWK_NIXL_CUDA` and
`HAWK_MOONCAKE` are other versions.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import venv_setup
from venv_setup import Environment, SetupError, fail, say

NIXL = os.environ.get("HAWK_NIXL") or "nixl==1.5.1"
NIXL_CUDA = os.environ.get("HAWK_NIXL_CUDA") or "nixl-cu12==1.5.1"
MOONCAKE = os.environ.get("HAWK_MOONCAKE") or "mooncake-transfer-engine-non-cuda==0.3.13.post1"
PART = "engines"
NEEDED_MB = 1500
LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}


class EnginesEnvironment(Environment):
    """The clone's `.venv-engines`."""

    def __init__(self, root: Path = venv_setup.ROOT) -> None:
        super().__init__(root)
        self.path = root / ".venv-engines"
        self.python = self.path / "bin" / "python"
        self.stamp = self.path / "hawk-setup.json"
        self.unfinished = self.path / "hawk-setup-unfinished"
        self.log = self.path / "hawk-setup.log"

    def key(self) -> str:
        """Changes with what is asked for, too."""
        return hashlib.sha256(f"{super().key()}\n{NIXL}\n{NIXL_CUDA}\n{MOONCAKE}\n".encode()).hexdigest()


def lacking() -> list[str]:
    """The distribution's packages that the engines need and that are not here."""
    missing = []
    for library, package in LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return missing


def ensure(env: EnginesEnvironment) -> None:
    """Sets up what is missing."""
    if missing := lacking():
        raise SetupError(
            f"the engines need {', '.join(missing)}; install that (apt-get install) and run this again"
        )
    if env.ready({PART}):
        return
    venv_setup._check_place(env, NEEDED_MB)
    with venv_setup._lock(env):
        if env.ready({PART}):
            return
        venv_setup._make_venv(env)
        env.unfinished.touch()
        say("the engines take 500 MB and a minute or two, once")
        venv_setup._pip(env, ["--no-deps", NIXL, NIXL_CUDA, MOONCAKE], "NIXL and Mooncake's Transfer Engine")
        venv_setup._pip(env, ["-e", ".[test]"], "HAWK and what its tests need")
        env.finish({PART})
        say("set-up done")


def main() -> None:
    """Exits with 1 and one line if it cannot be made."""
    given = os.environ.get("HAWK_ENGINES_PYTHON")
    try:
        if given and not Path(given).exists():
            raise SetupError(
                f"HAWK_ENGINES_PYTHON={given} is not there; set it to a Python that has the engines, or unset it"
            )
        if not given:
            ensure(EnginesEnvironment())
    except SetupError as error:
        fail(str(error))
    except OSError as error:
        fail(f"set-up failed: {error}; mend that and run this again")


if __name__ == "__main__":
    main()
