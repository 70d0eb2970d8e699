"""A run of the lab: guests that are booted once for several suites, and the suites' results."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from vmlab import initrd, packages
from vmlab.errors import GuestDied, GuestStuck, LabError
from vmlab.guest import Done, Guest, wait
from vmlab.kernel import CHOICE, DEFAULT, Kernel, build, cache_folder, find, locked
from vmlab.suites import ROOT, Suite

BAR_BYTES = 16 << 20
PASSED_ON = ("CI", "HAWK_CORE", "HAWK_LAB_SEED")
"""Variables that guests get where they are set here."""

COMPILED = (
    "hawk",
    "transports",
    "layouts",
    "tests/lab",
    "tests/end_to_end",
    "tests/contract",
    "tests/reference",
)
"""Folders of the tree from which guests import."""

PYVERBS = "/usr/lib/python3/dist-packages/pyverbs"


FOLDER, KEPT = "hawk-vm-lab-", "kept"
"""How a run's folder begins, and what lies in one that is to stay."""


def _run_folder() -> tuple[Path, int]:
    """A fresh folder, and the descriptor that locks it for as long as this process lives.

    Those of runs that were killed are removed: their locks have ended with them.
    """
    folder = Path(tempfile.mkdtemp(prefix=FOLDER))
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    for other in folder.parent.glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError):
            if other != folder and not (other / KEPT).exists():
                _remove_dead(other)
    return folder, lock


def _remove_dead(folder: Path) -> None:
    """Removes a run's folder that nobody has locked; not within a minute, for its lock may be on its way."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        about = os.fstat(fd)
        if about.st_uid == os.geteuid() and about.st_mtime + 60 < time.time():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(fd)


@dataclass
class SuiteResult:
    """How a suite ended in every guest it ran in."""

    suite: Suite
    seconds: float = 0.0
    tests: int = 0
    failures: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether tests ran in every guest, all passed, and no kernel complained."""
        quiet = self.suite.complains or not self.complaints
        return bool(self.tests) and not self.failures and quiet

    def line(self) -> str:
        """One line of it."""
        state = "passed" if self.ok else "FAILED"
        guests = "one guest" if self.suite.guests == 1 else "two guests"
        return f"{self.suite.name}: {state}, {self.tests} tests in {guests}, {self.seconds:.0f} s"

    def report(self) -> str:
        """All there is to know of one that failed."""
        lines = [self.line(), *self.failures]
        lines += [f"the kernel: {line}" for line in self.complaints]
        for done in self.done:
            lines += [f"--- node {done.node}, status {done.status}", *done.output.splitlines()[-200:]]
        return "\n".join(lines)


