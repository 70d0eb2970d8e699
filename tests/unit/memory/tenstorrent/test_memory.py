"""Which way is taken, what is said of it, and the kind in configuration."""

import errno
import sys
from pathlib import Path
from typing import Any

import pytest

from hawk.config import load_config
from hawk.config_text import reference, rows
from hawk.errors import ConfigError, DeviceDenied, HawkMemoryError, InvalidArgument, MissingDependency
from hawk.memory import registry
from hawk.memory.tenstorrent import Reservation, Tenstorrent, TenstorrentConfig, umd
from tests.fake_tenstorrent import MIB, FakeDevice, FakeKmd, chip, fake_umd

BASE = 0x100080


def made(fake: FakeKmd, device: FakeDevice | Exception, way: str = "auto", **options: Any) -> Tenstorrent:
    def opened() -> FakeDevice:
        if isinstance(device, Exception):
            raise device
        return device

    known = options.pop("chip", None)
    config = TenstorrentConfig(BASE, MIB, 8, way=way, **options)  # type: ignore[arg-type]
    return Tenstorrent(
        "npu0", Reservation((0,), BASE, MIB, 8), config, chip=known, calls=fake, open_device=opened
    )


def test_windows_come_first() -> None:
    fake, device = FakeKmd(), FakeDevice()
    npu = made(fake, device)
    assert (npu.way, npu.why_not) == ("dma-buf", {})
    assert (
        npu.said
        == "chip 0 (blackhole): 8 banks, 1 MiB of each from 0x100080 on, straight through 8 windows; "
        "sources are read through the windows, slowly; nothing moves bytes inside its banks, so plans are direct"
    )
    assert device.closed == 1  # it was only asked
    npu.close()


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (FakeKmd(version=(2, 5, 0)), "driver 2.5.0, needs driver 2.10 or later"),
        (FakeKmd(fail={("open", 1): errno.ENOENT}), "No such file or directory"),
        (FakeKmd(windows={2 * MIB: 3}), "needs at least 1048576"),
    ],
)
def test_without_them_the_host_stages_and_the_reason_is_said(fake: FakeKmd, reason: str) -> None:
    device = FakeDevice()
    npu = made(fake, device)
    assert npu.way == "host"
    assert reason in npu.why_not["dma-buf"]
    assert f"not by dma-buf: {npu.why_not['dma-buf']}" in npu.said
    assert fake.fds == []
    npu.close()
    assert device.closed == 1


def test_the_way_may_be_said() -> None:
    fake = FakeKmd()
    npu = made(fake, FakeDevice(), "host")
    assert npu.way == "host"
    assert fake.counts == {}
    npu.close()
    with pytest.raises(HawkMemoryError, match="tt-kmd"):
        made(FakeKmd(fail={("open", 1): errno.ENOENT}), FakeDevice(), "dma-buf")


def test_a_chip_that_is_described_needs_tt_umd_only_for_staging() -> None:
    missing = MissingDependency("takes the package tt-umd", hint=umd.EXTRA)
    npu = made(FakeKmd(), missing, chip=chip())
    assert npu.way == "dma-buf"
    npu.close()
    for fake, known in ((FakeKmd(), None), (FakeKmd(version=(2, 0, 0)), chip())):
        with pytest.raises(MissingDependency, match=r"CLONE\[tenstorrent\]"):
            made(fake, missing, chip=known)
        assert fake.fds == []


def test_a_device_that_this_user_may_not_open() -> None:
    with pytest.raises(DeviceDenied, match="udev"):
        made(FakeKmd(fail={("open", 1): errno.EACCES}), FakeDevice(), "dma-buf")


def test_one_memory_is_of_one_chip_of_a_mesh() -> None:
    mesh = Reservation((0, 1), BASE, MIB, 8)
    with pytest.raises(InvalidArgument, match=r"reservation\.chips.*Reservation\.of_chip"):
        Tenstorrent("npu0", mesh, open_device=FakeDevice)
    npus = [
        Tenstorrent(
            f"npu{one.chips[0]}",
            one,
            TenstorrentConfig(BASE, MIB, 8, one.chips[0], way="host"),
            open_device=lambda number=one.chips[0]: FakeDevice(  # type: ignore[misc]
                chip(number=number, channel_bytes=16 * MIB)
            ),
        )
        for one in mesh.each()
    ]
    assert [npu.chip.number for npu in npus] == [0, 1]
    for npu in npus:
        npu.close()


