"""One line of what the doctor says."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How a finding is meant: `ok`; `warn`, something is slower or not to be had; `fail`, agents cannot run well."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it is, and what to do about it where it is not well.

    name      of what was looked at: a word or two
    text      what was found
    remedy    what to do; empty where there is nothing to do
    """

    name: str
    level: Level
    text: str
    remedy: str = ""


def ok(name: str, text: str) -> Finding:
    """All is well."""
    return Finding(name, Level.OK, text)


def warn(name: str, text: str, remedy: str) -> Finding:
    """Something could be better, or is not to be had."""
    return Finding(name, Level.WARN, text, remedy)


def fail(name: str, text: str, remedy: str) -> Finding:
    """Agents cannot run like this."""
    return Finding(name, Level.FAIL, text, remedy)
