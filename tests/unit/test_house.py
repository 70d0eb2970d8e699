"""The house rules: lint, format, types, layering, whose names may stand where, and what is never committed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINES_PER_MODULE = 400

OPTIONAL = (
    "torch", "cupy", "ttnn", "tt_umd", "pyverbs", "nixl", "jinja2", "matplotlib", "simpy", "transformers", "vllm"
)  # fmt: skip

VENDORS = (
    "tenstorrent",
    "blackhole",
    "wormhole",
    r"ascend(?!ing|s\b|ed\b|er)",
    "huawei",
    "groq",
    "cerebras",
    "habana",
    "gaudi",
)
MAY_NAME_VENDORS = re.compile(r"hawk/integrations/|hawk/memory/tenstorrent|layouts/.*\.toml$")

# Written in pieces, so that this file does not find itself.
NEVER_COMMITTED = re.compile(
    r"(^|[^A-Za-z0-9_./])/(" + "work|farm|root" + r")/|/tmp/[a-z]+" + "_|"
    r"pypi\." + r"org|python" + r"hosted|debian\." + r"org|npm" + "js"
)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def _tool(*arguments: str) -> None:
    done = _run(sys.executable, "-m", *arguments)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}{done.stderr}"


def _files() -> list[Path]:
    """What is committed or about to be, the symlinked folders once."""
    listed = _run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    assert listed.returncode == 0, "the house rules look at a git checkout"
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_lint() -> None:
    _tool("ruff", "check", "--quiet", "--output-format", "concise", ".")


def test_format() -> None:
    _tool("ruff", "format", "--quiet", "--diff", ".")


def test_types() -> None:
    _tool("mypy", "--no-error-summary", "hawk")


def test_layering() -> None:
    done = _run(str(Path(sys.executable).with_name("lint-imports")))
    assert done.returncode == 0, done.stdout + done.stderr


def test_vendors_are_named_only_where_they_may_be() -> None:
    word = re.compile("|".join(VENDORS), re.IGNORECASE)
    core = [
        path
        for path in _files()
        if path.relative_to(ROOT).parts[0] in ("hawk", "transports", "layouts")
        and not MAY_NAME_VENDORS.search(path.relative_to(ROOT).as_posix())
    ]
    assert len(core) > 20
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in core
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if word.search(line)
    ]
    assert not found, "\n".join(found)


def test_no_machine_path_or_registry_is_committed() -> None:
    found = []
    for path in _files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
            for number, line in enumerate(text.splitlines(), 1)
            if NEVER_COMMITTED.search(line)
        ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["cd /" + "work/x", "see https://py" + "pi.org/x", "'/" + "root/.cache'"])
def test_the_committed_text_rule_can_fail(text: str) -> None:
    assert NEVER_COMMITTED.search(text)


def test_modules_stay_readable() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for path in _files()
        if path.suffix == ".py" and (lines := len(path.read_text().splitlines())) > LINES_PER_MODULE
    ]
    assert not long, "\n".join(long)


IMPORTER = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is not there")

sys.meta_path.insert(0, Refuse())
import hawk
count = 0
for found in pkgutil.walk_packages(hawk.__path__, "hawk."):
    name = found.name
    if name.startswith("hawk.integrations") or name.rpartition(".")[2] == "__main__":
        continue
    importlib.import_module(name)
    count += 1
for name in hawk.__all__:
    getattr(hawk, name)
print(count)
"""


def test_the_core_imports_without_any_framework() -> None:
    done = _run(sys.executable, "-W", "error", "-c", IMPORTER.format(blocked=OPTIONAL))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def test_importing_hawk_imports_nothing_else() -> None:
    code = "import sys, hawk; print(sorted(m for m in sys.modules if m in ('numpy', 'zmq', 'click', 'hawk.errors')))"
    done = _run(sys.executable, "-c", code)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("link", ["transports", "layouts"])
def test_the_symlinked_folders_are_one(link: str) -> None:
    assert (ROOT / "hawk" / link).is_symlink()
    assert (ROOT / "hawk" / link).resolve() == ROOT / link
