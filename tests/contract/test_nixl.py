"""nixl meets the contract over an agent that is made up, pulled and pushed; `scripts/test engines` has the real one."""

from __future__ import annotations

from hawk.transports.nixl import NixlConfig, NixlTransport
from hawk.transports.nixl._agent import NixlAgent
from hawk.transports.testing import AccessContract, MovingContract, TransportContract
from tests import fake_engines

SMALL = {"chunk": 256 << 10, "piece": 1 << 20, "grace": 0.2, "tls": "tcp"}


class Made(NixlTransport):
    def __init__(self, direction: str) -> None:
        config = NixlConfig(direction=direction, **SMALL)
        super().__init__(config, opener=lambda: NixlAgent("tcp", package=fake_engines))


class TestPull(TransportContract):
    takes_turns = True
    large = 4 << 20

    def make(self) -> Made:
        return Made("pull")


class TestPush(MovingContract, AccessContract):
    takes_turns = True
    large = 4 << 20

    def make(self) -> Made:
        return Made("push")
