"""Finding layouts by name: those shipped here, those of plug-ins (entry points `hawk.layouts`), and files."""

from __future__ import annotations

import os
from functools import cache
from importlib import resources
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from hawk.errors import LayoutError
from hawk.layouts.grammar import nearest
from hawk.layouts.layout import MAX_TEXT, Layout

GROUP = "hawk.layouts"


@cache
def _shipped() -> dict[str, Layout]:
    found = {}
    for entry in sorted(resources.files("hawk.layouts").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".toml"):
            layout = Layout.from_toml(entry.read_text(encoding="utf-8"), entry.name)
            found[layout.name] = layout
    return found


def _plugged() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def names() -> list[str]:
    """Names of all layouts that `load` knows, sorted."""
    return sorted({*_shipped(), *_plugged()})


def load(name_or_path: str | os.PathLike[str]) -> Layout:
    """The layout of that name, or the one that a file declares (a path, or a string that ends in `.toml`).

    A plug-in's entry point is named like its layout and gives a `Layout`, the TOML as a string, or a function of
    no arguments that returns either.  Raises `LayoutError`.
    """
    if not isinstance(name_or_path, str) or name_or_path.endswith(".toml"):
        return _read(Path(name_or_path))
    if name_or_path in _shipped():
        return _shipped()[name_or_path]
    plugged = _plugged()
    if name_or_path in plugged:
        return _plug(plugged[name_or_path])
    known = names()
    near = nearest(name_or_path, known)
    own = "A layout of your own is named by the path of its file, which ends in .toml"
    raise LayoutError(
        "unknown layout",
        field="layout",
        got=name_or_path[:200],
        expected="one of " + ", ".join(known),
        hint=f"{near} {own}" if near else own,
    )


def _read(path: Path) -> Layout:
    if "\0" in str(path):
        raise LayoutError(
            "this is no path", field="layout", got=repr(str(path))[:200], expected="no zero byte"
        )
    try:
        with path.open("rb") as file:
            raw = file.read(4 * MAX_TEXT + 1)
        return Layout.from_toml(raw.decode("utf-8"), str(path))
    except OSError as error:
        raise LayoutError(
            "cannot read this file",
            field=str(path),
            got=error.strerror or str(error),
            expected="a declaration in TOML",
        ) from error
    except UnicodeDecodeError as error:
        raise LayoutError(
            "this file is not UTF-8", field=str(path), got=str(error)[:200], expected="text in UTF-8"
        ) from None


def _plug(entry: EntryPoint) -> Layout:
    origin = f"plug-in {entry.name} ({entry.value})"
    try:
        made: Any = entry.load()
        if callable(made):
            made = made()
    except Exception as error:  # a plug-in may raise anything; the user needs its name
        raise LayoutError(
            "this plug-in failed",
            field=origin,
            got=f"{type(error).__name__}: {error}"[:200],
            expected="a Layout, or its text",
        ) from error
    if isinstance(made, str):
        made = Layout.from_toml(made, origin)
    if not isinstance(made, Layout):
        raise LayoutError(
            "this plug-in gives no layout",
            field=origin,
            got=type(made).__name__,
            expected="a Layout or its TOML",
        )
    if made.name != entry.name:
        raise LayoutError(
            "this plug-in's layout has another name", field=origin, got=made.name, expected=entry.name
        )
    return made
