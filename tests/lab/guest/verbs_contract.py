"""verbs meets the transport contract over a real device, Soft-RoCE: the same tests as tcp, shm and the fake device.

Two guests share the tests between them; each reads from itself.
"""

from __future__ import annotations

import asyncio
import subprocess
from typing import Any

from hawk.transports.base import Transport
from hawk.transports.testing import LIMIT, AccessContract, ContractBase, EndsContract, MovingContract
from hawk.transports.verbs import VerbsConfig, VerbsTransport
from tests.contract.verbs_keys import StaleKeys, StaleWriters
from tests.lab.guest.rdma import guests, node

SMALL: dict[str, Any] = {"batch": 1 << 20, "message": 256 << 10, "depth": 64, "handshake_timeout": 60.0}


def here(half: int) -> bool:
    """Whether this half of the tests runs in this guest."""
    return guests() == 1 or node() == half


class OverRxe(ContractBase):
    large = 8 << 20  # some tenths of a second under emulation
    config = VerbsConfig()

    def make(self) -> Transport:
        return VerbsTransport(self.config)


def interface(state: str) -> None:
    """Takes this guest's network interface up or down, and with it the device's port."""
    subprocess.run(["ip", "link", "set", "eth0", state], check=True, timeout=30)


if here(1):

    class TestBytes(OverRxe, MovingContract, StaleKeys):
        config = VerbsConfig(queue_pairs=1, **SMALL)

    class TestPush(OverRxe, MovingContract, AccessContract, EndsContract, StaleWriters):
        config = VerbsConfig(direction="push", push_windows=256, queue_pairs=2, **SMALL)
        windows_have_bounds = False  # docs/hardware.md

    class TestPushWithoutWindows(OverRxe, AccessContract):
        config = VerbsConfig(direction="push", windows="off", queue_pairs=1, **SMALL)


if here(2):

    class TestKeysAndEndings(OverRxe, AccessContract, EndsContract):
        config = VerbsConfig(queue_pairs=1, **SMALL)

    async def test_a_port_that_goes_down_is_told_and_that_it_is_up_again() -> None:
        transport = VerbsTransport()
        await transport.start()
        try:
            assert transport.trouble() is None
            for state, trouble in (("down", "no RDMA port is active: rxe0:1"), ("up", None)):
                interface(state)
                async with asyncio.timeout(LIMIT):
                    while transport.trouble() != trouble:
                        await asyncio.sleep(0.05)
            assert transport.counts()["port-down"] == 1
        finally:
            await transport.close()

    class TestWithoutWindows(OverRxe, AccessContract):
        config = VerbsConfig(queue_pairs=2, windows="off", **SMALL)
