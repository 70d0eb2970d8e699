"""mooncake meets the contract over an engine that is made up.  `scripts/test engines` has the real one."""

from __future__ import annotations

from hawk.transports.mooncake import MooncakeConfig, MooncakeTransport
from hawk.transports.mooncake._te import MooncakeEngine
from hawk.transports.testing import TransportContract
from tests.fake_engines import FakeMooncake

SMALL = {"chunk": 256 << 10, "piece": 1 << 20, "grace": 0.2}


class TestTcp(TransportContract):
    takes_turns = True
    large = 4 << 20

    def make(self) -> MooncakeTransport:
        config = MooncakeConfig(**SMALL)
        return MooncakeTransport(config, opener=lambda: MooncakeEngine(config, module=FakeMooncake()))
