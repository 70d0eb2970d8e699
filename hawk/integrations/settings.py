"""What a user can say to a connector, and the configuration of the agent that it brings along."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hawk.config import load_config
from hawk.config_files import Leaf
from hawk.config_read import Reader, option
from hawk.errors import ConfigError
from hawk.integrations import processors
from hawk.integrations.remote import worker_address, worker_name

if TYPE_CHECKING:
    from hawk.config import Config

Duration = Annotated[float, "duration"]

WHERE = "kv_connector_extra_config"
_TABLES = ("hawk", "cache_options")
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 48  # the number of a worker comes behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The keys of `kv_connector_extra_config`, apart from `hawk`, which has the agent's own tables."""

    name: str = option(
        "",
        "Name of this engine's agents; with several workers their number follows.",
        shown_default="engine_id",
    )
    control: str = option(
        "",
        'Address for agents of other machines, such as "tcp://10.0.0.7:7400"; further workers take the next ports.',
        shown_default="a socket in the user's own folder, for one machine",
    )
    host: str = option("", "Host at which others reach these agents, where control listens on every address.")
    agent: str = option(
        "",
        'A hawk-agent beside the engine, "ipc://PATH" with {rank} for the worker and {dp} for one of several '
        "data-parallel engines; else embedded.",
    )
    config: Path | None = option(None, "Configuration file of the embedded agent, as for hawk-agent.")
    cpus: str = option(
        "",
        'Processors for the threads of the connector and its agent, such as "0-3,8".',
        shown_default="those the engine had before it bound its OpenMP threads",
    )
    ttl: Duration = option(
        60.0, "How long a prefilled request waits to be fetched before its blocks are free again."
    )
    timeout: Duration = option(60.0, "How long a fetch may take, the wait for its prefill included.")
    layerwise: bool = option(False, "Send layers while later ones are computed; needs piecewise CUDA graphs.")
    decode_tp: int = option(
        0, "Workers that share the heads on the decode side; 0: as many as here.", minimum=0
    )
    decode_pp: int = option(
        0, "Workers that share the layers on the decode side; 0: as many as here.", minimum=0
    )
    cache: str = option(
        "",
        "Function \"MODULE:FUNCTION\" that provides the cache, where it is not in vLLM's tensors: an NPU's.",
        shown_default="the tensors that the engine registers",
    )
    queue: int = option(
        4096, "Orders of hooks that may stand in line; what is beyond fails at once.", minimum=1
    )
    hawk: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict,
        metadata={"help": "Tables of the agent's configuration, over the file's.", "filled_later": True},
    )
    cache_options: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={"help": "Anything that the function is to know.", "filled_later": True},
    )


def read_settings(extra: Mapping[str, Any]) -> Settings:
    """The settings; raises `ConfigError` with a line for each key that is unknown or wrong."""
    reader = Reader()
    tree: dict[str, Any] = {key: Leaf(value, WHERE) for key, value in extra.items() if key not in _TABLES}
    settings = reader.build(Settings, tree, "", ignore=frozenset(_TABLES))
    tables, options = extra.get("hawk", {}), extra.get("cache_options", {})
    if not isinstance(tables, Mapping) or not all(isinstance(table, Mapping) for table in tables.values()):
        reader.problems.append(f"{WHERE}: hawk: expected tables, as of a configuration file")
    if not isinstance(options, Mapping):
        reader.problems.append(
            f"{WHERE}: cache_options: expected a table for the function that `cache` names"
        )
    elif options and not settings.cache:
        reader.problems.append(f"{WHERE}: cache_options: nothing reads them; `cache` names no function")
    if not reader.problems and settings.agent and (settings.config or tables or settings.control):
        reader.problems.append(f"{WHERE}: agent: an agent beside the engine has its own configuration")
    if not reader.problems and settings.cpus:
        processors.parse(settings.cpus)
    if reader.problems:
        raise ConfigError(f"{len(reader.problems)} wrong in {WHERE}", problems=tuple(reader.problems))
    return replace(settings, hawk=tables, cache_options=options)


def engine_name(settings: Settings, engine_id: str) -> str:
    """The name of the engine, from which its agents have theirs."""
    return _NOT_A_NAME.sub("-", settings.name or engine_id)[:_LONGEST_NAME].strip("-") or "engine"


def agent_config(settings: Settings, *, engine: str, role: str, number: int, size: int) -> Config:
    """The embedded agent of worker `number` of `size`; raises `ConfigError`.

    On top of the file and the environment come the tables of `hawk`, whose texts may hold `{name}` and `{rank}`, and
    then name, role and addresses, which are the connector's.
    """
    name = worker_name(engine, number, size)
    env = dict(os.environ)
    for table, values in settings.hawk.items():
        _overlay(env, ("HAWK", str(table)), values, {"name": name, "rank": str(number)})
    env["HAWK_AGENT__NAME"], env["HAWK_AGENT__ROLE"] = name, role
    first, _ = load_config(settings.config, env, complete=False)
    folder = Path(first.agent.local.removeprefix("ipc://")).parent
    env["HAWK_AGENT__LOCAL"] = f"ipc://{folder / name}.sock"
    base = settings.control or (
        f"ipc://{folder / name}.control" if first.agent.control == "tcp://127.0.0.1:0" else ""
    )
    env["HAWK_AGENT__CONTROL"] = worker_address(base or first.agent.control, number)
    config, _ = load_config(settings.config, env)
    return config


def _overlay(
    env: dict[str, str], path: tuple[str, ...], values: Mapping[str, Any], known: Mapping[str, str]
) -> None:
    for key, value in values.items():
        place = (*path, str(key))
        if isinstance(value, Mapping):
            _overlay(env, place, value, known)
            continue
        variable = f"{place[0]}_{'__'.join(place[1:])}".upper()
        if isinstance(value, bool):
            env[variable] = str(value).lower()
        elif isinstance(value, list | tuple):
            env[variable] = ",".join(map(str, value))
        else:
            env[variable] = str(value)
        for word, meaning in known.items():
            env[variable] = env[variable].replace(f"{{{word}}}", meaning)


def for_one_of_several(settings: Settings, index: int, size: int) -> Settings:
    """The settings of engine `index` of several that were given the same ones (data parallel), `size` workers each.

    They listen one behind the other, and go by names of their own; `agent` may hold `{dp}` for the number.
    """
    return replace(
        settings,
        control=worker_address(settings.control, index * size),
        name=f"{settings.name}-dp{index}" if settings.name else "",
        agent=settings.agent.replace("{dp}", str(index)),
    )


def beside(settings: Settings, number: int) -> str:
    """The socket of the agent beside worker `number`."""
    return settings.agent.replace("{rank}", str(number))


def reachable(address: str, host: str) -> str:
    """A control address as other machines see it; raises `ConfigError` where only the user can know."""
    for everywhere in ("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:"):
        if address.startswith(everywhere):
            if not host:
                raise ConfigError(
                    "an address that listens everywhere tells nobody where to come",
                    field=f"{WHERE}.control",
                    got=address,
                    expected=f"the address of one interface, or {WHERE}.host beside it",
                )
            return f"tcp://{f'[{host}]' if ':' in host else host}:{address[len(everywhere) :]}"
    return address
