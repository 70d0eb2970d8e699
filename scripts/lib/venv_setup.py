"""Makes `.venv` in the clone and installs the project there; quick when there is nothing to do.

Runs on any Python 3.11 to 3.13 with nothing but the standard library.  The stamp is written last, so a set-up
that was killed is begun anew.  Every failure is one line that says what to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import selectors
import shutil
import subprocess
import sys
import textwrap
import time
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
MB = 1_000_000
CORE_MB = 600
MODEL_MB = 3000
LOCK_SECONDS = 900
HEARTBEAT_SECONDS = 15

# What to tell for what pip said, first match first.
REMEDIES = (
    (r"No space left on device|Disk quota exceeded", "the disk is full; free some space and run this again"),
    (
        r"Permission denied|Read-only file system",
        "pip may not write there; mend the folder's permissions and run this again",
    ),
    (
        r"No matching distribution|Could not find a version|Connection|timed out|name resolution|SSL|[Pp]roxy|HTTP",
        "a download failed; check the network and pip's settings (pip config list), then run this again",
    ),
)


class SetupError(Exception):
    """What went wrong and what to do, in one line."""


def say(text: str) -> None:
    """One line of progress, on stderr: stdout belongs to the command that follows."""
    print(f"hawk: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    """Ends the process with one line."""
    say(text)
    raise SystemExit(1)


class Environment:
    """A place in the clone, `.venv` or another, and what is known to be installed in it.

    asked    what it is made of beside HAWK, as far as that can change
    """

    def __init__(self, root: Path = ROOT, place: str = ".venv", asked: Sequence[str] = ()) -> None:
        self.root = root.resolve()
        self.asked = tuple(asked)
        self.path = root / place
        self.python = self.path / "bin" / "python"
        self.stamp = self.path / "hawk-setup.json"
        self.unfinished = self.path / "hawk-setup-unfinished"
        self.log = self.path / "hawk-setup.log"

    def key(self) -> str:
        """Changes when the project has to be installed again: requirements, C sources, place, Python."""
        digest = hashlib.sha256(f"{self.root}\n{self._version()}\n".encode())
        retile = self.root / "hawk" / "retile"
        for file in [self.root / "pyproject.toml", self.root / "setup.py", *sorted(retile.glob("*.[ch]"))]:
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
        for asked in self.asked:
            digest.update(asked.encode() + b"\n")
        return digest.hexdigest()

    def _version(self) -> str:
        """The version that `.venv` says it was made with; no process is started for it."""
        try:
            text = (self.path / "pyvenv.cfg").read_text()
        except OSError:
            return ""
        match = re.search(r"^version\s*=\s*(\S+)", text, re.MULTILINE)
        return match.group(1) if match else ""

    def installed(self) -> tuple[str, set[str]]:
        """The key and the parts of the last set-up that ended well; empty if there is none."""
        if self.unfinished.exists() or not self.python.exists():
            return "", set()
        try:
            stamp = json.loads(self.stamp.read_text())
            return str(stamp["key"]), set(stamp["parts"])
        except (OSError, ValueError, KeyError, TypeError):
            return "", set()

    def replaced(self) -> bool:
        """Whether the `hawk` in there is a copy, or another clone's: `pip install PATH` without `-e` does that."""
        for found in self.path.glob("lib/python*/site-packages/hawk_kv-*.dist-info"):
            try:
                said = json.loads((found / "direct_url.json").read_text())
                editable, place = said["dir_info"].get("editable"), urllib.parse.urlparse(said["url"]).path
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                return True
            if not editable or Path(urllib.parse.unquote(place)).resolve() != self.root:
                return True
        return False

    def ready(self, parts: set[str]) -> bool:
        """Whether nothing has to be done for these parts."""
        key, have = self.installed()
        return parts <= have and key == self.key() and not self.replaced()

    def finish(self, parts: set[str]) -> None:
        """Marks the set-up as done; the stamp appears whole or not at all."""
        new = self.stamp.with_suffix(".new")
        new.write_text(json.dumps({"key": self.key(), "parts": sorted(parts)}) + "\n")
        self.unfinished.unlink(missing_ok=True)
        new.replace(self.stamp)


