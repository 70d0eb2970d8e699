"""Where configuration comes from: a TOML file with its line numbers, and environment variables over it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENV_PREFIX = "HAWK_"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value as it came, and from where: `"node.toml:7"`, or an environment variable's name."""

    value: object
    source: str
    from_env: bool = False


Tree = dict[str, Any]
"""Tables by key; every end is a `Leaf`."""

_HEADER = re.compile(r"\s*\[+\s*([^\[\]]+?)\s*\]+\s*(?:#.*)?")
_KEY = re.compile(
    r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)
_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """The line on which each key stands.  A guide for messages: odd spellings are simply not found."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.fullmatch(line):
            table = _parts(header.group(1))
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault((*table, *_parts(key.group(1))), number)
    return found


def read_file(path: Path, problems: list[str]) -> Tree:
    """The file as a tree; a file that cannot be read or parsed is one problem, and an empty tree."""
    try:
        text = path.read_bytes().decode()
        data = tomllib.loads(text)
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror or error}")
        return {}
    except UnicodeDecodeError as error:
        problems.append(f"{path}: is not UTF-8 text (byte {error.start})")
        return {}
    except tomllib.TOMLDecodeError as error:
        problems.append(f"{path}: is not TOML: {error}")
        return {}
    lines = _lines(text)

    def walk(table: Mapping[str, object], above: tuple[str, ...]) -> Tree:
        tree: Tree = {}
        for key, value in table.items():
            place = (*above, key)
            if isinstance(value, dict):
                tree[key] = walk(value, place)
            else:
                line = next((lines[place[:n]] for n in range(len(place), 0, -1) if place[:n] in lines), None)
                tree[key] = Leaf(value, f"{path}:{line}" if line else str(path))
        return tree

    return walk(data, ())


def overlay_environment(tree: Tree, env: Mapping[str, str], problems: list[str]) -> None:
    """Puts `HAWK_A__B=value` at `a.b`.  Names without a double underscore are not ours to judge."""
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX) or "__" not in name:
            continue
        parts = name[len(ENV_PREFIX) :].split("__")
        if not all(parts) or parts[0].startswith("_"):
            problems.append(f"{name}: has an empty part; expected HAWK_TABLE__KEY")
            continue
        table = tree
        for part in parts[:-1]:
            below = table.setdefault(_same_key(table, part), {})
            if isinstance(below, Leaf):
                problems.append(f"{name}: {part.lower()} is a value in {below.source}, not a table")
                break
            table = below
        else:
            key = _same_key(table, parts[-1])
            if isinstance(table.get(key), dict):
                problems.append(f"{name}: {'.'.join(parts).lower()} is a table, not a value")
            else:
                table[key] = Leaf(env[name], name, from_env=True)


def _same_key(table: Tree, part: str) -> str:
    """The key that is there already in whatever case, for `[memory.NPU0]`; else the lower-case one."""
    return next((key for key in table if key.lower() == part.lower()), part.lower())
