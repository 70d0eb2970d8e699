"""The configuration as people read it: every value with its source, and the reference page."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from hawk.config import Config, Sources
from hawk.config_read import unit_of
from hawk.config_schema import SECTIONS, MemoryConfig
from hawk.units import format_duration, format_rate, format_size


@dataclass(frozen=True, slots=True)
class Row:
    """One value: dotted path, the value as TOML, and where it came from."""

    path: str
    value: str
    source: str


def rows(config: Config, sources: Sources) -> Iterator[Row]:
    """Every value in the configuration, in the order of the reference page.  Secret values are not shown."""
    for section in SECTIONS:
        yield from _rows(getattr(config, section), section, sources)
    for name, options in config.transport.options.items():
        yield from _rows(options, f"transport.{name}", sources)
    for name, memory in config.memory.items():
        own = {f.name for f in dataclasses.fields(memory.options)}
        head = [
            row for row in _rows(memory, f"memory.{name}", sources) if row.path.rpartition(".")[2] not in own
        ]
        yield from head
        yield from _rows(memory.options, f"memory.{name}", sources)
    for name, address in config.peers.items():
        yield Row(f"peers.{name}", f'"{address}"', sources.of(f"peers.{name}"))


def _rows(table: Any, path: str, sources: Sources) -> Iterator[Row]:
    hints = typing.get_type_hints(type(table), include_extras=True)
    for field in dataclasses.fields(table):
        if field.metadata.get("filled_later"):  # a table of its own
            continue
        value = getattr(table, field.name)
        shown = as_toml(value, unit_of(hints[field.name], field.metadata))
        if field.metadata.get("secret") and value:
            shown = '"(not shown)"'
        yield Row(f"{path}.{field.name}", shown, sources.of(f"{path}.{field.name}"))


def as_toml(value: object, unit: str = "") -> str:
    """A value as it would stand in the file."""
    if value is None:
        return '""'
    if unit == "duration" and isinstance(value, int | float):
        return f'"{format_duration(value)}"'
    if unit == "size" and isinstance(value, int):
        return f'"{format_size(value)}"'
    if unit == "address" and isinstance(value, int):
        return hex(value)
    if unit == "rate" and isinstance(value, int | float):
        return f'"{format_rate(value)}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(as_toml(item) for item in value) + "]"
    if isinstance(value, str | Path):
        escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value)


# -- the reference page ------------------------------------------------------------------------------------

_HEAD = """\
# Configuration

Written by `hawk config doc`; edit the help texts in the code instead.

An agent reads one TOML file, `hawk-agent --config node.toml`.  Every value has a default; durations have units
(us, ms, s, m, h, d: "30s"), sizes too (KB, MB, GB, TB; KiB, MiB, GiB, TiB: "64MiB"), and rates (bytes: "25GB/s"; bits:
"200Gb/s"); a plain number means seconds, bytes, or bytes a second.  An address is a number, such as 0x100080.
Nothing else takes a unit, and none takes another's.  An environment variable with a double underscore overrides one
value: `HAWK_AGENT__ROLE=decode` sets `agent.role`, `HAWK_MEMORY__NPU0__CAPACITY=4GiB` sets `memory.npu0.capacity`;
lists are separated by commas.  `hawk config show --config node.toml` prints every value and where it came from.  All
problems are told at once, each with its line, and none of them lets the agent start.
"""


def reference() -> str:
    """`docs/config.md`: every option of HAWK's own, its type, default and meaning."""
    from hawk.memory import registry as memories
    from hawk.transports import registry as transports

    parts = [_HEAD]
    for name, cls in SECTIONS.items():
        parts.append(_table(f"[{name}]", cls))
        if name == "transport":
            own = {
                t: transports.transport_class(t).Config
                for t in ("shm", "tcp", "verbs", "cuda", "nixl", "mooncake")
            }
            parts += [_table(f"[transport.{t}]", config) for t, config in own.items()]
    parts.append(_table("[memory.NAME]", MemoryConfig))
    for kind in memories.shipped():
        parts.append(_table(f'[memory.NAME] with kind = "{kind}"', memories.config_class(kind)))
    parts.append('## [peers]\n\nThe other agents: `NAME = "tcp://HOST:PORT"`, one line each.\n')
    return "\n".join(parts)


def _table(title: str, cls: type[Any]) -> str:
    hints = typing.get_type_hints(cls, include_extras=True)
    told = _aligned(cls.__doc__ or "")
    lines = [f"## {title}", "", "| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(cls):
        if field.metadata.get("filled_later"):  # a table of its own
            continue
        unit = unit_of(hints[field.name], field.metadata)
        if field.metadata.get("shown_default"):
            default = field.metadata["shown_default"]
        elif field.default is dataclasses.MISSING or (cls is MemoryConfig and field.name == "kind"):
            default = "(has to be given)"
        else:
            default = f"`{as_toml(field.default, unit)}`"
        meaning = field.metadata.get("help") or told.get(field.name, "")
        cells = (f"`{field.name}`", _takes(hints[field.name], unit), default, meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _takes(hint: Any, unit: str) -> str:
    if unit:
        return unit
    if get_origin(hint) is Literal:
        return ", ".join(f'"{choice}"' for choice in get_args(hint))
    names: Mapping[Any, str] = {str: "text", int: "whole number", float: "number", bool: "true, false"}
    if hint in names:
        return names[hint]
    return "list of texts" if get_origin(hint) is tuple else "path"


def _aligned(doc: str) -> dict[str, str]:
    """The fields that a docstring explains in two columns: a name, two spaces or more, a text that may go on."""
    told: dict[str, str] = {}
    name, column = "", 0
    for line in doc.splitlines():
        start = re.match(r"(\s*([a-z_][a-z0-9_]*)\s{2,})\S", line)
        if start:
            name, column = start.group(2), len(start.group(1))
            told[name] = line[column:].strip()
        elif name and len(line) - len(line.lstrip()) == column and line.strip():
            told[name] += " " + line.strip()
        else:
            name = ""
    return told
