"""`scripts/bench gpu`: whether every byte is right on the GPU, then all that is measured there, each as one command.

    scripts/bench gpu [--quick] [--only STEP]... [--json FOLDER]

Runs with the Python that it was started by where that can import everything, from the clone as it is; nothing is
installed then, and no index asked.  `--check` says what is missing and ends.  Steps after one whose bytes are wrong
are left out: there is no figure without right bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("uvloop", "zmq", "msgspec", "numpy", "structlog", "prometheus_client", "click", "rich", "xxhash")
TESTING = ("pytest", "pytest_asyncio", "hypothesis")
DEVICE = ("cupy",)
HAWK = "from hawk.cli import main; main()"


def missing(modules: tuple[str, ...] = (*NEEDED, *TESTING, *DEVICE)) -> list[str]:
    """Modules that this Python cannot import."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def gpus() -> int:
    """GPUs that the driver finds."""
    sys.path.insert(0, str(ROOT))
    from hawk.errors import HawkError
    from hawk.memory.cuda_driver import CudaFault, load

    try:
        return load().device_count()
    except (HawkError, CudaFault) as error:
        print(f"scripts/bench gpu: {error}", file=sys.stderr)
        return 0


def steps(count: int) -> dict[str, list[str]]:
    """The commands by name; `count` GPUs."""
    second = f"cuda:{min(1, count - 1)}"
    found = {
        "correct": ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/device"],
        "chunks": ["bench", "chunks"],
        "retile": ["bench", "retile", "--device", "cuda:0"],
        "jobs": ["bench", "gpu"],
        "transfer": ["bench", "transfer", "--devices", f"cuda:0,{second}"],
    }
    if not missing(("nixl",)):
        found["nixl"] = [
            "-m",
            "pytest",
            "-q",
            "-s",
            "-p",
            "no:cacheprovider",
            "tests/device/test_nixl_vram.py",
        ]
    if not missing(("torch",)):  # a prefill to be slowed is computed by it
        found["overlap"] = ["bench", "overlap"]
        if count > 1:
            found["overlap-paced"] = ["bench", "overlap", "--into", second]
    return found


def main(arguments: list[str]) -> int:
    """The exit status: 0 where every step did."""
    parser = argparse.ArgumentParser(prog="scripts/bench gpu")
    parser.add_argument("--quick", action="store_true", help="does it work, not how fast is it")
    parser.add_argument("--only", action="append", metavar="STEP", help="this step; may be given again")
    parser.add_argument(
        "--json", metavar="FOLDER", type=Path, help="a file of each step's figures goes there"
    )
    parser.add_argument("--check", action="store_true", help="says what is missing, and ends")
    asked = parser.parse_args(arguments)
    lacks = missing()
    if asked.check:
        print(", ".join(lacks))
        return int(bool(lacks))
    if lacks:
        print(f"scripts/bench gpu: missing: {', '.join(lacks)}", file=sys.stderr)
        return 1
    count = gpus()
    if not count:
        return 1
    all_steps = steps(count)
    unknown = [name for name in asked.only or () if name not in all_steps]
    if unknown:
        print(f"scripts/bench gpu: no step {unknown[0]}; there are {', '.join(all_steps)}", file=sys.stderr)
        return 2
    if asked.json is not None:
        asked.json.mkdir(parents=True, exist_ok=True)
    wrong = []
    for name, command in all_steps.items():
        if asked.only and name not in asked.only:
            continue
        began = time.monotonic()
        status = run(name, command, asked.quick, asked.json)
        print(
            f"{name}: {'done' if status == 0 else f'status {status}'}, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        if status:
            wrong.append(name)
            if name == "correct":
                break
    return int(bool(wrong))


def run(name: str, command: list[str], quick: bool, folder: Path | None) -> int:
    """One step, in a process of its own; its exit status."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *_path()])}
    if command[0] != "bench":
        return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=False).returncode
    whole = [sys.executable, "-c", HAWK, *command, *(["--quick"] if quick else [])]
    if folder is None:
        return subprocess.run(whole, cwd=ROOT, env=environment, check=False).returncode
    with (folder / f"{name}.json").open("w") as out:
        return subprocess.run(
            [*whole, "--json"], cwd=ROOT, env=environment, stdout=out, check=False
        ).returncode


def _path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
