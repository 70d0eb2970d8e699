"""One guest: its RDMA device works, as tools, the kernel and pyverbs see it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.lab.guest import rdma
from tests.lab.guest.rdma import SGE, SendWR, e

SIZE = 64 << 10


def test_the_device_is_up() -> None:
    said = subprocess.run(
        ["ibv_devinfo", "-d", rdma.DEVICE], capture_output=True, text=True, check=True, timeout=30
    )
    assert "PORT_ACTIVE" in said.stdout
    assert "4096 (5)" in said.stdout, said.stdout  # the path MTU


def test_modules_can_be_loaded_and_unloaded() -> None:
    subprocess.run(["modprobe", "dummy"], check=True, timeout=30)
    assert Path("/sys/module/dummy").exists()
    subprocess.run(["modprobe", "-r", "dummy"], check=True, timeout=30)
    assert not Path("/sys/module/dummy").exists()


def test_a_write_arrives() -> None:
    context, pd = rdma.open_device()
    here, there = rdma.End(context, pd), rdma.End(context, pd)
    here.connect(there.about())
    there.connect(here.about())
    source, target = rdma.Buffer(pd, SIZE), rdma.Buffer(pd, SIZE)
    source.data[:] = os.urandom(SIZE)
    request = SendWR(
        wr_id=7,
        num_sge=1,
        sg=[SGE(source.address, SIZE, source.mr.lkey)],
        opcode=e.IBV_WR_RDMA_WRITE,
        send_flags=e.IBV_SEND_SIGNALED,
    )
    request.set_wr_rdma(target.mr.rkey, target.address)
    here.qp.post_send(request)
    done = here.completion()
    assert (done.wr_id, done.status) == (7, e.IBV_WC_SUCCESS)
    assert target.data[:] == source.data[:]
