"""nixl meets the contract over NIXL itself: pulled and pushed over TCP, and over shared memory."""

from __future__ import annotations

import pytest

pytest.importorskip("nixl")

from hawk.transports.nixl import NixlConfig, NixlTransport
from hawk.transports.testing import MovingContract, TransportContract

SMALL = {"chunk": 1 << 20, "piece": 4 << 20, "grace": 0.2}


class TestPull(TransportContract):
    takes_turns = True
    large = 12 << 20

    def make(self) -> NixlTransport:
        return NixlTransport(NixlConfig(tls="tcp", direction="pull", **SMALL))


class TestPush(TransportContract):
    takes_turns = True
    large = 12 << 20

    def make(self) -> NixlTransport:
        return NixlTransport(NixlConfig(tls="tcp", direction="push", **SMALL))


class TestSharedMemory(MovingContract):
    def make(self) -> NixlTransport:
        return NixlTransport()
