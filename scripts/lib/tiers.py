"""`scripts/test`: sets up, runs the tests of the tiers asked for, and says which ones did not run and why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from venv_setup import ROOT, SetupError, ensure, fail, say

TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Tier:
    """One folder of tests, and what it needs beyond Python.

    `modules` must be importable in `.venv`, `programs` must be on the path; `installs` is put into `.venv` on
    demand; `first` is run by its Python before the tests, and says itself why it fails.  `home` is the environment
    whose Python runs the tests where that is not `.venv`, unless the variable `instead` names another.
    """

    name: str
    about: str
    modules: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    installs: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    home: str = ""
    instead: str = ""

    def python(self, own: Path) -> Path:
        """What runs its tests."""
        given = os.environ.get(self.instead) if self.instead else None
        return Path(given) if given else ROOT / self.home / "bin" / "python" if self.home else own

    def given(self) -> bool:
        """Whether the environment names another Python for it, which `first` only looks at."""
        return bool(self.instead and os.environ.get(self.instead))

    def built(self) -> bool:
        """Whether there is a test in it."""
        return any((TESTS / self.name).rglob("test_*.py"))

    def lacks(self, python: Path | None) -> str:
        """What is missing here, or nothing."""
        missing = [p for p in self.programs if shutil.which(p) is None]
        if python is not None and not self.installs:
            missing += [f"the Python module {m}" for m in self.modules if not _importable(python, m)]
        return ", ".join(missing)


QUICK = (
    Tier("unit", "parts alone, lint, types, layering"),
    Tier("contract", "every transport and memory against its contract"),
    Tier("end_to_end", "agents and clients as processes; the package as a user gets it"),
)
TORCH = os.environ.get("HAWK_TORCH") or "torch==2.13.0"
TRANSFORMERS = os.environ.get("HAWK_TRANSFORMERS") or "transformers>=4.50"
MORE = (
    Tier(
        "model", "a real model's cache, there and back", ("torch", "transformers"), (), (TORCH, TRANSFORMERS)
    ),
    Tier(
        "cluster",
        "five agents and etcd in network namespaces, restarted in turn and cut off",
        programs=("etcd", "ip", "unshare"),
    ),
    Tier("chaos", "two minutes of agents that are killed, stopped and cut off while they transfer"),
    Tier("evaluate", "`hawk evaluate --quick` as a person runs it, its page in Chromium where that is there"),
    Tier("lab", "RDMA and kernel modules in virtual machines", first=("scripts/lib/vmlab", "prepare")),
    Tier("device", "an NVIDIA GPU", modules=("cupy",), programs=("nvidia-smi",)),
    Tier("vllm", "vLLM engines with HAWK between them", first=("scripts/lib/vllm_env.py",)),
    Tier(
        "engines",
        "transports on NIXL and on Mooncake's Transfer Engine",
        first=("scripts/lib/engines_env.py",),
        home=".venv-engines",
        instead="HAWK_ENGINES_PYTHON",
    ),
    Tier(
        "ttnn",
        "Tenstorrent's library against mock chips, and a simulated one where HAWK_TT_SIMULATOR names its library",
        first=("scripts/lib/ttnn_env.py",),
        home=".venv-ttnn",
        instead="HAWK_TTNN_PYTHON",
    ),
)
TIERS = {tier.name: tier for tier in (*QUICK, *MORE)}


def _importable(python: Path, module: str) -> bool:
    check = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0


def usage() -> str:
    """The help text."""
    lines = ["usage: scripts/test [TIER] [-- PYTEST ARGUMENTS]", ""]
    lines += [f"  {'(none)':<12}{', '.join(t.name for t in QUICK)}"]
    lines += [
        f"  {tier.name:<12}{tier.about}{'' if tier.built() else ' (not built yet)'}"
        for tier in TIERS.values()
    ]
    return "\n".join(lines)


def not_run(ran: set[str], python: Path) -> str:
    """A table of the tiers that this run left out, why, and the command for each."""
    rows = [("tier", "why it did not run", "command")]
    for tier in TIERS.values():
        if tier.name in ran:
            continue
        if not tier.built():
            why = "not built yet"
        elif lack := tier.lacks(python):
            why = f"not here: {lack}"
        elif tier.installs:
            why = f"runs on request; installs {', '.join(tier.installs)}"
        else:
            why = "runs on request"
        rows.append((tier.name, why, f"scripts/test {tier.name}"))
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    text = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
    return "\n".join(["tiers not run:", *text])


def selected(asked: list[Tier], extra: list[str]) -> list[str]:
    """The folders that pytest is given: the tiers' own, unless its arguments name files or folders themselves."""
    named = [a for a in extra if not a.startswith("-") and (ROOT / a.partition("::")[0]).exists()]
    return [] if named else [f"tests/{tier.name}" for tier in asked]


