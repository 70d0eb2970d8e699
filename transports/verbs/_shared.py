"""What all parts of one transport that was started share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hawk.transports.verbs._choose import Chosen
    from hawk.transports.verbs._config import VerbsConfig
    from hawk.transports.verbs._numa import Distances
    from hawk.transports.verbs._register import Registrations
    from hawk.transports.verbs._windows import WindowPool
    from hawk.transports.verbs._worker import Worker

BROKEN, PULLED, PUSHED = "queue-pair-broken", "read-pulled", "read-pushed"
DEVICE_FAILED, PORT_DOWN, QUEUE_PAIR_EVENT = "device-failed", "port-down", "queue-pair-event"

_COUNTED = (BROKEN, PULLED, PUSHED, DEVICE_FAILED, PORT_DOWN, QUEUE_PAIR_EVENT)


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """See the module.

    ports          what is used, in the order in which peers count them
    registrations  of memory here, with every device
    pools          windows by the id of a port's device; empty where memory is opened by registrations
    distances      between NUMA nodes
    counts         what happened how often, by the names above
    """

    config: VerbsConfig
    ports: Sequence[Chosen]
    worker: Worker
    registrations: Registrations
    pools: Mapping[int, WindowPool]
    distances: Distances
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_COUNTED, 0)))
