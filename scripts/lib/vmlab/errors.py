"""What goes wrong in the lab, each in one line that says what to do where something can be done."""

from __future__ import annotations


class LabError(Exception):
    """The lab cannot be set up or cannot go on."""


class GuestDied(LabError):
    """A guest ended, or its kernel panicked, while something was to run there."""


class GuestStuck(LabError):
    """A guest did not answer in time; it has been ended."""
