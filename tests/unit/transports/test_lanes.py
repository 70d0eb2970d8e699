"""Lanes: a read that has ended, however it did, refers to no memory any more."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hawk.errors import DeadlineExceeded, HawkError, TransferFailed
from hawk.jobs.states import forget_frames
from hawk.memory.region import Region
from hawk.transports._lanes import Lane, Lanes, Work


class Stuck(Lane):
    """Waits in each piece for a byte of its peer."""

    def __init__(self) -> None:
        super().__init__("p0", 1.0)
        self.entered = threading.Event()
        self.peers: list[socket.socket] = []
        self.gone = False

    def _connect(self, deadline: float) -> None:
        if self.gone:
            raise ConnectionRefusedError("gone")
        mine, other = socket.socketpair()
        self.peers.append(other)
        self._adopt(mine)

    def _carry(self, sock: socket.socket, work: Work, piece: Any) -> None:
        self.entered.set()
        if not sock.recv(1):
            raise ConnectionResetError("cut")

    def part(self) -> None:
        """The peer goes, for good."""
        self.gone = True
        for peer in self.peers:
            peer.close()


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def read(lanes: Lanes, ending: str, lane: Stuck) -> weakref.ref[Any]:
    """One read to its ending; returns its memory."""
    array = np.zeros(64, np.uint8)
    memory = weakref.ref(array)
    piece: Any = "all of it"
    work = Work(b"", [piece], np.zeros(1, np.int64), [Region("client", array)])
    del array
    task = asyncio.get_running_loop().create_task(lanes.carry(work, 0.05 if ending == "late" else 20.0))
    del work
    await asyncio.to_thread(lane.entered.wait)
    closing = None
    match ending:
        case "ready":
            lane.peers[-1].send(b"x")
        case "cancelled":
            task.cancel()
        case "broken":
            lane.part()
        case "closed":
            closing = asyncio.get_running_loop().create_task(lanes.close())
    expected = {"ready": None, "cancelled": asyncio.CancelledError, "late": DeadlineExceeded}
    error: BaseException | None = None
    try:
        await task
    except (HawkError, asyncio.CancelledError) as fault:
        error = fault
    kind = expected.get(ending, TransferFailed)
    assert error is None if kind is None else isinstance(error, kind)
    forget_frames(error)
    if closing is not None:
        await closing
    return memory


@pytest.mark.parametrize("ending", ["ready", "cancelled", "late", "broken", "closed"])
async def test_an_ended_read_refers_to_no_memory(ending: str) -> None:
    lane = Stuck()
    lanes = Lanes("hawk-test", [lane])
    await lanes.start(5.0)
    memory = await read(lanes, ending, lane)
    await lanes.close()  # the lane has left its piece, and not only said so
    assert memory() is None, gc.get_referrers(memory())
    lane.part()