def workers(asked: list[Tier], extra: list[str]) -> list[str]:
    """Spreads whole files of the quick tiers over the processors; what is chosen by hand runs in one process."""
    if extra or any(tier not in QUICK for tier in asked):
        return []
    count = os.environ.get("HAWK_TEST_WORKERS") or str(min(len(os.sched_getaffinity(0)), 4))
    return [] if count in ("0", "1") else ["-n", count, "--dist", "loadfile"]


def compile_all(python: Path) -> None:
    """Writes byte code where that is not left to Python, so that the tests' hundreds of agents start twice as fast."""
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        command = [str(python), "-m", "compileall", "-q", "hawk", "transports", "layouts"]
        subprocess.run(command, cwd=ROOT, check=False)


def main(arguments: list[str]) -> int:
    """Runs the tiers; the exit status is pytest's, or 1 with one line if a tier cannot run."""
    extra: list[str] = []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, extra = arguments[:at], arguments[at + 1 :]
    if arguments and arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if len(arguments) > 1 or (arguments and arguments[0] not in TIERS):
        fail(
            f"no such tier: {' '.join(arguments)}; there are {', '.join(TIERS)} (pytest's arguments go after --)"
        )
    asked = [TIERS[arguments[0]]] if arguments else [tier for tier in QUICK if tier.built()]
    for tier in asked:
        if not tier.built():
            fail(f"the tier {tier.name} is not built yet: there is no test in tests/{tier.name}")
        if lack := tier.lacks(None):
            fail(f"the tier {tier.name} needs {lack}; install it and run this again")
    installs = tuple(p for tier in asked for p in tier.installs)
    for tier in asked:  # a Python that was given is looked at before minutes go into another
        if tier.given() and subprocess.run([sys.executable, *tier.first], cwd=ROOT, check=False).returncode:
            return 1
    python = ensure("test", installs)
    for tier in asked:
        if lack := tier.lacks(python):
            fail(f"the tier {tier.name} needs {lack}; install it into .venv and run this again")
    compile_all(python)
    for tier in asked:
        if tier.given() or not tier.first:
            continue
        if subprocess.run([str(python), *tier.first], cwd=ROOT, check=False).returncode != 0:
            return 1
    table = not_run({tier.name for tier in asked}, python)
    in_ci = os.environ.get("CI", "").lower() in ("1", "true")
    if in_ci and not arguments:  # CI reads pytest's own closing line, so there the table comes first
        print(table, flush=True)
    command = [
        str(asked[0].python(python)),
        "-m",
        "pytest",
        *workers(asked, extra),
        *selected(asked, extra),
        *extra,
    ]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if not in_ci and not arguments:
        print(table, flush=True)
    if status < 0:
        say(f"pytest was ended by signal {-status}")
        return 128 - status
    return status


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except SetupError as error:
        fail(str(error))
    except OSError as error:
        fail(f"set-up failed: {error}; mend that and run this again")
    except KeyboardInterrupt:
        fail("interrupted")
    raise SystemExit(code)
