"""Which directory an agent finds its peers by, and what it says of itself there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hawk.control.discovery import Registration
from hawk.control.dns import DnsPeers
from hawk.errors import ConfigError
from hawk.layouts import library

if TYPE_CHECKING:
    from hawk.agent.core import Agent
    from hawk.config_schema import DiscoveryConfig
    from hawk.control.etcd_client import Etcd


def directory(agent: Agent) -> DnsPeers:
    """The directory that the configuration asks for, not started yet.

    Raises as `client` does where etcd is asked for.
    """
    peers, found = agent.config.peers, agent.config.discovery
    if not found.etcd:
        return DnsPeers(peers, found.dns, ttl=found.ttl, timeout=found.timeout)
    from hawk.control.etcd import EtcdPeers

    return EtcdPeers(
        peers,
        found.dns,
        etcd=client(found),
        prefix=found.etcd_prefix,
        name=agent.config.agent.name,
        own=lambda: registration(agent),
        lease=found.etcd_lease,
        ttl=found.ttl,
        timeout=found.timeout,
    )


def client(found: DiscoveryConfig) -> Etcd:
    """A client of the etcd that the configuration names; it has asked nobody yet.

    Raises `ConfigError` for a file that cannot be read, and `MissingDependency` without the extra.
    """
    from hawk.control.etcd_client import Etcd

    return Etcd(
        found.etcd,
        tls=(found.etcd_ca, found.etcd_cert, found.etcd_key),
        user=_user(found),
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
    """Name and password; raises `ConfigError` for a file that cannot be read, or has none."""
    if not found.etcd_user or found.etcd_password_file is None:
        return None
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