def test_two_memories_never_have_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tt_umd", fake_umd(channel_bytes=16 * MIB))

    def over(name: str, address: int, nbytes: int = MIB, chip: int = 0) -> Tenstorrent:
        return Tenstorrent.from_config(name, TenstorrentConfig(address, nbytes, 8, chip, way="host"))

    with pytest.raises(InvalidArgument, match="end of a bank"):
        over("npu0", BASE, 32 * MIB)  # nothing is taken by one that failed
    first = over("npu0", BASE)
    for address, nbytes in ((BASE, MIB), (BASE + MIB - 64, MIB), (BASE - 64, 128), (BASE + 64, 64)):
        with pytest.raises(InvalidArgument, match=r"memory\.npu1\.address.*memory npu0 has of chip 0"):
            over("npu1", address, nbytes)
    beside = [over("npu1", BASE + MIB), over("npu2", BASE, chip=1)]
    first.close()
    again = over("npu3", BASE)
    for npu in (again, *beside):
        npu.close()


def test_it_is_a_kind_of_memory_by_its_folder() -> None:
    assert registry.get("tenstorrent") is Tenstorrent
    assert registry.config_class("tenstorrent") is TenstorrentConfig
    assert registry.shipped() == ["host", "emulated-npu", "npu", "cuda", "tenstorrent"]


def test_a_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(
        '[agent]\nname = "d0"\ninsecure = true\n[memory.npu0]\nkind = "tenstorrent"\nchip = 2\naddress = 0x100080\n'
        'nbytes = "3GiB"\nbanks = 8\nway = "dma-buf"\nwindow_share = 0.25\n'
    )
    options = load_config(path)[0].memory["npu0"].options
    assert options.reservation() == Reservation((2,), BASE, 3 << 30, 8)
    assert (options.way, options.window_share, options.ordering) == ("dma-buf", 0.25, "strict")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("banks = 0", "banks"),
        ("window_share = 1.5", "window_share"),
        ('way = "fast"', "way"),
        ('least = "4GiB"', "least"),
        ("piece = 16", "piece"),
        ('ordering = "none"', "ordering"),
    ],
)
def test_a_wrong_table_is_told(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "node.toml"
    banks = "" if line.startswith("banks") else "banks = 8\n"
    path.write_text(
        f'[memory.npu0]\nkind = "tenstorrent"\naddress = 0x100080\nnbytes = "3GiB"\n{banks}{line}\n'
    )
    with pytest.raises(ConfigError, match=told):
        load_config(path)


def test_a_negative_part_is_no_part() -> None:
    with pytest.raises(InvalidArgument, match="least"):
        TenstorrentConfig(BASE, MIB, 8, least=-1)


def test_everything_wrong_in_a_table_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(
        '[memory.npu0]\nkind = "tenstorrent"\nchip = -1\naddress = "0x10 0"\nnbytes = 0\nbanks = 0\n'
        "window_share = 3\nlarge_window_share = -1\npiece = 0\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, {}, complete=False)
    told = [problem.split(": ")[1].split(" = ")[0] for problem in caught.value.problems]
    names = ("chip", "address", "nbytes", "banks", "window_share", "large_window_share", "piece")
    assert sorted(told) == sorted(f"memory.npu0.{name}" for name in names)


def test_an_address_is_shown_as_one(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    for said in ("1048704", "0x100080", '"0x100080"', '"1048704"'):
        path.write_text(
            f'[memory.npu0]\nkind = "tenstorrent"\naddress = {said}\nnbytes = "1MiB"\nbanks = 8\n'
        )
        config, sources = load_config(path, {}, complete=False)
        shown = {row.path: row.value for row in rows(config, sources)}
        assert shown["memory.npu0.address"] == "0x100080"
    assert "| `address` | address |" in reference()


def test_from_config_opens_the_chip_or_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    module = fake_umd(channel_bytes=16 * MIB)
    module.create_simulation_tt_device = lambda path: asked.append(path) or module.TTDevice.create()
    monkeypatch.setitem(sys.modules, "tt_umd", module)
    config = TenstorrentConfig(BASE, MIB, 8, simulator="libttsim.so")
    npu = registry.create("tenstorrent", "npu0", config)
    assert asked == ["libttsim.so"]
    assert "a simulator has no windows" in npu.said
    npu.close()
    with pytest.raises(HawkMemoryError, match="tt-kmd"):
        registry.create("tenstorrent", "npu0", TenstorrentConfig(BASE, MIB, 8, 250, way="dma-buf"))
