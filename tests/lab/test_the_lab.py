"""The lab itself: what it says of a guest whose command fails, stays too long, or takes the kernel down."""

from __future__ import annotations

from pathlib import Path

import pytest
from vmlab import GuestDied, Lab

pytestmark = pytest.mark.timeout(400)


def test_a_command_has_its_status_and_its_words(lab: Lab) -> None:
    (guest, *_) = lab.guests()
    done = guest.run("echo here; echo there >&2; exit 3", timeout=20)
    assert (done.status, done.output) == (3, "here\nthere\n")


def test_a_command_that_stays_is_ended_and_takes_what_it_started_along(lab: Lab) -> None:
    (guest, *_) = lab.guests()
    done = guest.run("setsid sleep 3333 & sleep 3333", timeout=2)
    assert done.timed_out
    # What was killed is in the table until a processor has come to it.
    done = guest.run(
        "while grep -q '[3]333' /proc/[0-9]*/cmdline 2>/dev/null; do sleep 0.1; done", timeout=20
    )
    assert done.status == 0


def test_the_host_stays_as_it_is(lab: Lab) -> None:
    (guest, *_) = lab.guests()
    path = __file__ + ".written-by-a-guest"
    done = guest.run(f"echo mine >'{path}' && cat '{path}'", timeout=20)
    assert (done.status, done.output) == (0, "mine\n")
    assert not Path(path).exists()


def test_a_kernel_that_complains_is_heard(lab: Lab) -> None:
    (guest, *_) = lab.guests()
    guest.complaints()
    guest.run("echo '<4>WARNING: a test' >/dev/kmsg", timeout=20)
    assert any("a test" in line for line in guest.complaints())


def test_a_guest_that_panics_is_told_at_once(lab: Lab) -> None:
    (guest, *_) = lab.guests()
    with pytest.raises(GuestDied, match="sysrq"):
        guest.run("echo c >/proc/sysrq-trigger; sleep 60", timeout=90)
    lab.stop()
