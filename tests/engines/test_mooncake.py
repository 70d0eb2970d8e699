"""mooncake meets the contract over Mooncake's Transfer Engine."""

from __future__ import annotations

import pytest

pytest.importorskip("mooncake.engine")

from hawk.transports.mooncake import MooncakeConfig, MooncakeTransport
from hawk.transports.testing import TransportContract

SMALL = {"chunk": 1 << 20, "piece": 4 << 20, "grace": 0.2}


class TestTcp(TransportContract):
    takes_turns = True
    large = 12 << 20

    def make(self) -> MooncakeTransport:
        return MooncakeTransport(MooncakeConfig(**SMALL))
