"""Makes `.venv-engines` in the clone: NIXL, Mooncake's engine and HAWK's tests.  Quick when nothing is to be done.

NIXL's wheel asks for torch and CUDA's libraries, gigabytes that it does not need for memory of the host, so it has a
place of its own.  `HAWK_ENGINES_PYTHON` names a Python that has all of it already; `HAWK_NIXL`, `HAWK_NIXL_CUDA` and
`HAWK_MOONCAKE` are other versions.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import venv_setup
from venv_setup import Environment, SetupError, ensure_place, tier_main

NIXL = os.environ.get("HAWK_NIXL") or "nixl==1.5.1"
NIXL_CUDA = os.environ.get("HAWK_NIXL_CUDA") or "nixl-cu12==1.5.1"
MOONCAKE = os.environ.get("HAWK_MOONCAKE") or "mooncake-transfer-engine-non-cuda==0.3.13.post1"
PART = "engines"
NEEDED_MB = 1500
LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}


def environment(root: Path = venv_setup.ROOT) -> Environment:
    """The clone's `.venv-engines`."""
    return Environment(root, ".venv-engines", (NIXL, NIXL_CUDA, MOONCAKE))


def lacking() -> list[str]:
    """The distribution's packages that the engines need and that are not here."""
    missing = []
    for library, package in LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return missing


def ensure() -> None:
    """Sets up what is missing."""
    if missing := lacking():
        raise SetupError(
            f"the engines need {', '.join(missing)}; install that (apt-get install) and run this again"
        )
    ensure_place(
        environment(),
        PART,
        NEEDED_MB,
        "the engines take 500 MB and a minute or two, once",
        [
            (["--no-deps", NIXL, NIXL_CUDA, MOONCAKE], "NIXL and Mooncake's Transfer Engine"),
            (["-e", ".[test]"], "HAWK and what its tests need"),
        ],
    )


if __name__ == "__main__":
    tier_main("HAWK_ENGINES_PYTHON", "the engines", ensure)