def ensure(extra: str = "", packages: tuple[str, ...] = (), env: Environment | None = None) -> Path:
    """Sets up what is missing and returns `.venv`'s Python.  `extra` is ours; `packages` are pip specifiers."""
    env = env or Environment()
    parts = {extra or "core", *packages}
    if env.ready(parts):
        return env.python
    _check_place(env, MODEL_MB if packages else CORE_MB)
    with _lock(env):
        if env.ready(parts):  # the one we waited for did it
            return env.python
        key, have = env.installed()
        _make_venv(env)
        env.unfinished.touch()
        replaced = env.replaced()
        if replaced:
            say(f"the hawk in {env.path.name} is not this clone's; installing it anew")
        if replaced or key != env.key() or (extra or "core") not in have:
            ours = ",".join(sorted((have & {"test"}) | ({extra} - {""})))
            _pip(env, ["-e", f".[{ours}]" if ours else "."], "HAWK and what it needs")
        if missing := [p for p in packages if p not in have]:
            _pip(env, missing, " and ".join(missing))
        env.finish(have | parts | {"core"})
        say("set-up done")
    return env.python


def ensure_place(
    env: Environment,
    part: str,
    megabytes: int,
    said: str,
    steps: Sequence[tuple[list[str], str]],
    last: Callable[[], None] = lambda: None,
) -> None:
    """Sets up a tier's own place: what pip is to install and what that is called, step by step, then `last`."""
    if env.ready({part}):
        return
    _check_place(env, megabytes)
    with _lock(env):
        if env.ready({part}):  # the one we waited for did it
            return
        _make_venv(env)
        env.unfinished.touch()
        say(said)
        for arguments, what in steps:
            _pip(env, arguments, what)
        last()
        env.finish({part})
        say("set-up done")


def tier_main(
    variable: str, what: str, ensure: Callable[[], None], look: Callable[[str], None] | None = None
) -> None:
    """A tier's set-up as a program: exits with 1 and one line if its place cannot be made.

    `variable` may name a Python that has `what` already, which `look` looks at.
    """
    given = os.environ.get(variable)
    try:
        if not given:
            ensure()
        elif look is not None:
            look(given)
        elif not Path(given).exists():
            raise SetupError(
                f"{variable}={given} is not there; set it to a Python that has {what}, or unset it"
            )
    except SetupError as error:
        fail(str(error))
    except OSError as error:
        fail(f"set-up failed: {error}; mend that and run this again")


def _check_place(env: Environment, megabytes: int) -> None:
    for folder in (env.root, env.path):
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            raise SetupError(f"cannot write into {folder}; make it yours, or clone into a folder that is")
    free = shutil.disk_usage(env.root).free // MB
    if free < megabytes:
        raise SetupError(
            f"{free} MB free where {env.root} lies, {megabytes} MB needed; free some and run this again"
        )


