"""`hawk bench directory` at a real etcd: that it counts what it says, and leaves nothing there."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hawk.bench import directory
from hawk.control.etcd_client import Etcd, EtcdFault
from hawk.errors import InvalidArgument
from tests.etcd import MISSING, etcd


@pytest.mark.skipif(MISSING, reason="etcd is not installed (etcd-server)")
async def test_rows_and_nothing_left_behind(tmp_path: Path) -> None:
    with etcd(tmp_path) as server:
        row = await directory._measure((server.url,), 3, seconds=0.05, lease=2.0)
        client = Etcd([server.url])
        assert (await client.read(directory._PREFIX))[0] == []
        await client.close()
    assert row.peers == 3
    assert row.changes >= 1
    assert min(row.learned_ms, row.cpu_ms, row.change_us, row.heard_ms) > 0
    assert directory.DirectoryResult(2.0, (row,)).to_dict()["rows"][0]["peers"] == 3  # type: ignore[index]


def _grown(pipe: Connection) -> None:
    before = directory._resident()
    kept = bytearray(os.urandom(8 << 20))
    pipe.send(directory._resident() - before)
    del kept


def test_memory_is_the_processes_own_and_not_its_parents() -> None:
    """A process begins with its parent's most as its own, as far as `getrusage` goes."""
    large = bytearray(os.urandom(64 << 20))
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_grown, args=(there,))
    child.start()
    there.close()
    assert here.recv() > 7 << 10
    child.join()
    here.close()
    del large


async def test_a_directory_that_goes_away_meanwhile_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Etcd] = []

    class Goes(Etcd):
        def __init__(self, urls: Sequence[str]) -> None:
            super().__init__(urls)
            made.append(self)

        async def lease(self, seconds: float) -> tuple[int, float]:
            with contextlib.suppress(EtcdFault):
                await super().lease(seconds)  # its session is open now
            return 5, 600.0

    monkeypatch.setattr(directory, "Etcd", Goes)
    with pytest.raises(EtcdFault):
        await directory._measure(("http://127.0.0.1:9",), 1, seconds=0.05, lease=2.0)
    assert made[0]._session is None


def test_what_cannot_be_measured() -> None:
    with pytest.raises(InvalidArgument, match="no directory"):
        directory.run([])
    with pytest.raises(InvalidArgument, match="peers"):
        directory.run(["http://127.0.0.1:9"], [0])
    with pytest.raises(EtcdFault, match=r"127\.0\.0\.1:9"):
        directory.run(["http://127.0.0.1:9"], [1])
