"""scripts/lib/vmlab: how guests and suites end, with a small program in the place of the machine."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vmlab
from vmlab import guest as guests
from vmlab import kernel
from vmlab import lab as labs

LIB = Path(vmlab.__file__).resolve().parents[1]

QEMU = """#!{python}
import sys, time, pathlib, os
given = sys.argv[1:]
shared = pathlib.Path(next(a.split("path=")[1].split(",")[0] for a in given if a.startswith("local,id=lab")))
console = pathlib.Path(next(a.split("path=")[1].split(",")[0] for a in given if a.startswith("file,")))
(shared / "up").touch()
number = 1
while True:
    if (shared / "do" / f"{{number}}.go").exists():
        text = (shared / "do" / str(number)).read_text()
        if "panic" in text:
            console.write_text("Kernel panic - not syncing\\n")
            sys.exit(0)
        if "stay" not in text:
            (shared / "did" / f"{{number}}.log").write_text("words\\n")
            if "results" in text:
                (shared / "result.xml").write_text(text.split("results ")[1])
            new = shared / "did" / f"{{number}}.new"
            new.write_text("3" if "fail" in text else "0")
            new.rename(new.with_suffix(".status"))
            number += 1
    time.sleep(0.01)
"""


@pytest.fixture
def fake(unpacked: kernel.Kernel, tmp_path: Path) -> Any:
    """Makes a guest whose machine is a small program; it ends with the test."""
    program = tmp_path / "qemu"
    program.write_text(QEMU.format(python=sys.executable))
    program.chmod(0o755)
    made = []

    def make(node: int = 1) -> guests.Guest:
        made.append(
            guests.Guest(node, unpacked, tmp_path / "initrd", tmp_path, wire="none", program=str(program))
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def _wait_up(guest: guests.Guest) -> None:
    while not guest.ready():
        pass


def test_a_command_ends_with_what_the_guest_left(fake: Any) -> None:
    guest = fake()
    _wait_up(guest)
    done = guest.run("fail", timeout=5)
    assert (done.node, done.status, done.output, done.timed_out) == (1, 3, "words\n", False)
    lines: list[tuple[int, str]] = []
    guests.wait([guest.start("true", timeout=5)], lambda node, line: lines.append((node, line)))
    assert lines == [(1, "words")]


def test_a_guest_that_ends_is_told_with_its_console(fake: Any) -> None:
    guest = fake()
    _wait_up(guest)
    with pytest.raises(vmlab.GuestDied, match="Kernel panic"):
        guest.run("panic", timeout=30)  # its status is 0, which means nothing


def test_a_guest_that_does_not_end_a_command_is_ended(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "GRACE", 0.0)
    guest = fake()
    _wait_up(guest)
    with pytest.raises(vmlab.GuestStuck, match="did not end a command"):
        guest.run("stay", timeout=0.1)
    assert not guest.alive()


def test_a_guest_that_does_not_come_up_is_ended(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "BOOT_SECONDS", 0.0)
    guest = fake()
    with pytest.raises(vmlab.GuestStuck, match="was not up"):
        while True:
            if guest.ready():
                (guest.shared / "up").unlink(missing_ok=True)
    assert not guest.alive()


@pytest.mark.parametrize("stuck", [1, 2])
def test_guests_that_do_not_come_up_are_booted_once_more(
    unpacked: kernel.Kernel, monkeypatch: pytest.MonkeyPatch, stuck: int
) -> None:
    said: list[str] = []
    starts: list[int] = []

    def start(lab: labs.Lab, count: int, kernel: kernel.Kernel) -> None:
        starts.append(count)
        if len(starts) <= stuck:
            raise vmlab.GuestStuck("node 1 was not up after 180 s")

    monkeypatch.setattr(labs.Lab, "prepare", lambda lab: unpacked)
    monkeypatch.setattr(labs.Lab, "_compile", lambda lab: None)
    monkeypatch.setattr(labs.Lab, "_start", start)
    with labs.Lab(say=said.append) as lab:
        if stuck == 1:
            lab.guests(2)
        else:
            with pytest.raises(vmlab.GuestStuck, match="not up"):
                lab.guests(2)
    assert starts == [2, 2]
    assert any("booting once more" in line for line in said)


def test_the_machine_ends_with_its_parent(fake: Any, tmp_path: Path) -> None:
    """However the parent ends; a kill leaves it no time to clean up."""
    del fake  # for the program
    script = f"""
import sys, pathlib, time
sys.path.insert(0, {str(LIB)!r})
from vmlab import guest, kernel
root = pathlib.Path({str(tmp_path)!r})
one = guest.Guest(1, kernel.find(str(root / "kernel"), root, print), root / "i", root, wire="none",
                  program=str(root / "qemu"))