class Lab:
    """Guests and what prepares them.  `with Lab(...) as lab:`; they end with the block.

    python    the interpreter that the guests run tests with; this one's modules are theirs
    say       is told what goes on, a line at a time
    on_line   is told what guests print: node, line
    keep      leaves the folder of the run (consoles, logs) behind and says where it is
    least     how many guests are booted, whoever asks for one: where two will be needed, that is one boot less
    """

    def __init__(
        self,
        *,
        choice: str | None = None,
        python: str = sys.executable,
        say: Callable[[str], None] = lambda text: None,
        on_line: Callable[[int, str], None] | None = None,
        keep: bool = False,
        least: int = 1,
    ) -> None:
        self.cache = cache_folder()
        self.python = python
        self.say = say
        self.on_line = on_line
        self.keep = keep
        self.least = least
        self.boots: list[float] = []
        self._choice = choice or os.environ.get(CHOICE) or DEFAULT
        self._guests: list[Guest] = []
        self._folder: Path | None = None
        self._lock = -1
        self._kernel: Kernel | None = None
        self._initrd: Path | None = None

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- preparing ---------------------------------------------------------------------------------------

    def prepare(self) -> Kernel:
        """Packages, kernel and initrd; quick where they are there.  Raises `LabError`."""
        if self._kernel is None:
            packages.ensure(packages.RUNNING, self.say)
            with locked(self.cache):
                kernel = find(self._choice, self.cache, self.say)
                self._initrd = initrd.make(kernel, self.cache, self.say)
            self._kernel = kernel
        return self._kernel

    def built(self, folder: str) -> Path:
        """The kernel module in that folder of the tree, built for the guests' kernel."""
        kernel = self.prepare()
        with locked(self.cache):
            return build(kernel, ROOT / folder, self.cache, self.say)

    def check_python(self) -> None:
        """Raises `LabError` unless the distribution's pyverbs can be imported by `python`."""
        names = [path.name for path in Path(PYVERBS).glob("device.cpython-*.so")]
        have = f"cpython-{sys.version_info[0]}{sys.version_info[1]}"
        if names and self.python == sys.executable and not any(have in name for name in names):
            wanted = names[0].split("-")[1]
            raise LabError(
                f"this Python is {have.removeprefix('cpython-')}, the distribution's pyverbs is for {wanted}; "
                f"remove .venv and set HAWK_PYTHON to a Python of that version"
            )

    # -- guests ------------------------------------------------------------------------------------------

    def guests(self, count: int = 1) -> list[Guest]:
        """The first `count` guests, up and idle; boots them where they are not."""
        if len(self._guests) < count or not all(guest.alive() for guest in self._guests):
            self._boot(max(count, self.least))
        return self._guests[:count]

    def _boot(self, count: int) -> None:
        """Boots so many; once more where one does not come up, which a kernel on starved processors may not."""
        kernel = self.prepare()
        self._compile()
        began = time.monotonic()
        self.say(f"booting {count} guest{'s' * (count > 1)}, Linux {kernel.version}")
        try:
            self._start(count, kernel)
        except GuestStuck as error:
            self.say(f"{error}\nbooting once more")
            self._start(count, kernel)
        self.boots.append(time.monotonic() - began)
        self.say(f"up after {self.boots[-1]:.0f} s")

    def _start(self, count: int, kernel: Kernel) -> None:
        """Starts so many guests, in place of any that are there; they are up when this returns."""
        assert self._initrd is not None
        self.stop()
        if self._folder is None:
            self._folder, self._lock = _run_folder()
        folder = self._folder
        bar = folder / "bar"
        bar.write_bytes(b"")
        os.truncate(bar, BAR_BYTES)
        wire = folder / "wire"
        wire.unlink(missing_ok=True)
        began = time.monotonic()
        try:
            # The one that listens comes first, since the other one connects as it starts.
            for node in range(count, 0, -1):
                # Where nobody connects, what is sent is dropped; a hub with nobody else on it would hold it for ever.
                role = "on" if node == count else "off"
                end = f"stream,id=wire,server={role},addr.type=unix,addr.path={wire}"
                guest = Guest(node, kernel, self._initrd, folder, wire=end, bar=bar if node == 1 else None)
                self._guests.insert(0, guest)
                while not wire.exists():
                    guest.check()
                    if time.monotonic() > began + 30:
                        raise GuestStuck("QEMU did not open the guests' network in 30 s")
                    time.sleep(0.02)
            # Each is asked, so that one that died is told of while another one still boots.
            while sum(guest.ready() for guest in self._guests) < count:
                time.sleep(0.1)
        except LabError:
            self.stop()
            raise

    def _compile(self) -> None:
        """Compiles the tree's modules, on which every process of a guest would spend half a minute.

        Where that cannot be written guests do it, as slowly as they do.
        """
        folders = [str(ROOT / name) for name in COMPILED]
        command = [self.python, "-m", "compileall", "-q", *folders]
        subprocess.run(command, capture_output=True, check=False, timeout=300)

    def stop(self) -> None:
        """Ends all guests; what is asked for next boots anew."""
        while self._guests:
            self._guests.pop().close()

    def close(self) -> None:
        """Ends all guests and removes what the run left."""
        self.stop()
        if self._folder is not None:
            if self.keep:
                (self._folder / KEPT).touch()
                self.say(f"logs are in {self._folder}")
            else:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- suites ------------------------------------------------------------------------------------------

    def environment(self, node: int, suite: Suite | None = None) -> dict[str, str]:
        """What commands of a suite find in their environment."""
        kernel = self.prepare()
        values = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        values |= {
            "PYTHONPATH": str(ROOT),
            "HAWK_LAB_NODE": str(node),
            "HAWK_LAB_PYTHON": self.python,
            "HAWK_LAB_KERNEL": kernel.version,
            "HAWK_LAB_PATIENCE": str(kernel.patience),
            "HAWK_LAB_GUESTS": str(suite.guests if suite is not None else 1),
            # Looking for plug-ins and reading those that no guest needs costs seconds there; see `_command`.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            # Of the transport contract, and of whoever starts agents: starting Python alone takes long there.
            "HAWK_CONTRACT_LIMIT": "240",
            "HAWK_TEST_LIMIT": "180",
        }
        for folder in suite.build if suite is not None else ():
            values[f"HAWK_LAB_BUILD_{Path(folder).name.upper()}"] = str(self.built(folder))
        return values

    def run(self, suite: Suite, arguments: Sequence[str] = ()) -> SuiteResult:
        """Runs a suite.  After one that failed, guests are not used again.  Raises `LabError`."""
        (result,) = self.run_together((suite,), arguments)
        return result

    def run_together(self, suites: Sequence[Suite], arguments: Sequence[str] = ()) -> list[SuiteResult]:
        """Runs a suite, or two of one guest at the same time, each in its own; as `run` does."""
        self.check_python()
        whose = [suite for suite in suites for _ in range(suite.guests)]
        environments = [self.environment(node, suite) for node, suite in enumerate(whose, 1)]
        guests = self.guests(len(whose))
        running = []
        for guest, suite, environment in zip(guests, whose, environments, strict=True):
            patient = replace(suite, timeout=suite.timeout * guest.kernel.patience)
            command = self._command(patient, arguments)
            (guest.shared / "result.xml").unlink(missing_ok=True)
            one = guest.start(command, timeout=patient.timeout, environment=environment, folder=ROOT)
            running.append(one)
        results = {suite.name: SuiteResult(suite) for suite in suites}
        try:
            wait(running, self.on_line)
        except (GuestDied, GuestStuck) as error:
            for result in results.values():
                result.failures.append(str(error))
            self.stop()
        for guest, suite, one in zip(guests, whose, running, strict=True):
            result = results[suite.name]
            if one.done is not None:
                result.done.append(one.done)
                self._judge(result, guest, one.done)
            result.complaints += [f"node {guest.node}: {line}" for line in guest.complaints()]
            took = one.done.seconds if one.done is not None else time.monotonic() - one.began
            result.seconds = max(result.seconds, took)
        if not all(result.ok for result in results.values()):
            self.stop()
        return list(results.values())

    def _command(self, suite: Suite, arguments: Sequence[str]) -> str | list[str]:
        """What runs a suite in a guest."""
        options = ["-v", "-o", f"timeout={suite.timeout:.0f}", "--junitxml=/lab/result.xml"]
        for name in ("pytest_asyncio.plugin", "pytest_timeout", "no:cacheprovider"):
            options += ["-p", name]
        if suite.tests:
            options += ["-k", " ".join(suite.tests.split())]
        files = [f"tests/lab/guest/{file}" for file in suite.files]
        return [self.python, "-m", "pytest", *options, *files, *arguments]

    def _judge(self, result: SuiteResult, guest: Guest, done: Done) -> None:
        """Adds what one guest's results file says; its absence is a failure whatever the status."""
        try:
            tree = ET.parse(guest.shared / "result.xml")
        except (OSError, ET.ParseError):
            how = "ran out of time" if done.timed_out else f"ended with status {done.status}"
            result.failures.append(f"node {guest.node} {how} and left no results")
            return
        cases = list(tree.iter("testcase"))
        result.tests += len(cases)
        if not cases:
            result.failures.append(f"node {guest.node} ran no test")
        bad = [case for case in cases if any(case.find(kind) is not None for kind in ("failure", "error"))]
        result.failures += [f"node {guest.node}: {case.get('name')} failed" for case in bad]
        if done.status != 0 and not bad:
            result.failures.append(f"node {guest.node} ended with status {done.status}")
