"""What can be set: the tree of frozen dataclasses that `hawk.config.load_config` fills.

The help texts are the documentation: `hawk config doc` prints `docs/config.md` from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from hawk.config_read import option
from hawk.units import Duration, Size

Role = Literal["prefill", "decode", "both"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


# -- checks of single values: each returns what would have been right -------------------------------------


def check_name(value: str) -> str | None:
    """Names of agents, peers and memories."""
    return None if _NAME.fullmatch(value) else "1 to 64 letters, digits, dots, dashes or underscores"


def _split_tcp(address: str) -> tuple[str, int] | None:
    """Host and port of `tcp://host:port`, or None."""
    parts = urlsplit(address)
    try:
        port = parts.port
    except ValueError:
        return None
    if (
        parts.scheme != "tcp"
        or not parts.hostname
        or port is None
        or parts.path
        or parts.query
        or "@" in address
    ):
        return None
    return parts.hostname, port


def _control(value: str) -> str | None:
    if _split_tcp(value) or (value.startswith("ipc://") and len(value) > 6):
        return None
    return '"tcp://HOST:PORT" (port 0: any free one) or "ipc://PATH"'


def check_peer(value: str) -> str | None:
    """Where a peer's control socket is."""
    tcp = _split_tcp(value)
    if (tcp and tcp[1] > 0) or (value.startswith("ipc://") and len(value) > 6):
        return None
    return '"tcp://HOST:PORT" or "ipc://PATH"'


def _local(value: str) -> str | None:
    return None if not value or (value.startswith("ipc://") and len(value) > 6) else '"ipc://PATH"'


def _observe(value: str) -> str | None:
    return None if not value or _split_tcp(f"tcp://{value}") else '"HOST:PORT", or "" for none'


_EVERYWHERE = ("0.0.0.0", "::", "*")
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")


def one_address(value: str) -> bool:
    """Whether an address is one that others can connect to: of a host, and not of all that this one has."""
    tcp = _split_tcp(value)
    return tcp is not None and tcp[0] not in _EVERYWHERE and bool(_HOST.fullmatch(tcp[0]))


def _advertise(value: str) -> str | None:
    tcp = _split_tcp(value)
    if not value or (one_address(value) and tcp and tcp[1] > 0):
        return None
    return '"tcp://HOST:PORT", one address that others connect to, or "" for agent.control'


def _members(value: tuple[str, ...]) -> str | None:
    for url in value:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port and "@" not in url
        except ValueError:
            good = False
        if not good or parts.path.strip("/") or parts.query or parts.fragment:
            return '"http://HOST:PORT" or "https://HOST:PORT" for each member'
    return None


def _prefix(value: str) -> str | None:
    plain = value.isascii() and value.isprintable() and len(value) <= 200
    return (
        None
        if plain and value.startswith("/") and value.endswith("/")
        else 'such as "/hawk/", a slash at both ends'
    )


def _part(value: float) -> str | None:
    return None if 0 < value <= 1 else "a number above 0, up to 1"


