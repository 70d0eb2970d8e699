"""Plain registrations of emulated channels, written by a peer through real verbs and looked at from the kernel."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.lab.guest import checkers, npu, rdma
from tests.lab.guest.npu import CHANNEL, PAGE, Device, clean, emulated
from tests.lab.guest.rdma import SGE, SendWR, e

__all__ = ["clean", "emulated"]
pytestmark = pytest.mark.usefixtures("clean")

KEPT = CHANNEL // PAGE


class Peer:
    """Two connected ends; `write` is what the far one does to our memory."""

    def __init__(self) -> None:
        context, self.pd = rdma.open_device()
        self.near, self.far = rdma.End(context, self.pd), rdma.End(context, self.pd)
        self.near.connect(self.far.about())
        self.far.connect(self.near.about())
        self.source = rdma.Buffer(self.pd, CHANNEL)

    def register(self, address: int, nbytes: int) -> Any:
        return rdma.MR(self.pd, nbytes, rdma.ACCESS, address=address)

    def write(self, mr: Any, address: int, data: bytes) -> int:
        """The status of an RDMA WRITE of `data` to an address."""
        self.source.data[: len(data)] = data
        request = SendWR(
            num_sge=1,
            sg=[SGE(self.source.address, len(data), self.source.mr.lkey)],
            opcode=e.IBV_WR_RDMA_WRITE,
            send_flags=e.IBV_SEND_SIGNALED,
        )
        request.set_wr_rdma(mr.rkey, address)
        self.far.qp.post_send(request)
        return int(self.far.completion().status)


def test_a_peer_writes_into_a_channel() -> None:
    peer = Peer()
    with Device().claim(0, 1) as device:
        made = device.map(1)
        address = npu.address_of(made)
        mr = peer.register(address, CHANNEL)
        data = os.urandom(64 << 10)
        assert peer.write(mr, address + 3 * PAGE + 1, data) == e.IBV_WC_SUCCESS
        assert device.checksum(1, 3 * PAGE + 1, len(data)) == npu.fnv1a(data)
        assert device.checksum(1, 0, 3 * PAGE + 1) == npu.fnv1a(bytes(3 * PAGE + 1))
        assert device.checksum(0, 0, PAGE) == npu.fnv1a(bytes(PAGE))
        mr.close()


def test_reset_waits_for_the_registration() -> None:
    peer = Peer()
    with Device().claim(0) as device:
        made = device.map(0)
        mr = peer.register(npu.address_of(made), CHANNEL)
        with npu.fails(16):
            device.reset(0)
        mr.close()
        device.reset(0)


def test_a_registration_that_outlives_close_does_not_see_the_next_owner() -> None:
    peer = Peer()
    device = Device().claim(0)
    address = npu.address_of(device.map(0))
    mr = peer.register(address, CHANNEL)
    device.close()
    npu.until_counts({"pages_kept": KEPT})
    with Device().claim(0, 1, 2, 3) as second:
        canaries = [second.map(channel) for channel in range(4)]
        for canary in canaries:
            canary[:] = b"\xc5" * CHANNEL
        before = [second.checksum(channel, 0, 4 * PAGE) for channel in range(4)]
        assert peer.write(mr, address, b"stray" * 10_000) == e.IBV_WC_SUCCESS
        # Not in the last page of 256: there rxe (6.1) looks at a pointer behind its own table, which KASAN tells of.
        assert peer.write(mr, address + CHANNEL - PAGE - 5, b"stray") == e.IBV_WC_SUCCESS
        assert all(canary[:] == b"\xc5" * CHANNEL for canary in canaries)
        assert [second.checksum(channel, 0, 4 * PAGE) for channel in range(4)] == before
        assert npu.counts()["pages_kept"] == KEPT
    mr.close()
    npu.until_counts({})


def test_nothing_was_lost() -> None:
    checkers.assert_unleaked("hawk_npu")
