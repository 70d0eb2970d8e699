"""Which suites there are: tests/lab/suites.toml, one table for each."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vmlab.errors import LabError

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "tests" / "lab" / "suites.toml"
GUEST_TESTS = ROOT / "tests" / "lab" / "guest"


@dataclass(frozen=True)
class Suite:
    """Tests that run together in guests.

    name      as the command and the test know it
    about     in a few words
    files     of tests/lab/guest; pytest runs them in every guest, with HAWK_LAB_NODE 1 or 2
    guests    1 or 2; they can reach each other
    timeout   seconds in the guest, start of Python included
    build     folders of the tree that hold a kernel module: built before, found by HAWK_LAB_BUILD_<NAME>
    complains whether the kernel may say BUG or WARNING meanwhile, because the suite wants it to
    by_hand   only `scripts/vm-lab run NAME` runs it, and not `scripts/test lab`
    beside    a suite of one guest that may run in the other guest at the same time; both have one guest
    tests     which of the files' tests, as pytest's -k has it; all if empty
    """

    name: str
    about: str
    files: tuple[str, ...]
    guests: int = 1
    timeout: float = 180.0
    build: tuple[str, ...] = ()
    complains: bool = False
    by_hand: bool = False
    beside: str = ""
    tests: str = ""


def load_suites(path: Path = TABLE, tests: Path = GUEST_TESTS) -> dict[str, Suite]:
    """All suites, in the order of the file.  Raises `LabError` that names the table and the key."""
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise LabError(f"{path}: {error}") from None
    found = {name: _suite(path, name, table, tests) for name, table in tables.items()}
    for suite in found.values():
        other = found.get(suite.beside)
        if suite.beside and (
            other is None or other is suite or other.beside or other.guests + suite.guests > 2
        ):
            raise LabError(
                f"{path.name}, [{suite.name}]: beside = {suite.beside!r}, expected another suite of one guest"
            )
    return found


def together(chosen: Sequence[Suite]) -> list[tuple[Suite, ...]]:
    """What runs after one another, in order: a suite, or two of one guest that share the guests."""
    here = {suite.name: suite for suite in chosen}
    seconds = {suite.beside: suite for suite in chosen if suite.beside in here}
    firsts = [suite for suite in chosen if suite.beside not in here]
    return [(suite, seconds[suite.name]) if suite.name in seconds else (suite,) for suite in firsts]


def _suite(path: Path, name: str, table: object, tests: Path) -> Suite:
    where = f"{path.name}, [{name}]"
    if not isinstance(table, dict):
        raise LabError(f"{where}: a table is expected, not {table!r}")
    known = {field.name: field for field in fields(Suite)}
    wanted = {
        "about": str,
        "files": list,
        "guests": int,
        "timeout": (int, float),
        "build": list,
        "complains": bool,
        "by_hand": bool,
        "beside": str,
        "tests": str,
    }
    for key, value in table.items():
        kind = wanted.get(key)
        if kind is None:
            raise LabError(f"{where}: no such key {key!r}; there are {', '.join(wanted)}")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):  # type: ignore[arg-type]
            raise LabError(f"{where}: {key} = {value!r} is of the wrong kind")
    for key in ("about", "files"):
        if not table.get(key):
            raise LabError(f"{where}: {key} is missing")
    if table.get("guests", 1) not in (1, 2):
        raise LabError(f"{where}: guests = {table['guests']}, expected 1 or 2")
    for file in table["files"]:
        if not (tests / str(file)).is_file():
            raise LabError(f"{where}: there is no {file} in {tests.name}")
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
    }
    assert set(values) <= set(known)
    return Suite(name=name, **values)
