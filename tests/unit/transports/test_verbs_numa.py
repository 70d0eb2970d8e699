"""NUMA nodes of cards and memory: read, compared, and said in settings."""

from pathlib import Path

import numpy as np
import pytest

from hawk.errors import InvalidArgument
from hawk.transports.verbs import VerbsConfig
from hawk.transports.verbs._choose import open_ports
from hawk.transports.verbs._numa import UNKNOWN, Distances, node_of
from hawk.transports.verbs.testing import FakeDriver


def test_distances_are_read_as_the_kernel_has_them(tmp_path: Path) -> None:
    for node, text in ((0, "10 21 31\n"), (1, "21 10 21\n"), (2, "junk")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "distance").write_text(text)
    (tmp_path / "node3").mkdir()
    distances = Distances.read(tmp_path)
    assert [distances.of(0, node) for node in (0, 1, 2)] == [10, 21, 31]
    assert distances.of(2, 0) == distances.of(0, 7) == 20, "not known, but another"
    assert distances.of(2, 2) == 10
    assert distances.of(UNKNOWN, 1) == distances.of(1, UNKNOWN) == 10, "nothing speaks against it"
    assert Distances.read(tmp_path / "none").of(0, 1) == 20


def test_the_kernel_says_where_a_page_is_or_nothing() -> None:
    page = np.ones(4096, np.uint8)
    nodes = {int(folder.name[4:]) for folder in Path("/sys/devices/system/node").glob("node[0-9]*")}
    assert node_of(page.ctypes.data) in nodes | {UNKNOWN}
    assert node_of(0) == UNKNOWN


def test_settings_of_nodes() -> None:
    assert VerbsConfig(memory_nodes=("npu0=1", "arena=0")).nodes == {"npu0": 1, "arena": 0}
    for wrong in ("npu0", "=1", "npu0=", "npu0=x", "npu0=-1"):
        with pytest.raises(InvalidArgument, match="memory_nodes"):
            VerbsConfig(memory_nodes=(wrong,))
    with pytest.raises(InvalidArgument, match="near"):
        VerbsConfig(near="far")  # type: ignore[arg-type]
    driver = FakeDriver(["a", "b"])
    chosen = open_ports(driver, ["a@1", "b:1@0", "b"], local=lambda _: True)
    assert [c.node for c in chosen] == [1, 0, -1]
    for device in driver.opened:
        device.close()
    for wrong in ("a@", "a@x", "a@-1"):
        with pytest.raises(InvalidArgument, match="@NODE"):
            open_ports(driver, [wrong], local=lambda _: True)
