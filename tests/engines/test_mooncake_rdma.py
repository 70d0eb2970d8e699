"""mooncake over RDMA meets the part of the contract that depends on the device, on a machine that has one.

    HAWK_MOONCAKE_HOST=10.77.0.1 python -m pytest tests/engines/test_mooncake_rdma.py

The address is one of the RDMA device's port.  docs/transports.md has the command for a virtual machine with Soft-RoCE.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("mooncake.engine")

from hawk.transports.mooncake import MooncakeConfig, MooncakeTransport
from hawk.transports.testing import AccessContract, MovingContract

HOST = os.environ.get("HAWK_MOONCAKE_HOST", "")
DEVICES = Path("/sys/class/infiniband")

pytestmark = pytest.mark.skipif(
    not HOST or not DEVICES.exists() or not any(DEVICES.iterdir()),
    reason="HAWK_MOONCAKE_HOST names no address of an RDMA device here",
)


class TestRdma(MovingContract, AccessContract):
    large = 4 << 20

    def make(self) -> MooncakeTransport:
        patient = {"stall_timeout": 60.0, "connect_timeout": 60.0, "handshake_timeout": 60.0}
        config = MooncakeConfig(
            host=HOST, open_ports=True, protocol="rdma", chunk=1 << 20, piece=4 << 20, grace=0.2, **patient
        )
        return MooncakeTransport(config)
