"""Taking over what can change while an agent runs: the peers, their keys, the log level, certificates."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hawk.config import Sources
from hawk.config_text import rows
from hawk.control.keys import load_peers
from hawk.observe.log import get as get_log
from hawk.observe.log import set_level

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hawk.agent.core import Agent
    from hawk.config import Config

log = get_log("hawk.agent.reloading")

_TAKEN = ("peers.", "agent.log_level", "security.peers_file")
"""Settings, or how their paths begin, that a running agent takes over."""


def _values(config: Config) -> dict[str, str]:
    return {row.path: row.value for row in rows(config, Sources({}))}


def _changed(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return sorted(key for key in {*old, *new} if old.get(key) != new.get(key))


def reload(agent: Agent, config: Config) -> None:
    """Takes over what can be from `config`, and says what needs a restart.

    Everything is read before anything changes: raises `ConfigError` for a peers file that cannot be used, and
    `InvalidArgument` for certificates, and then the agent goes on as it was.
    """
    old = agent.config
    keys = load_peers(config.security.peers_file) if config.security.peers_file else {}
    reread = {name: transport.reread() for name, transport in agent.transports.items()}
    changed = _changed(_values(old), _values(config))
    left = [path for path in changed if not path.startswith(_TAKEN)]
    added, removed = sorted(set(keys) - set(agent.peers.keys)), sorted(set(agent.peers.keys) - set(keys))
    other = sorted(name for name in set(keys) & set(agent.peers.keys) if keys[name] != agent.peers.keys[name])
    if agent.sockets.zap is not None:
        agent.sockets.authorise(keys)
    agent.directory.replace(config.peers)
    agent.peers.replace_keys(keys)
    agent.serving.guests.renamed(agent.serving.server.recheck())
    renewed = [name for name, take_over in reread.items() if take_over()]
    if renewed:
        agent.serving.guests.greet()
    if not agent.embedded:
        set_level(config.agent.log_level)
    agent.config = replace(
        old,
        agent=replace(old.agent, log_level=config.agent.log_level),
        security=replace(old.security, peers_file=config.security.peers_file),
        peers=config.peers,
    )
    log.info(
        "configuration reloaded",
        changed=[path for path in changed if path.startswith(_TAKEN)],
        keys_added=added,
        keys_removed=removed,
        keys_changed=other,
        certificates_changed=renewed,
    )
    if left:
        log.warning("changed in the configuration, and in effect only after a restart", settings=left)
