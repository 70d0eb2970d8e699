"""`hawk bench directory` at a real etcd: that it counts what it says, and leaves nothing there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hawk.bench import directory
from hawk.control.etcd_client import Etcd, EtcdFault
from hawk.errors import InvalidArgument
from tests.etcd import etcd, needed


@needed
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


def test_what_cannot_be_measured() -> None:
    with pytest.raises(InvalidArgument, match="no directory"):
        directory.run([])
    with pytest.raises(InvalidArgument, match="peers"):
        directory.run(["http://127.0.0.1:9"], [0])
    with pytest.raises(EtcdFault, match=r"127\.0\.0\.1:9"):
        directory.run(["http://127.0.0.1:9"], [1])
