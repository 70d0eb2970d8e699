"""Rows that are dealt out of buffers, where the system gives no thread to do it in."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hawk.memory.region import Region
from hawk.transports._engine._deal import Dealer
from hawk.transports._lanes import Work
from hawk.transports._pieces import Piece, bases


def read(nbytes: int) -> tuple[Work, np.ndarray]:
    region = Region("cache", np.zeros(nbytes, np.uint8))
    return Work(b"", [], bases([region]), [region]), region.array


def row(nbytes: int) -> Piece:
    zero = np.zeros(1, np.int64)
    return Piece(np.zeros(1, np.int32), zero, zero, np.asarray([nbytes]), nbytes)


async def test_what_no_thread_was_had_for_is_dealt_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that is over and whose memory somebody else has: nothing of it may come later."""
    dealer = Dealer(1, 64)
    before, first = read(64)
    after, second = read(64)
    start = threading.Thread.start

    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    dealer.take(0)[:] = 1
    dealer.deal(before, row(64), 0, at_once=False)
    dealer.settle()
    assert first.tolist() == [1] * 64
    first[:] = 0
    monkeypatch.setattr(threading.Thread, "start", start)
    dealer.take(0)[:] = 2
    dealer.deal(after, row(64), 0, at_once=False)
    dealer.settle()
    assert second.tolist() == [2] * 64
    assert first.tolist() == [0] * 64
    dealer.close()
