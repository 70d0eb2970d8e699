"""verbs meets the transport contract over a real device, Soft-RoCE: the same tests as tcp, shm and the fake device."""

from __future__ import annotations

from typing import Any

from hawk.transports.base import Transport
from hawk.transports.testing import AccessContract, ContractBase, TransportContract
from hawk.transports.verbs import VerbsConfig, VerbsTransport

SMALL: dict[str, Any] = {"batch": 1 << 20, "message": 256 << 10, "depth": 64}


class OverRxe(ContractBase):
    large = 8 << 20  # some tenths of a second under emulation
    config = VerbsConfig()

    def make(self) -> Transport:
        return VerbsTransport(self.config)


class TestOneQueuePair(OverRxe, TransportContract):
    config = VerbsConfig(queue_pairs=1, **SMALL)


class TestWithoutWindows(OverRxe, AccessContract):
    config = VerbsConfig(queue_pairs=2, windows="off", **SMALL)