@contextlib.contextmanager
def _lock(env: Environment) -> Iterator[None]:
    """One set-up at a time in one clone.  The lock is on the folder itself and dies with its process."""
    fd = os.open(env.root, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        told = False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SetupError(
                        f"another set-up has held this clone for {LOCK_SECONDS // 60} minutes; end it and try again"
                    ) from None
            if not told:
                say("another set-up is running in this clone; waiting for it")
                told = True
            time.sleep(0.2)
        yield
    finally:
        os.close(fd)


def _make_venv(env: Environment) -> None:
    """A `.venv` that runs.  One of ours that is unfinished or broken is made anew; a stranger's is kept or refused."""
    ours = (
        env.stamp.exists() or env.unfinished.exists() or not env.path.exists() or not any(env.path.iterdir())
    )
    if not env.unfinished.exists():
        if _runs(env.python):
            return
        if not ours:
            raise SetupError(
                f"{env.path} holds no Python 3.11 to 3.13 that runs; remove it and run this again"
            )
    _leave(env.path)
    if env.unfinished.exists():
        say("the last set-up did not finish; starting anew")
    removed = env.path.with_name(
        ".venv-removed"
    )  # renamed first: a half-removed .venv would look like a stranger's
    shutil.rmtree(removed, ignore_errors=True)
    if env.path.exists():
        env.path.replace(removed)
        shutil.rmtree(removed, ignore_errors=True)
    env.path.mkdir()
    env.unfinished.touch()
    base = _base_python()
    say(f"making {env.path.name} with Python {sys.version.split()[0]}")
    done = subprocess.run([base, "-m", "venv", str(env.path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if "ensurepip" in done.stdout + done.stderr:
            name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
            raise SetupError(f"{name} has no venv module; install the package {name}-venv and run this again")
        last = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise SetupError(f"{base} -m venv failed: {last[-1]}; mend that or set HAWK_PYTHON to another Python")


def _runs(python: Path) -> bool:
    check = "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))"
    if not python.exists():
        return False
    try:
        return subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _base_python() -> str:
    """The Python outside any virtual environment, so that `.venv` does not hang on what we are about to remove."""
    return str(getattr(sys, "_base_executable", None) or sys.executable)


def _leave(path: Path) -> None:
    """Restarts this process on the base Python if it runs on the `.venv` that has to go."""
    if Path(sys.prefix).resolve() == path.resolve():
        base = _base_python()
        if Path(base).resolve().is_relative_to(path.resolve()):
            raise SetupError(
                f"{path} is unfinished and no other Python is known; remove it and run this again"
            )
        os.execv(base, [base, *sys.argv])


def _pip(env: Environment, arguments: list[str], what: str) -> None:
    """`pip install` under the user's own pip settings, telling what it does as it goes."""
    say(f"installing {what}")
    begun, doing = time.monotonic(), what
    settings = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    command = [str(env.python), "-m", "pip", "install", *arguments]
    said = ""
    with (
        env.log.open("a") as log,
        subprocess.Popen(
            command,
            cwd=env.root,
            env=settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        ) as pip,
        selectors.DefaultSelector() as ready,
    ):
        assert pip.stdout is not None
        ready.register(pip.stdout, selectors.EVENT_READ)
        rest = b""
        while True:
            if not ready.select(HEARTBEAT_SECONDS):
                say(f"  still at it after {time.monotonic() - begun:.0f} s: {doing}")
                continue
            data = os.read(pip.stdout.fileno(), 65536)
            *lines, rest = (rest + data).split(b"\n")
            if not data and rest:
                lines, rest = [rest], b""
            for raw in lines:
                line = raw.decode(errors="replace").rstrip()
                log.write(line + "\n")
                said += line + "\n"
                if re.match(r"\s*(Collecting|Downloading|Building|Installing collected)\b", line):
                    doing = _short(line.strip())
                    say(f"  {doing}")
            if not data:
                break
    if pip.returncode != 0:
        reason, remedy = _diagnose(said.splitlines())
        raise SetupError(f"pip install failed ({reason}): {remedy}; all it said is in {env.log}")


def _short(line: str) -> str:
    """What pip says that it does, without addresses and the platforms of a wheel, cut between words."""
    line = re.sub(r"https?://\S+/", "", line)
    line = re.sub(r"-(cp|py)\d\S*\.whl", "", line)
    line = re.sub(r"^Building (wheel|editable) for hawk-kv\b.*", "Building hawk-kv with its C core", line)
    return textwrap.shorten(line, 100, placeholder=" ...")


def _diagnose(lines: list[str]) -> tuple[str, str]:
    """pip's own reason, and what to do about it."""
    errors = [line.strip() for line in lines if re.match(r"\s*error\b", line, re.IGNORECASE)] or lines
    for pattern, remedy in REMEDIES:
        for line in (*errors, *lines):
            if re.search(pattern, line):
                return line.strip()[:160], remedy
    told = [line for line in errors if "subprocess-exited" not in line and line.strip()]
    return (told[-1].strip()[:160] if told else "it gave no reason"), "mend that and run this again"


def main() -> None:
    """Sets up for running, without the tests' tools."""
    try:
        ensure()
    except SetupError as error:
        fail(str(error))
    except OSError as error:
        fail(f"set-up failed: {error}; mend that and run this again")
    except KeyboardInterrupt:
        fail("interrupted; run this again to start the set-up anew")


if __name__ == "__main__":
    main()
