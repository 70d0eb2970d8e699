"""The folder that a report is written into: the page, a CSV for every figure and table, a summary, what was measured.

A folder that has something in it is refused, unless it holds an earlier report and may be overwritten: then the files
that report has written are removed, and no others.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hawk.errors import InvalidArgument
from hawk.evaluate import page
from hawk.evaluate.records import inputs_table
from hawk.evaluate.sources import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hawk.evaluate.records import Figure, Report, Table, Value

PAGE, SUMMARY, MEASURED = "report.html", "summary.json", "measured"
UNFINISHED = "unfinished.json"
"""Lists what a run may have written, for as long as it runs: there is a summary only beside a whole report."""

_OF_MEASURING = tuple(f"{MEASURED}/{kind}.json" for kind in KINDS)
"""Files that measuring may write, long before the report's own names are known."""


def claim(folder: Path, *, overwrite: bool, kept: Iterable[Path] = ()) -> list[str]:
    """Looks whether a report may go into `folder`, and makes it; the files of an earlier report that will go.

    kept    files that are read for this report, and may not be among these

    Raises `InvalidArgument` for a folder that has something in it, but for an earlier report and with `overwrite`, and
    for a file of somebody's own where one of this report would go.
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument("not a folder", field="out", got=folder, expected="a folder, or a new name")
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        return []
    earlier, what = _earlier(folder)
    if not overwrite or earlier is None:
        raise InvalidArgument(
            f"the folder has {what} in it",
            field="out",
            got=folder,
            expected="an empty folder or a new name" + ("" if earlier is None else ", or --overwrite"),
        )
    paths = [folder / name for name in (PAGE, SUMMARY, UNFINISHED, *_OF_MEASURING)]
    going = {path.resolve() for path in (*paths, *(folder / name for name in earlier))}
    for path in kept:
        inside = [path] if path.is_file() else list(path.glob("*.json"))
        for one in inside:
            if one.resolve() in going:
                raise InvalidArgument(
                    "is of the report that would be overwritten",
                    field="from",
                    got=one,
                    expected="another file",
                )
    for path in paths:
        if os.path.lexists(path) and str(path.relative_to(folder)) not in earlier:
            raise InvalidArgument(
                "a file that the report in the folder does not list is in the way",
                field="out",
                got=path,
                expected="another folder, or the file elsewhere",
            )
    return earlier


def _earlier(folder: Path) -> tuple[list[str] | None, str]:
    """Files of the report in `folder`, or of the beginnings of one, and which of them it is; None where neither is."""
    began = _listed(folder, UNFINISHED)
    if began is not None:
        return began, "what a run that has not ended has left"
    found = _listed(folder, SUMMARY)
    return found, "something" if found is None else "a report"


def _listed(folder: Path, summary: str) -> list[str] | None:
    """The files that a summary lists, relative to `folder` and never above it; None for what is no summary."""
    try:
        told = json.loads((folder / summary).read_bytes())
        names = told["files"]
        if told["report"] != PAGE or not all(isinstance(n, str) for n in names):
            return None
        inside = folder.resolve()
        places = [(name, (folder / name).resolve()) for name in names]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, RuntimeError):
        return None
    return [name for name, place in places if place.is_relative_to(inside) and not place.is_dir()]


def begin(folder: Path, earlier: Iterable[str]) -> None:
    """Says in the folder whose it is, so that what a run that ends early leaves can be overwritten.

    The page and the summary of an earlier report go at once: what is in the folder is a report again only when all of
    it is.  Raises `InvalidArgument` where another run has begun since `claim` found the folder empty.
    """
    earlier = list(earlier)
    if not earlier:
        try:
            (folder / UNFINISHED).touch(exist_ok=False)
        except FileExistsError:
            raise InvalidArgument(
                "another run has just begun here", field="out", got=folder, expected="a folder of its own"
            ) from None
    names = [PAGE, SUMMARY, UNFINISHED, *_OF_MEASURING, *earlier]
    summary = {"report": PAGE, "finished": False, "files": list(dict.fromkeys(names))}
    whole(folder / UNFINISHED, json.dumps(summary, indent=2) + "\n")
    for name in (SUMMARY, PAGE):
        if name in earlier:
            (folder / name).unlink(missing_ok=True)


def whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all; one that is there goes only then, and what a link leads to stays."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", newline="")
        beside.replace(path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not say which file it was too small for
        beside.unlink(missing_ok=True)
        raise


def remove(folder: Path, names: Iterable[str]) -> None:
    """Removes files of an earlier report, those that are there, and its own folder where that is empty then."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not there, or somebody has put something into it
        (folder / MEASURED).rmdir()


def write(folder: Path, report: Report, facts: dict[str, Any], measured: Iterable[Path] = ()) -> list[str]:
    """Writes the page, the CSV files and the summary, and returns every file's name, those of `measured` among them.

    facts    what the summary says beside the files
    """
    text = page.html(report)  # before any file, so that what cannot be rendered leaves none
    items = [*report.items(), inputs_table(report.inputs)]
    twice = {one.name for one in items if sum(one.name == other.name for other in items) > 1}
    if twice:
        raise InvalidArgument("two of one name", field="name", got=", ".join(sorted(twice)), expected="one")
    names = [PAGE, SUMMARY, *(f"{one.name}.csv" for one in items)]
    names += [
        str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name for path in measured
    ]
    for one in items:
        whole(folder / f"{one.name}.csv", as_csv(one))
    whole(folder / PAGE, text)
    summary = {"report": PAGE, "finished": True, **facts, "files": names}
    whole(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
    (folder / UNFINISHED).unlink(missing_ok=True)
    return names


def as_csv(one: Figure | Table) -> str:
    """As comma-separated values, numbers in full; what is missing is empty."""
    head, rows = one.rows()
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(head)
    writer.writerows([[_cell(value) for value in row] for row in rows])
    return out.getvalue()


def _cell(value: Value) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, float):
        return repr(value)
    text = str(value)
    # A spreadsheet would take these for a formula; file names come from outside.
    return f"'{text}" if isinstance(value, str) and text[:1] in "=+-@\t\r" and text[:1] else text