# -- the tree ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """`[agent]`: who this agent is and where it listens."""

    name: str = option("agent", "Name by which peers know this agent.", check=check_name)
    role: Role = option(
        "both", "Which side of transfers it takes: it sends (prefill), receives (decode), or both."
    )
    control: str = option(
        "tcp://127.0.0.1:0", "Address for other agents; port 0 takes a free one.", check=_control
    )
    advertise: str = option(
        "",
        "Where other agents reach this one, for tickets and the directory, if not at agent.control: it listens on all "
        "addresses, or lies behind a forwarded port.",
        check=_advertise,
        shown_default="agent.control, where that is one address",
    )
    local: str = option(
        "",
        "Socket for clients on this machine.",
        check=_local,
        shown_default="ipc://$XDG_RUNTIME_DIR/hawk/NAME.sock, or in the user's own folder under the temporary one",
    )
    observe: str = option(
        "",
        'Address of /metrics, /livez and /readyz, such as "127.0.0.1:9400"; empty for none.',
        check=_observe,
    )
    max_lag: Duration = option(
        10.0,
        "How long the event loop may stand still before /livez says that the agent is not alive.",
        minimum=0.5,
    )
    drain: Duration = option(30.0, "How long running jobs may take to end after SIGTERM.")
    insecure: bool = option(
        False, "Allows a tcp control address without keys: whoever reaches it can command the agent."
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "The least serious events that are logged."
    )
    log_format: Literal["auto", "console", "json"] = option(
        "auto", "How events are written; auto: for people on a terminal, JSON lines elsewhere."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """`[security]`: CURVE keys for control sockets on tcp; `hawk keys new` makes them."""

    key_file: Path | None = option(None, "This agent's own key pair, readable by its user only.")
    peers_file: Path | None = option(None, "Public keys of the agents that may talk to this one.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """`[transport]`: how bytes move.  Each transport has a table of its own, `[transport.NAME]`."""

    prefer: tuple[str, ...] = option(("shm", "tcp"), "Transports that may be used, best first.")
    on_failure: Literal["fail", "next"] = option(
        "fail",
        "After a transport failed a job: fail the job, or try it again over the next one both sides have.",
    )
    mode: Literal["auto", "direct", "staged"] = option(
        "auto",
        "How chunks reach their places: straight into the pages, or through staging and moves inside each channel; "
        "auto: whichever should cost less.",
    )
    options: Mapping[str, Any] = field(default_factory=dict, metadata={"filled_later": True})
    """Each known transport's own Config, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """`[memory.NAME]`: one device's memory.  `options` is an instance of the kind's own Config."""

    kind: str = option("", "Kind of memory.")
    device: str = option("", "Which device, for kinds that know several.")
    options: Any = field(default=None, metadata={"filled_later": True})


PROBED = 64 << 10
"""Bytes of arena that hold as many probes as an agent serves at a time, at a page each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaConfig:
    """`[arena]`: where the sending side lays out what it is about to send."""

    size: Size = option(
        256 << 20,
        "Bytes; limits how much can be prepared and not yet fetched. An agent that only decodes takes 64 KiB at most.",
        minimum=4096,
    )
    pinned: bool = option(
        True,
        "Locks the arena's pages for the copy engines of GPUs that caches are on. Without, copies go to ordinary "
        "memory, at a third of the rate or less: for comparisons.",
    )


def _pattern(value: str) -> str | None:
    if not value:
        return None
    tcp = _split_tcp(value.replace("{name}", "name"))
    return None if tcp and tcp[1] > 0 and "{name}" in value else '"tcp://HOST:PORT" with {name} in it'


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryConfig:
    """`[discovery]`: where peers are.  Those in `[peers]` may be at host names, too."""

    dns: str = option(
        "",
        'Where peers are that [peers] does not name, such as "tcp://{name}.hawk.svc:7400"; empty: nowhere, unless a '
        "ticket says it.",
        check=_pattern,
    )
    ttl: Duration = option(30.0, "How long a host's address is used before it is looked up again.", minimum=1)
    timeout: Duration = option(
        5.0, "How long a lookup, or an answer of etcd, may take.", minimum=0.1, maximum=60
    )
    etcd: tuple[str, ...] = option(
        (),
        "Members of an etcd cluster in which agents register and find each other, such as "
        '["http://10.0.0.1:2379"]; empty: none. [peers] goes before what is registered, and that before dns.',
        check=_members,
    )
    etcd_prefix: str = option("/hawk/", "Below which keys agents register.", check=_prefix)
    etcd_lease: Duration = option(
        15.0, "After how long an agent that is gone is forgotten in etcd.", minimum=2, maximum=3600
    )
    etcd_ca: Path | None = option(
        None, "Certificates of the authority of etcd's servers; without, the system's."
    )
    etcd_cert: Path | None = option(None, "This agent's certificate for etcd.")
    etcd_key: Path | None = option(None, "Its private key.")
    etcd_user: str = option("", "User of etcd, where it asks for one.")
    etcd_password_file: Path | None = option(None, "File with that user's password in its first line.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingConfig:
    """`[staging]`: where the receiving side gathers what is then moved inside its channels."""

    size: Size = option(64 << 20, "Bytes over all channels of one memory.", minimum=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetileConfig:
    """`[retile]`: the conversion between layouts."""

    threads: int = option(
        0, "Threads; 0 means as many as there are processors to run on.", minimum=0, maximum=256
    )
    core: Literal["auto", "c", "numpy"] = option(
        "auto", "Which code does it; auto: the C core where it was built."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsConfig:
    """`[jobs]`: limits and deadlines of transfers."""

    lease: Duration = option(30.0, "How long source ranges are held without progress.", minimum=0.1)
    in_flight_per_peer: Size = option(
        128 << 20,
        "Bytes that one peer may have under way at a time; less than the arena, so that one that stands still leaves "
        "room for the others.",
        minimum=4096,
    )
    in_flight_per_transport: Size = option(
        0,
        "Bytes that all peers together may have under way over one transport; 0: all of the arena.",
        minimum=0,
    )
    chunk: Size = option(16 << 20, "Bytes prepared and sent at a time.", minimum=4096)
    pipeline: int = option(
        4,
        "Chunks at least into which a request falls that is large enough; 1: as few as chunk allows.",
        minimum=1,
    )
    deadline: Duration = option(60.0, "How long a job may take when its client names no time.", minimum=0.1)
    max_jobs: int = option(256, "Jobs at work at a time on each side; more stand in line.", minimum=1)
    max_queued: int = option(
        16_384, "Jobs that may stand in line on each side; more are told when to come again.", minimum=0
    )
    max_waiting: int = option(
        4096, "Fetches that may wait on each side for their offer to be made, in no other's way.", minimum=0
    )
    max_offers: int = option(1024, "Offers that wait to be fetched.", minimum=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegrityConfig:
    """`[integrity]`: end-to-end checks of what a fetch brings; see docs/security.md."""

    verify: Literal["off", "sample", "full"] = option(
        "off", "How much of what this agent fetches is checked in its own memory before it is ready."
    )
    sample: float = option(0.05, 'The part of each chunk that verify = "sample" checks, 0 to 1.', check=_part)
    on_mismatch: Literal["fail", "retry"] = option(
        "fail",
        "After wrong bytes: fail the fetch, or fetch everything once more and fail if it is wrong again.",
    )
    unverified: Literal["refuse", "allow"] = option(
        "refuse", "What to do with peers that send no checks: fail the fetch, or go on without them."
    )
    scrub: bool = option(
        False,
        "Zeroes ranges of the arena and of staging when a job is done with them, and new device caches.",
    )
    scrub_targets: bool = option(
        False, "Zeroes what a fetch that failed has written into its blocks, before they are free again."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole configuration of one agent."""

    agent: AgentConfig = field(default_factory=AgentConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    memory: Mapping[str, MemoryConfig] = field(default_factory=dict)
    arena: ArenaConfig = field(default_factory=ArenaConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    staging: StagingConfig = field(default_factory=StagingConfig)
    retile: RetileConfig = field(default_factory=RetileConfig)
    jobs: JobsConfig = field(default_factory=JobsConfig)
    integrity: IntegrityConfig = field(default_factory=IntegrityConfig)
    peers: Mapping[str, str] = field(default_factory=dict)

    @property
    def arena_bytes(self) -> int:
        """Bytes of arena that the agent fills: one that sends nothing needs a few, for those who try its transports."""
        return min(self.arena.size, PROBED) if self.agent.role == "decode" else self.arena.size


SECTIONS: dict[str, type[Any]] = {
    "agent": AgentConfig,
    "security": SecurityConfig,
    "transport": TransportConfig,
    "arena": ArenaConfig,
    "discovery": DiscoveryConfig,
    "staging": StagingConfig,
    "retile": RetileConfig,
    "jobs": JobsConfig,
    "integrity": IntegrityConfig,
}
"""The tables with a fixed set of keys; `memory` and `peers` are tables of names."""
