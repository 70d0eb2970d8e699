"""Figures that benchmarks have written as JSON, on this machine or another: read, checked, and told what they are.

A file is one object of `hawk bench ... --json`, or of `scripts/bench gpu --json FOLDER`.  It names its benchmark, its
day and its version since those are written; older files are known by their fields.  Unknown fields are left alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from hawk.errors import InvalidArgument
from hawk.evaluate import schema

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from hawk.evaluate.records import Origin

LARGEST = 256 << 20
"""Bytes of a file at most; what benchmarks write is far smaller."""

KINDS: dict[str, type[msgspec.Struct] | None] = {
    "between": schema.Between,
    "transfer": schema.Transfer,
    "gpu": schema.Gpu,
    "retile": schema.Retile,
    "retile_cuda": schema.RetileCuda,
    "overlap": schema.Overlap,
    "fragmentation": schema.Fragmentation,
    "load": schema.Load,
    "chunks": None,
    "directory": None,
    "simulator": None,
    "engines": None,
    "integrity": None,
    "jobs": None,
    "plan": None,
    "ttft": None,
    "verbs": None,
}
"""By the module of `hawk.bench` that wrote it; None: known, and not shown in a report."""

_KNOWN_BY = {
    # Fields that no other benchmark's object has together.
    "between": {"devices", "pace", "sizes"},
    "overlap": {"mps", "chunk", "sizes"},
    "gpu": {"device", "runs", "sizes", "correct"},
    "fragmentation": {"schemes", "channel_bytes"},
    "load": {"calibration", "rates", "lacks"},
    "retile": {"instructions", "rows"},
    "retile_cuda": {"device", "rows", "cache_bytes"},
    "transfer": {"left_out", "sizes"},
}

_SAID = re.compile(
    r"Expected `(?P<expected>.+?)`(?P<bound>[^,]*?)(?:, got `(?P<got>.+?)`)?(?: - at `(?P<at>.+)`)?"
)
_LACKS = re.compile(r"Object missing required field `(?P<field>.+?)`(?: - at `(?P<at>.+)`)?")


@dataclass(frozen=True)
class Source:
    """One benchmark's figures.

    name       how the report calls the file: relative where it was given so, without the folders above
    benchmark  the module of `hawk.bench` that wrote it
    machine    what it was measured on, in words, as far as the file says
    date       when, as the file says, or "date not said"
    data       the checked object; None for one that no report shows
    """

    path: Path
    name: str
    benchmark: str
    origin: Origin
    machine: str
    date: str
    data: Any

    @property
    def told(self) -> str:
        """File, machine and date."""
        return f"{self.name}: {self.machine}; {self.date}"


def gather(given: Iterable[Path], origin: Origin) -> list[Source]:
    """Every file in order, of a folder all `*.json` in it (not below it) in the order of their names.

    Files of the same bytes are one, by the first of their names: no two runs write the same, and what is given twice
    is no second machine.
    Raises `InvalidArgument` for what is not there, a folder without such a file, and what `read` refuses.
    """
    found: dict[bytes, Source] = {}

    def add(path: Path, name: str) -> None:
        one = read(path, origin, name)
        found.setdefault(hashlib.sha256(path.read_bytes()).digest(), one)

    for path in given:
        if path.is_dir():
            inside = sorted(p for p in path.glob("*.json") if p.is_file())
            if not inside:
                below = sorted({p.parent.name for p in path.glob("*/*.json") if p.is_file()})
                has = (
                    f"; {', '.join(below[:10])} in it {'have' if len(below) > 1 else 'has'} some"
                    if below
                    else ""
                )
                raise InvalidArgument(
                    "nothing to read",
                    field="from",
                    got=path,
                    expected=f"a folder with *.json files in it, which are not looked for further down{has}",
                )
            for p in inside:
                add(p, f"{path.name}/{p.name}")
        elif path.is_file():
            add(path, path.name)
        else:
            raise InvalidArgument(
                "no such file or folder", field="from", got=path, expected="one that is there"
            )
    return list(found.values())


def read(path: Path, origin: Origin, name: str | None = None) -> Source:
    """One file; raises `InvalidArgument` naming the file and the field, or `OSError`."""
    if path.stat().st_size > LARGEST:
        raise InvalidArgument(
            "too large for a benchmark's figures", field="from", got=path, expected=f"at most {LARGEST} bytes"
        )
    try:
        tree = json.loads(path.read_bytes(), parse_constant=_refused, parse_float=_finite)
        json.dumps(tree, ensure_ascii=False).encode()  # half a character is no text that a page can have
    except (ValueError, RecursionError) as error:
        message, got = _not_json(error)
        raise InvalidArgument(
            message, field=str(path), got=got, expected="what `hawk bench ... --json` prints"
        ) from None
    # A name that is no UTF-8 has its place on disk, but none in a page.
    return source(tree, path, origin, os.fsencode(name or path.name).decode(errors="replace"))


def source(tree: Any, path: Path, origin: Origin, name: str) -> Source:
    """A decoded object, checked; raises `InvalidArgument` naming the file and the field."""
    if not isinstance(tree, dict):
        raise InvalidArgument(
            "not a benchmark's object", field=str(path), got=type(tree).__name__, expected="a JSON object"
        )
    benchmark = _benchmark(tree, path)
    kind = KINDS[benchmark]
    about = _convert(tree, schema.About, path)
    data = None if kind is None else _convert(tree, kind, path)
    if getattr(data, "correct", True) is not True:
        raise InvalidArgument(
            "figures of bytes that were wrong", field=f"{path}: correct", got="false", expected="true"
        )
    return Source(path, name, benchmark, origin, _machine(tree, about), about.date or "date not said", data)


def _not_json(error: Exception) -> tuple[str, str]:
    """What was wrong, and what stood there."""
    if isinstance(error, json.JSONDecodeError):
        there = error.doc[error.pos :].strip().partition("\n")[0][:30]
        message = f"this is no JSON at line {error.lineno}, column {error.colno}"
        return message, repr(there) if there else "the end of the file"
    return "this is no JSON", "bytes that are no UTF-8" if isinstance(error, UnicodeError) else str(error)


def _refused(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refused(text)


def _benchmark(tree: dict[str, Any], path: Path) -> str:
    said = tree.get("benchmark")
    if said is not None:
        if not isinstance(said, str) or said not in KINDS:
            raise InvalidArgument(
                "no such benchmark",
                field=f"{path}: benchmark",
                got=repr(said)[:100],
                expected=", ".join(KINDS),
            )
        return said
    for name, fields in _KNOWN_BY.items():
        if fields <= tree.keys():
            return name
    raise InvalidArgument(
        "no benchmark of HAWK's has written this",
        field=str(path),
        got=f"an object with {', '.join(map(str, list(tree)[:6])) or 'no fields'}",
        expected='"benchmark", or the fields of ' + ", ".join(_KNOWN_BY),
    )


def _convert(tree: dict[str, Any], kind: type[msgspec.Struct], path: Path) -> Any:
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise _fault(str(error), path) from None


def _fault(said: str, path: Path) -> InvalidArgument:
    """What msgspec says, in our terms."""
    if lacks := _LACKS.fullmatch(said):
        at = (lacks["at"] or "$").removeprefix("$").lstrip(".")
        field = f"{at}.{lacks['field']}" if at else lacks["field"]
        return InvalidArgument(
            "a field is missing", field=f"{path}: {field}", got="nothing", expected="a value"
        )
    if match := _SAID.fullmatch(said):
        at = (match["at"] or "$").removeprefix("$").lstrip(".") or "the object"
        return InvalidArgument(
            "not a figure of that kind",
            field=f"{path}: {at}",
            got=match["got"] or "another value",
            expected=f"{match['expected']}{match['bound']}",
        )
    return InvalidArgument(said, field=str(path), got="another value", expected="what the benchmark writes")


def _machine(tree: dict[str, Any], about: schema.About) -> str:
    parts = []
    names = tree.get("names") or ([tree["device"]] if isinstance(tree.get("device"), str) else [])
    if isinstance(names, list) and names and all(isinstance(n, str) for n in names):
        parts.append(" and ".join(names) if len(set(names)) > 1 else f"{len(names)} {names[0]}")
    m = about.machine
    if m is not None:
        if m.processor:
            parts.append(m.processor)
        if m.cpus:
            parts.append(f"{m.cpus} CPUs")
        if m.system:
            parts.append(m.system)
        if m.python:
            parts.append(f"Python {m.python}")
    return ", ".join(parts) or "machine not said"
