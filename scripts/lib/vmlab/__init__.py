"""The lab: a stock Debian kernel in one or two QEMU guests, which see this machine's files and run tests there.

Used by `scripts/vm-lab` and by `tests/lab`; docs/lab.md is for people.  Nothing here needs more than the standard
library, since it runs before `.venv` is set up.
"""

from vmlab.errors import GuestDied, GuestStuck, LabError
from vmlab.guest import Done, Guest
from vmlab.lab import Lab, SuiteResult
from vmlab.suites import Suite, load_suites, together

__all__ = [
    "Done",
    "Guest",
    "GuestDied",
    "GuestStuck",
    "Lab",
    "LabError",
    "Suite",
    "SuiteResult",
    "load_suites",
    "together",
]
