"""What the doctor says of RDMA devices and of the modules around them, from trees of files."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from hawk.doctor import Level, modules, rdma
from tests.unit.doctor.trees import LINUX, PORT, ROCE, levels, only, tree

NVIDIA = {
    "/sys/module/nvidia/version": "580.1",
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64",
}
OPEN = {**NVIDIA, "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64"}


def test_no_device_is_no_failure(tmp_path: Path) -> None:
    found = only(rdma.devices, tree(tmp_path, LINUX))
    assert found.level is Level.WARN
    assert "tcp and shm" in found.remedy


def test_a_card_in_order(tmp_path: Path) -> None:
    machine = tree(tmp_path, ROCE)
    assert levels(rdma.devices, machine) == {
        "mlx5_0 port 1": "ok",
        "mlx5_0 port 1 GID": "ok",
        "mlx5_0 port 1 MTU": "ok",
    }
    up, gid, mtu = rdma.devices(machine)
    assert "ACTIVE, Ethernet, 100 Gb/sec" in up.text
    assert gid.text == "10.77.0.1 at index 10"
    assert "path MTU 4096" in mtu.text


def test_indices_are_in_the_order_in_which_people_count(tmp_path: Path) -> None:
    assert [gid.index for gid in rdma.gids(tree(tmp_path, ROCE), PORT)] == [0, 1, 2, 10]


@pytest.mark.parametrize(
    ("mtu", "path"), [(1500, 1024), (4191, 2048), (4192, 4096), (9000, 4096), (200, 256)]
)
def test_the_path_mtu_is_what_the_interface_can_carry(tmp_path: Path, mtu: int, path: int) -> None:
    machine = tree(tmp_path, {**ROCE, "/sys/class/net/eth1/mtu": str(mtu)})
    found = list(rdma.devices(machine))[-1]
    assert f"path MTU {path}," in found.text
    assert (found.level is Level.OK) == (path == 4096)
    assert found.level is Level.OK or "ip link set eth1 mtu 4200" in found.remedy


def test_a_port_that_is_down(tmp_path: Path) -> None:
    found = only(rdma.devices, tree(tmp_path, {**ROCE, f"{PORT}/state": "1: DOWN"}))
    assert found.level is Level.WARN
    assert "ip link set eth1 up" in found.remedy


def test_no_address_that_can_be_routed(tmp_path: Path) -> None:
    files = {**ROCE, f"{PORT}/gid_attrs/types/10": "IB/RoCE v1"}
    assert levels(rdma.devices, tree(tmp_path, files))["mlx5_0 port 1 GID"] == "warn"


def test_infiniband_has_addresses_of_its_own(tmp_path: Path) -> None:
    gid = "fe80:0000:0000:0000:b859:9f03:00d4:1234"
    files = {f"{PORT}/state": "4: ACTIVE", f"{PORT}/link_layer": "InfiniBand", f"{PORT}/gids/0": gid}
    assert levels(rdma.devices, tree(tmp_path, files)) == {"mlx5_0 port 1": "ok", "mlx5_0 port 1 GID": "ok"}


def test_pyverbs(tmp_path: Path) -> None:
    assert only(rdma.pyverbs, tree(tmp_path, {})).level is Level.OK  # nobody needs it
    found = only(rdma.pyverbs, tree(tmp_path, ROCE))
    assert found.level is Level.WARN
    assert "python3-pyverbs" in found.remedy
    folder = "/usr/lib/python3/dist-packages/pyverbs"
    other = {f"{folder}/device.cpython-37m-x86_64-linux-gnu.so": ""}
    found = only(rdma.pyverbs, tree(tmp_path, other))
    assert (found.level, "Python 3.7" in found.text) == (Level.WARN, True)
    ours = f"device.cpython-{sys.version_info[0]}{sys.version_info[1]}-x86_64-linux-gnu.so"
    assert only(rdma.pyverbs, tree(tmp_path, {f"{folder}/{ours}": ""})).level is Level.OK


def test_pyverbs_elsewhere_than_in_debians_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = f"device.cpython-{sys.version_info[0]}{sys.version_info[1]}-x86_64-linux-gnu.so"
    of_debian = "/usr/lib/python3/dist-packages/pyverbs/device.cpython-37m-x86_64-linux-gnu.so"
    mine = sysconfig.get_path("platlib")
    for n, folder in enumerate(
        (mine, f"/usr/lib64/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages")
    ):
        found = only(rdma.pyverbs, tree(tmp_path / str(n), {f"{folder}/pyverbs/{ours}": "", of_debian: ""}))
        assert (found.level, found.text) == (Level.OK, f"in {folder}"), "one that can be used comes first"
    monkeypatch.setenv("HAWK_PYVERBS_PATH", "/opt/rdma")
    found = only(rdma.pyverbs, tree(tmp_path / "a", {f"{mine}/pyverbs/{ours}": ""}))
    assert (found.level, found.text) == (Level.WARN, "none in /opt/rdma")
    assert "HAWK_PYVERBS_PATH" in found.remedy
    found = only(rdma.pyverbs, tree(tmp_path / "b", {f"/opt/rdma/pyverbs/{ours}": ""}))
    assert (found.level, found.text) == (Level.OK, "in /opt/rdma")


@pytest.mark.parametrize(
    ("files", "level"),
    [
        ({}, "ok"),
        (NVIDIA, "ok"),  # and no RDMA device that would need it
        ({**NVIDIA, **ROCE}, "warn"),
        ({**NVIDIA, **ROCE, "/proc/modules": "nvidia_peermem 16384 0 - Live 0x0"}, "ok"),
        ({**NVIDIA, **ROCE, "/sys/module/nv_peer_mem/version": "1"}, "ok"),
        ({**OPEN, **ROCE}, "ok"),
        ({**OPEN, **ROCE, "/proc/sys/kernel/osrelease": "5.4.0"}, "warn"),
    ],
)
def test_peermem(tmp_path: Path, files: dict[str, str], level: str) -> None:
    found = only(modules.peermem, tree(tmp_path, {**LINUX, **files}))
    assert found.level.value == level
    assert (level == "ok") or "modprobe nvidia-peermem" in found.remedy


def test_gpu(tmp_path: Path) -> None:
    bare, there = tree(tmp_path / "bare", LINUX), tree(tmp_path / "gpu", {**LINUX, **NVIDIA})
    (found,) = modules.gpu(bare, lambda name: None)
    assert (found.level, found.remedy) == ("ok", "")
    (found,) = modules.gpu(there, lambda name: None)
    assert found.level == "warn"
    assert "[cuda]" in found.remedy
    (found,) = modules.gpu(there, lambda name: name)
    assert found.level == "ok"


@pytest.mark.parametrize(
    ("files", "level", "text"),
    [
        ({}, "ok", "can register them"),
        ({"/boot/config-6.1.0-40-amd64": ""}, "ok", "as far as its version tells"),
        ({"/boot/config-6.1.0-40-amd64": "# CONFIG_DMA_SHARED_BUFFER is not set"}, "warn", "built without"),
        ({"/proc/sys/kernel/osrelease": "5.10.0"}, "warn", "5.10.0 cannot"),
        ({"/proc/sys/kernel/osrelease": ""}, "warn", "unknown"),
        (NVIDIA, "warn", "closed"),
        (OPEN, "ok", "can register them"),
        ({"/sys/class/infiniband/rxe0/ports/1/state": "4: ACTIVE"}, "ok", "rxe0 (Soft-RoCE) cannot"),
    ],
)
def test_dmabuf(tmp_path: Path, files: dict[str, str], level: str, text: str) -> None:
    found = only(modules.dmabuf, tree(tmp_path, {**LINUX, **files}))
    assert (found.level.value, text in found.text) == (level, True), found


def test_our_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(modules.ours, tree(tmp_path, {})).level is Level.OK
    loaded = {"/sys/module/hawk_npu/version": "1.0"}
    found = only(modules.ours, tree(tmp_path, loaded))
    assert (found.level, "version 1.0" in found.text) == (Level.WARN, True)
    machine = tree(tmp_path, {**loaded, "/dev/hawk_npu0": ""})
    assert only(modules.ours, machine).text.endswith("/dev/hawk_npu0")
    monkeypatch.setattr(modules.os, "access", lambda *_: False)
    found = only(modules.ours, machine)
    assert (found.level, "may not open /dev/hawk_npu0" in found.text) == (Level.WARN, True)
