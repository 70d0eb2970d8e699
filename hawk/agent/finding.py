"""Which directory an agent finds its peers by, and what it says of itself there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hawk.control.discovery import Registration
from hawk.control.dns import DnsPeers
from hawk.errors import ConfigError
from hawk.layouts import library

if TYPE_CHECKING:
    from hawk.agent.core import Agent
    from hawk.config_schema import DiscoveryConfig


def directory(agent: Agent) -> DnsPeers:
    """The directory that the configuration asks for, not started yet.

    Raises `ConfigError` where this agent could not be reached at what it would register, or a file cannot be read,
    and `MissingDependency` where etcd is asked for without its extra.
    """
    peers, found = agent.config.peers, agent.config.discovery
    if not found.etcd:
        return DnsPeers(peers, found.dns, ttl=found.ttl, timeout=found.timeout)
    if not agent.advertised_address.startswith("tcp://"):
        raise ConfigError(
            "an agent that registers in a directory has to say where it can be reached",
            field="agent.advertise",
            got=f"nothing, with agent.control = {agent.config.agent.control!r}",
            expected='the address that other agents connect to, such as "tcp://10.0.0.5:7400"',
        )
    try:
        msgspec.convert({"address": agent.advertised_address, "generation": "0" * 16}, Registration)
    except msgspec.ValidationError as error:
        raise ConfigError(
            "other agents could not use this address", field="agent.advertise", got=agent.advertised_address
        ) from error
    from hawk.control.etcd import EtcdPeers
    from hawk.control.etcd_client import Etcd

    etcd = Etcd(
        found.etcd,
        tls=(found.etcd_ca, found.etcd_cert, found.etcd_key),
        user=_user(found),
        timeout=found.timeout,
    )
    return EtcdPeers(
        peers,
        found.dns,
        etcd=etcd,
        prefix=found.etcd_prefix,
        name=agent.config.agent.name,
        own=lambda: registration(agent),
        lease=found.etcd_lease,
        ttl=found.ttl,
        timeout=found.timeout,
    )


def registration(agent: Agent) -> Registration:
    """What the agent says of itself."""
    return Registration(
        address=agent.advertised_address,
        generation=f"{agent.generation:016x}",
        role=agent.config.agent.role,
        software=agent.software,
        transports=list(agent.transports),
        layouts=sorted(library.names()),
    )


def _user(found: DiscoveryConfig) -> tuple[str, str] | None:
    """Name and password; raises `ConfigError` for one without the other, or a file that cannot be read."""
    if not found.etcd_user and found.etcd_password_file is None:
        return None
    if not found.etcd_user or found.etcd_password_file is None:
        lacking = "etcd_password_file" if found.etcd_user else "etcd_user"
        raise ConfigError(
            "a user of etcd has a name and a password", field=f"discovery.{lacking}", got="nothing"
        )
    try:
        lines = found.etcd_password_file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            "the file cannot be read", field="discovery.etcd_password_file", got=error
        ) from error
    if not lines or not lines[0]:
        raise ConfigError(
            "the file has no password in its first line",
            field="discovery.etcd_password_file",
            got=found.etcd_password_file,
        )
    return found.etcd_user, lines[0]