while not one.ready(): pass
print(one.process.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        machine = os.pidfd_open(pid)
        try:
            parent.kill()
            parent.wait(30)
            ready, _, _ = select.select([machine], [], [], 30)
            assert ready
        finally:
            os.close(machine)


@pytest.mark.parametrize(
    ("line", "complains"),
    [
        ("BUG: kernel NULL pointer dereference", True),
        ("WARNING: CPU: 0 PID: 1 at drivers/x.c:1", True),
        ("INFO: task python:12 blocked for more than 60 seconds.", True),
        ("DMA-API: device driver frees memory it does not have", True),
        ("rdma_rxe: loaded", False),
        ("debug: nothing", False),
    ],
)
def test_what_counts_as_a_complaint(fake: Any, line: str, complains: bool) -> None:
    guest = fake()
    _wait_up(guest)
    guest.console_file.write_text(f"[ 1.0] {line}\n")
    assert bool(guest.complaints()) is complains
    assert guest.complaints() == []  # said once


def test_the_tree_is_compiled_before_guests_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("value = 1\n")
    monkeypatch.setattr(labs, "ROOT", tmp_path)
    monkeypatch.setattr(labs, "COMPILED", ("package", "absent"))
    vmlab.Lab()._compile()
    assert list((tmp_path / "package" / "__pycache__").glob("module.*.pyc"))


# -- judging -----------------------------------------------------------------------------------------------

GOOD = '<testsuites><testsuite><testcase name="a"/></testsuite></testsuites>'
BAD = '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure/></testcase></testsuite></testsuites>'


def _lab(fake: Any, monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str]) -> vmlab.Lab:
    """Guests are up, and what a suite of that name runs there is that script."""
    lab = vmlab.Lab()
    lab._guests = [fake(node) for node in range(1, len(scripts) + 1)]
    for guest in lab._guests:
        _wait_up(guest)
    monkeypatch.setattr(lab, "environment", lambda *_: {})
    monkeypatch.setattr(lab, "check_python", lambda: None)
    monkeypatch.setattr(lab, "_command", lambda suite, _: scripts[suite.name])
    return lab


def _judge(fake: Any, monkeypatch: pytest.MonkeyPatch, script: str) -> labs.SuiteResult:
    lab = _lab(fake, monkeypatch, {"one": script})
    return lab.run(vmlab.Suite("one", "a suite", ("smoke.py",)))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"results {GOOD}", None),
        ("true", "left no results"),
        (f"results {BAD}", "b failed"),
        ("results <testsuites/>", "ran no test"),
        (f"fail results {GOOD}", "ended with status 3"),
        ("panic", "Kernel panic"),
    ],
)
def test_a_suite_has_to_leave_good_results(
    fake: Any, monkeypatch: pytest.MonkeyPatch, script: str, said: str | None
) -> None:
    result = _judge(fake, monkeypatch, script)
    assert result.ok is (said is None), result.report()
    assert said is None or said in result.report()


@pytest.mark.parametrize(
    ("first", "second", "good"),
    [
        (f"results {GOOD}", f"results {GOOD}", (True, True)),
        (f"results {BAD}", f"results {GOOD}", (False, True)),
        (f"results {GOOD}", "true", (True, False)),
        ("stay", "panic", (False, False)),
    ],
)
def test_two_suites_of_one_guest_are_judged_apart(
    fake: Any, monkeypatch: pytest.MonkeyPatch, first: str, second: str, good: tuple[bool, bool]
) -> None:
    lab = _lab(fake, monkeypatch, {"one": first, "two": second})
    results = lab.run_together([vmlab.Suite(name, "a suite", ("smoke.py",)) for name in ("one", "two")])
    assert [result.suite.name for result in results] == ["one", "two"]
    assert tuple(result.ok for result in results) == good, [result.report() for result in results]
    assert bool(lab._guests) is all(good), "guests of a suite that failed are not used again"


def test_a_kernel_that_complains_fails_a_suite_that_passed() -> None:
    suite = vmlab.Suite("one", "a suite", ("smoke.py",))
    result = labs.SuiteResult(suite, tests=1, complaints=["WARNING: at x"])
    assert not result.ok
    assert "WARNING: at x" in result.report()
    assert labs.SuiteResult(vmlab.Suite("one", "x", ("s",), complains=True), 1.0, 1, [], ["BUG"]).ok


def test_nothing_is_left_in_the_temporary_folder(fake: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with vmlab.Lab() as lab:
        lab._folder = folder
        lab._guests = [fake()]
    assert not folder.exists()
    assert lab._guests == []


def test_the_folder_of_a_run_that_was_killed_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labs.tempfile, "tempdir", str(tmp_path))
    program = (
        f"import sys, time; sys.path.insert(0, {str(LIB)!r})\n"
        f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        "from vmlab import lab\nprint(lab._run_folder()[0], flush=True)\ntime.sleep(600)"
    )
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(3)]
    theirs = [Path(os.fsdecode(one.stdout.readline().strip())) for one in running if one.stdout]
    (theirs[2] / labs.KEPT).touch()
    stranger = tmp_path / "something-else"
    stranger.mkdir()
    for path in theirs:
        os.utime(path, (0, 0))
    for one in running[1:]:
        one.kill()
        one.wait()
    ours, lock = labs._run_folder()
    assert theirs[0].exists(), "its run lives"
    assert not theirs[1].exists()
    assert theirs[2].exists(), "it was to be kept"
    assert ours.exists()
    assert stranger.exists()
    os.close(lock)
    running[0].kill()
    running[0].wait()
    for one in running:
        assert one.stdout is not None
        one.stdout.close()
