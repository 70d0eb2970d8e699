"""Everything that can be set, in one typed tree: `load_config` reads it, `Sources` says where each value came from.

A configuration is a TOML file, overridden by environment variables whose names have a double underscore:
`HAWK_AGENT__ROLE=decode` is `agent.role`.  `hawk.config_schema` declares the tree, `hawk.config_read` reads
any such tree.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hawk.config_files import Leaf, Tree, overlay_environment, read_file
from hawk.config_read import Reader, nearest
from hawk.config_schema import (
    SECTIONS,
    AgentConfig,
    ArenaConfig,
    Config,
    DiscoveryConfig,
    IntegrityConfig,
    JobsConfig,
    MemoryConfig,
    RetileConfig,
    SecurityConfig,
    StagingConfig,
    TransportConfig,
    check_name,
    check_peer,
    one_address,
)
from hawk.errors import ConfigError, HawkError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "AgentConfig",
    "ArenaConfig",
    "Config",
    "DiscoveryConfig",
    "IntegrityConfig",
    "JobsConfig",
    "MemoryConfig",
    "RetileConfig",
    "SecurityConfig",
    "Sources",
    "StagingConfig",
    "TransportConfig",
    "load_config",
    "missing",
]


T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Sources:
    """Where every value came from, by dotted path: `"default"`, `"node.toml:7"`, `"HAWK_AGENT__ROLE"`."""

    by_path: Mapping[str, str]

    def of(self, path: str) -> str:
        """The source of one value; `"default"` if nothing set it."""
        return self.by_path.get(path, "default")


# -- loading ----------------------------------------------------------------------------------------------


def load_config(
    path: Path | str | None, env: Mapping[str, str] | None = None, *, complete: bool = True
) -> tuple[Config, Sources]:
    """Reads `path` (None: no file) and the environment (None: this process's).

    Raises `ConfigError` whose `problems` are all that is wrong, one line each: file and line, key, value,
    expectation, nearest known key.  With `complete=False`, what only an agent could not start with is let
    pass; `missing` names it.
    """
    env = os.environ if env is None else env
    reader = Reader()
    file = None if path is None else Path(path)
    tree = {} if file is None else read_file(file, reader.problems)
    if reader.problems:  # of a file that was not read, nothing else can be told
        raise _failed(reader.problems, file)
    overlay_environment(tree, env, reader.problems)
    config = _build(tree, reader, file, env)
    problems = [*reader.problems, *_across(config, reader)]
    if complete and not reader.bad:
        problems += missing(config)
    if problems:
        raise _failed(problems, file)
    return config, Sources(reader.sources)


def _failed(problems: list[str], file: Path | None) -> ConfigError:
    """The error that tells all problems, those of the file first and in the order of its lines."""

    def line(problem: str) -> int:
        number = problem.removeprefix(f"{file}:").partition(":")[0]
        return int(number) if number.isdecimal() else 1 << 30

    what = str(file) if file else "the environment"
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError(
        f"{count} in the configuration from {what}", problems=tuple(sorted(problems, key=line))
    )


def _build(tree: Tree, reader: Reader, file: Path | None, env: Mapping[str, str]) -> Config:
    for key, node in tree.items():
        if key not in SECTIONS and key not in ("memory", "peers"):
            reader.unknown(key, node, [*SECTIONS, "memory", "peers"])
    parts: dict[str, Any] = {}
    for name, cls in SECTIONS.items():
        ignore = frozenset(_transports()) if cls is TransportConfig else frozenset()
        parts[name] = reader.build(cls, tree.get(name), name, ignore=ignore) or cls()
    parts["agent"] = _with_local(parts["agent"], env)
    for section in ("security", "discovery"):
        parts[section] = _with_folders(parts[section], section, reader, file)
    parts["transport"] = replace(
        parts["transport"], options=_transport_options(tree.get("transport"), reader, file)
    )
    parts["memory"] = _memories(reader.table(tree.get("memory"), "memory"), reader)
    parts["peers"] = _peers(reader.table(tree.get("peers"), "peers"), reader)
    return Config(**parts)


def _with_local(agent: AgentConfig, env: Mapping[str, str]) -> AgentConfig:
    """The default local socket lies in a folder that is this user's alone."""
    if agent.local:
        return agent
    runtime = env.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "hawk" if runtime else Path(tempfile.gettempdir()) / f"hawk-{os.getuid()}"
    return replace(agent, local=f"ipc://{folder / agent.name}.sock")


def _with_folders(config: T, path: str, reader: Reader, file: Path | None) -> T:
    """Paths in a file count from the file's folder; those in the environment from the working folder."""
    found: dict[str, Any] = {}
    for spec in fields(config):
        value = getattr(config, spec.name)
        if isinstance(value, Path):
            source = reader.sources.get(f"{path}.{spec.name}", "default")
            from_file = file is not None and not source.startswith("HAWK_")
            base = file.resolve().parent if from_file and file is not None else Path.cwd()
            found[spec.name] = base / value.expanduser()
    return replace(config, **found) if found else config


def _transports() -> list[str]:
    """Every installed transport, usable here or not."""
    from hawk.transports import registry

    return list(registry.names())


def _transport_options(node: Tree | Leaf | None, reader: Reader, file: Path | None) -> dict[str, Any]:
    from hawk.transports import registry

    table = node if isinstance(node, dict) else {}
    options: dict[str, Any] = {}
    for name in registry.names():
        path = f"transport.{name}"
        try:
            cls = registry.transport_class(name).Config
        except HawkError as error:
            if name in table:
                reader.problem(path, str(error))
            continue
        built: Any = reader.build(cls, table.get(name), path)
        if built is not None:
            options[name] = _with_folders(built, path, reader, file)
    return options


def _memories(table: Tree, reader: Reader) -> dict[str, MemoryConfig]:
    from hawk.memory import registry

    memories: dict[str, MemoryConfig] = {}
    for name, node in table.items():
        path = f"memory.{name}"
        if expected := check_name(name):
            reader.problem(path, f"is no name; expected {expected}", beside=table)
        below = reader.table(node, path)
        if isinstance(node, Leaf):
            continue
        kind = below.get("kind")
        if not isinstance(kind, Leaf):
            known = ", ".join(registry.kinds())
            reader.problem(f"{path}.kind", f"has to be given; expected one of {known}", beside=below)
            continue
        try:
            cls = registry.config_class(str(kind.value))
        except HawkError as error:
            guess = nearest(str(kind.value), registry.kinds())
            hint = f"; did you mean {guess}?" if guess else f"; known: {', '.join(registry.kinds())}"
            reader.problem(f"{path}.kind", f"{error.message}{hint}", kind)
            continue
        above = {"kind"} if _has(cls, "device") else {"kind", "device"}
        head = reader.build(MemoryConfig, {k: v for k, v in below.items() if k in above}, path)
        options = reader.build(cls, below, path, ignore=frozenset(above))
        if head is not None:
            memories[name] = replace(head, options=options)
    return memories


def _has(cls: type[Any], name: str) -> bool:
    return name in cls.__dataclass_fields__


def _peers(table: Tree, reader: Reader) -> dict[str, str]:
    peers: dict[str, str] = {}
    for name, node in table.items():
        path = f"peers.{name}"
        if not isinstance(node, Leaf):
            reader.problem(path, "is a table; expected an address", beside=node)
            continue
        reader.sources[path] = node.source
        expected = check_name(name) or (
            check_peer(node.value) if isinstance(node.value, str) else "text in quotes"
        )
        if expected:
            reader.problem(path, f"expected {expected}", node)
        else:
            peers[name] = str(node.value)
    return peers


def _across(config: Config, reader: Reader) -> list[str]:
    """Problems between fields, each told at the field that was set."""
    jobs, found = config.jobs, []

    def clash(path: str, text: str, *others: str) -> None:
        if reader.bad.isdisjoint((path, *others)):
            found.append(f"{reader.sources.get(path, 'default')}: {path}: {text}")

    for name in config.transport.prefer:
        if name not in _transports():
            guess = nearest(name, _transports())
            hint = f"did you mean {guess}?" if guess else f"known: {', '.join(_transports())}"
            clash("transport.prefer", f'no transport is called "{name}"; {hint}')
    if not config.transport.prefer:
        clash("transport.prefer", "is empty; expected at least one transport")
    if len(set(config.transport.prefer)) < len(config.transport.prefer):
        clash("transport.prefer", "names a transport twice")
    if jobs.chunk > config.arena.size:
        clash("jobs.chunk", f"a chunk must fit into the arena of {config.arena.size} bytes", "arena.size")
    for key in ("in_flight_per_peer", "in_flight_per_transport"):
        if 0 < getattr(jobs, key) < jobs.chunk:
            clash("jobs.chunk", f"a chunk must fit into jobs.{key}", f"jobs.{key}")
    discovery = config.discovery
    for pair in (("etcd_cert", "etcd_key"), ("etcd_user", "etcd_password_file")):
        given = [key for key in pair if getattr(discovery, key)]
        if len(given) == 1:
            other = pair[1 - pair.index(given[0])]
            clash(
                f"discovery.{given[0]}",
                f"goes with discovery.{other}, which is not given",
                f"discovery.{other}",
            )
    return found


def missing(config: Config) -> list[str]:
    """What an agent could not start with, though every value is well formed; one line each."""
    agent, security, found = config.agent, config.security, []
    absent = [f"security.{key}" for key in ("key_file", "peers_file") if getattr(security, key) is None]
    if absent and agent.control.startswith("tcp://") and not agent.insecure:
        found.append(
            f'agent.control = "{agent.control}": tcp needs {" and ".join(absent)} ("hawk keys new" makes keys); '
            "agent.insecure = true does without, for networks where everyone may command the agent"
        )
    if config.discovery.etcd and not agent.advertise and not one_address(agent.control):
        found.append(
            f'agent.control = "{agent.control}": an agent that registers in etcd has to say where others reach it; '
            'give agent.advertise, such as "tcp://10.0.0.5:7400"'
        )
    return found
