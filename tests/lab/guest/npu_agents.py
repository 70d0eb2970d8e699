"""Two agents in two guests, over RDMA, with the decode side's memory behind the module hawk_npu.

One job, of which every byte is looked at twice: through the dma-bufs that the client maps, and by the kernel's own
sums over the agent's channels.  At the end nobody holds anything of the module.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from hawk.client import Client
from hawk.doctor.machine import Machine
from hawk.doctor.modules import ours
from hawk.memory import npu_abi as abi
from tests.end_to_end import caches as c
from tests.end_to_end.harness import AgentProcess, back_to, clients, counts
from tests.lab.guest import npu
from tests.lab.guest.meet import Meeting
from tests.lab.guest.npu import PAGE
from tests.lab.guest.rdma import address, node
from tests.lab.guest.sides import CONTROL, FETCH, JOBS, LIMIT, VERBS, Side, device, moved, source

CHANNELS, CHANNEL_KIB, LAYERS = 8, 2048, 8
DEVICE = "/dev/hawk_npu0"
MODULE = ("emulated=1", f"channels={CHANNELS}", f"channel_kib={CHANNEL_KIB}")
PIDFD_GETFD = 438


class NpuSide(Side):
    """As its base, with a device of the module on the decode side."""

    def start(self) -> AgentProcess:
        """See `Side.start`."""
        if self.prefill:
            return super().start()
        tables: dict[str, Any] = {
            "transport": {"prefer": [self._transport]},
            "transport.verbs": VERBS,
            "jobs": JOBS,
            "peers": {"p0": CONTROL},
            "memory.npu0": {"kind": "npu", "device": DEVICE},
        }
        self.agent = self.site.start("d0", tables, role="decode", control=f"tcp://{address(2)}:7400")
        return self.agent


@pytest.fixture(scope="module")
def side() -> Iterator[NpuSide]:
    # Its end asserts that all of the module's counts are zero, and unloads it.
    with Meeting() as meeting, npu.module(*MODULE, peers=False) if node() == 2 else nullcontext():
        made = NpuSide(meeting, "verbs")
        yield made
        made.site.close()


def _its_device(agent: AgentProcess) -> int:
    """The agent's own open of the device: nobody else's may ask about its channels."""
    (number,) = (int(number) for number, path in agent.descriptors().items() if path == DEVICE)
    pid = os.pidfd_open(agent.pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        fd = int(libc.syscall(PIDFD_GETFD, pid, number, 0))
        assert fd >= 0, os.strerror(ctypes.get_errno())
        return fd
    finally:
        os.close(pid)


def _sums(pages: np.ndarray) -> np.ndarray:
    """FNV-1a of each row of `uint8[n, PAGE]`, one column of all rows after the other."""
    value = np.full(len(pages), 0xCBF29CE484222325, np.uint64)
    for column in np.ascontiguousarray(pages.T):
        value ^= column
        value *= np.uint64(0x100000001B3)
    return value


def _as_the_kernel_sees_them(agent: AgentProcess, channels: list[np.ndarray]) -> None:
    """Asserts that the kernel's sum of every page of the device is that of the client's bytes."""
    fd = _its_device(agent)
    try:
        for number, channel in enumerate(channels):
            wanted = _sums(channel.reshape(-1, PAGE)).tolist()
            for page, value in enumerate(wanted):
                argument = abi.Checksum(channel=number, offset=page * PAGE, nbytes=PAGE)
                fcntl.ioctl(fd, abi.CHECKSUM, argument, True)
                assert argument.value == value, f"channel {number}, page {page}"
    finally:
        os.close(fd)


async def _send(side: NpuSide, hp: Client) -> None:
    of = source(LAYERS)
    cache = await hp.register(of)
    offer = await hp.offer("main", cache, moved(of).source_blocks, tokens=moved(of).tokens, ttl="5min")
    await side.tell(offer.ticket)
    assert await offer.ended() == "consumed"
    await cache.release()


async def _receive(side: NpuSide, hd: Client) -> None:
    made = await device(hd, LAYERS)
    wanted = moved(source(LAYERS))
    ready = await hd.fetch(await side.hear(), into=made, blocks=wanted.target_blocks, timeout=FETCH)
    assert ready.transport == "verbs"
    assert len(made.channels) == CHANNELS
    c.check(made, c.target_spec(layers=LAYERS), wanted, guards=[made])
    _as_the_kernel_sees_them(side.agent, made.channels)
    found = npu.counts()
    print(f"{ready.nbytes} bytes by {ready.transport}; the module counts {found}")
    assert found["regions"] == found["exports"] == CHANNELS
    await made.release()


def test_the_doctor_knows_the_module(side: NpuSide) -> None:
    if side.prefill:
        return
    (found,) = ours(Machine())
    assert (found.level, found.text) == ("ok", f"loaded, version 1.0; {DEVICE}")


async def test_the_main_job_ends_behind_the_module(side: NpuSide) -> None:
    async with clients(side.agent) as (client,):
        before = await counts(client)
        await (_send if side.prefill else _receive)(side, client)
        await back_to(before, client, LIMIT)
    await side.together()


def test_an_agent_that_ends_gives_everything_back(side: NpuSide) -> None:
    if side.prefill:
        return
    side.site.close()
    npu.until_counts({})
