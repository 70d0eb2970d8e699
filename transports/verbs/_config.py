"""Settings of the verbs transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hawk.errors import InvalidArgument
from hawk.transports import _checks
from hawk.units import Duration, Size


@dataclass(frozen=True, slots=True)
class VerbsConfig:
    """Settings of the verbs transport; sizes in bytes, durations in seconds.

    devices            devices to use, as "NAME" or "NAME:PORT", with "@NODE" behind where the kernel does not know the
                       NUMA node that one is on; none: the fastest active port, by rule
    near               whether batches go by devices near to their memory: "prefer": the others take what these have no
                       room for; "only": the others while these are broken; "any": all alike
    memory_nodes       NUMA nodes of memories whose pages do not tell theirs, a GPU's for instance, as "NAME=NODE"
    gid_index          entry of the GID table; -1: by rule
    host               address to listen on for handshakes; "": that of the chosen GID
    port               port to listen on; 0 lets the system choose
    advertise          host that peers connect to, where it differs from `host`
    queue_pairs        queue pairs of one link, dealt over the devices in turn
    depth              send slots of a queue pair
    max_sge            pieces of one work request, at most; the device may have fewer
    reads              reads outstanding on a queue pair; the lowest of both sides' settings and devices counts
    message            bytes of one work request, at most; the port may carry less
    batch              bytes posted with one doorbell, about
    direction          who moves the bytes: "pull": the reader, by READs; "push": the sender, by WRITEs; "auto": whoever
                       needs fewer requests; what is pushed takes two sides of which neither says "pull"
    push_windows       stretches of memory that a read opens to whom pushes; one that fills more is pulled
    windows            memory windows: "auto" where the device has them, or "off": a registration for each chunk
    slice              bytes registered at a time
    spin               how long to poll for completions before waiting for an event
    timeout            how long a packet may stay unanswered before it is sent again (rounded to a power of two)
    retries            how often it is sent again before the queue pair breaks
    traffic_class      of packets on Ethernet
    service_level      of packets on InfiniBand
    max_connections    links that are served at a time
    max_strangers      connections that have not said hello yet; of more, the oldest is dropped
    handshake_timeout  how long a peer may take for an answer over the handshake connection
    drain_timeout      how long work that was posted may take to end before its queue pair is destroyed
    """

    devices: tuple[str, ...] = ()
    near: Literal["prefer", "only", "any"] = "prefer"
    memory_nodes: tuple[str, ...] = ()
    gid_index: int = -1
    host: str = ""
    port: int = 0
    advertise: str = ""
    queue_pairs: int = 2
    depth: int = 256
    max_sge: int = 30
    reads: int = 16
    message: Size = 1 << 20
    batch: Size = 2 << 20
    direction: Literal["pull", "push", "auto"] = "pull"
    push_windows: int = 32
    windows: Literal["auto", "off"] = "auto"
    slice: Size = 256 << 20
    spin: Duration = 50e-6
    timeout: Duration = 0.067
    retries: int = 7
    traffic_class: int = 0
    service_level: int = 0
    max_connections: int = 256
    max_strangers: int = 64
    handshake_timeout: Duration = 5.0
    drain_timeout: Duration = 2.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("gid_index", -1, 65535),
            ("port", 0, 65535),
            ("queue_pairs", 1, 32),
            ("depth", 8, 65536),
            ("max_sge", 1, 256),
            ("reads", 1, 255),
            ("message", 4096, 1 << 30),
            ("batch", 4096, 1 << 30),
            ("slice", 1 << 16, 1 << 40),
            ("push_windows", 1, 256),
            ("retries", 0, 7),
            ("traffic_class", 0, 255),
            ("service_level", 0, 15),
            ("max_connections", 1, 65536),
            ("max_strangers", 1, 65536),
        ):
            _checks.whole(f"transport.verbs.{name}", getattr(self, name), low, high)
        for name in ("timeout", "handshake_timeout", "drain_timeout"):
            _checks.seconds(f"transport.verbs.{name}", getattr(self, name))
        if isinstance(self.spin, bool) or not 0 <= self.spin <= 0.01:
            raise InvalidArgument(
                "out of range",
                field="transport.verbs.spin",
                got=repr(self.spin),
                expected="0 to 0.01 seconds",
            )
        for name, choices in (
            ("windows", ("auto", "off")),
            ("direction", ("pull", "push", "auto")),
            ("near", ("prefer", "only", "any")),
        ):
            if getattr(self, name) not in choices:
                raise InvalidArgument(
                    "no such choice",
                    field=f"transport.verbs.{name}",
                    got=repr(getattr(self, name)),
                    expected=" or ".join(choices),
                )
        for entry in self.memory_nodes:
            if not (found := entry.partition("="))[0] or not found[2].isdecimal():
                raise InvalidArgument(
                    "not a memory's node",
                    field="transport.verbs.memory_nodes",
                    got=repr(entry),
                    expected='"NAME=NODE", for instance "npu0=1"',
                )
        if self.host in ("0.0.0.0", "::", "*") and not self.advertise:
            raise InvalidArgument(
                "peers need an address to connect to",
                field="transport.verbs.advertise",
                expected=f"a host name or address of this machine, since transport.verbs.host is {self.host}",
            )

    @property
    def nodes(self) -> dict[str, int]:
        """`memory_nodes` by name."""
        return {name: int(node) for name, _, node in (entry.partition("=") for entry in self.memory_nodes)}

    @property
    def timeout_exponent(self) -> int:
        """The local ACK timeout as queue pairs take it: 4.096 us times two to the n, at least `timeout`."""
        exponent = 1
        while exponent < 31 and 4.096e-6 * 2**exponent < self.timeout:
            exponent += 1
        return exponent
