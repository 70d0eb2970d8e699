"""What the doctor says of chips, by files alone."""

import os
from pathlib import Path

import pytest
import structlog

from hawk.agent import Agent
from hawk.config_schema import AgentConfig, Config, MemoryConfig
from hawk.doctor import Level, modules
from hawk.doctor.configured import configured
from hawk.errors import DeviceDenied, HawkMemoryError, MissingDependency
from hawk.memory.tenstorrent import Tenstorrent, TenstorrentConfig
from hawk.memory.tenstorrent.survey import survey
from tests.unit.doctor.trees import LINUX, levels, tree

CHIPS = LINUX | {
    "/dev/tenstorrent/0": "",
    "/dev/tenstorrent/10": "",
    "/dev/tenstorrent/by-id": "",
    "/sys/module/tenstorrent/version": "2.10.1",
}


NO_IOMMU = "no IOMMU (0 huge pages of 1 GiB, which the chip's own software then takes)"


def lines(root: Path, files: dict[str, str], *, umd: bool = True) -> dict[str, tuple[bool, str]]:
    found = survey(tree(root, files), lambda name: object() if umd else None)
    return {name: (well, text) for name, well, text, _ in found}


def test_a_machine_without_chips_is_well(tmp_path: Path) -> None:
    assert lines(tmp_path, LINUX) == {"Tenstorrent": (True, "no chip, and its driver tt-kmd is not loaded")}
    loaded = LINUX | {"/sys/module/tenstorrent/version": "2.10.1"}
    assert lines(tmp_path, loaded)["Tenstorrent"] == (False, "the driver is loaded, but there is no chip")


def test_chips_their_driver_and_the_way(tmp_path: Path) -> None:
    found = lines(tmp_path, CHIPS)
    assert found["Tenstorrent"] == (
        True,
        f"/dev/tenstorrent/0, /dev/tenstorrent/10; driver 2.10.1, {NO_IOMMU}",
    )
    assert found["Tenstorrent windows"][0]
    assert found["tt-umd"] == (True, "installed")
    behind = lines(tmp_path, CHIPS | {"/sys/kernel/iommu_groups/0/type": "DMA"})
    assert "behind an IOMMU" in behind["Tenstorrent"][1]


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"/sys/module/tenstorrent/version": "2.9.0"}, "driver 2.9.0 exports no windows, 2.10 and later do"),
        ({"/sys/module/tenstorrent/version": ""}, "driver of unknown version"),
        ({"/proc/sys/kernel/osrelease": "5.4.0-1"}, "on Linux before 5.8"),
    ],
)
def test_what_is_too_old_means_staging(tmp_path: Path, files: dict[str, str], told: str) -> None:
    well, text = lines(tmp_path, CHIPS | files)["Tenstorrent windows"]
    assert not well
    assert told in text
    assert "staged in the host" in text


def test_without_tt_umd(tmp_path: Path) -> None:
    well, text = lines(tmp_path, CHIPS, umd=False)["tt-umd"]
    assert not well
    assert "by every way" in text


def test_a_chip_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("/10"))
    assert lines(tmp_path, CHIPS)["Tenstorrent"] == (False, "this user may not open /dev/tenstorrent/10")


def test_the_doctor_asks(tmp_path: Path) -> None:
    assert levels(modules.drivers, tree(tmp_path, LINUX)) == {"Tenstorrent": "ok"}


def test_what_would_stop_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libttsim.so"
    config = TenstorrentConfig(0x100080, 1 << 20, 8, simulator=str(library))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HawkMemoryError, match=r"simulator: there is no such file"):
        Tenstorrent.obstacle(config)
    library.touch()
    with pytest.raises(MissingDependency, match="tt-umd is not installed"):
        Tenstorrent.obstacle(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    Tenstorrent.obstacle(config)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(DeviceDenied, match="udev rule"):
        Tenstorrent.obstacle(config)


NO_CHIP = TenstorrentConfig(0x100080, 1 << 20, 8, 9000)


@pytest.mark.parametrize(
    ("driver", "chips", "told"),
    [
        (False, [], "Put a card in and load its driver tt-kmd"),
        (True, [], "loaded, but has no chip 9000: put a card in"),
        (True, ["10", "2", "by-id"], "Set chip to one that is there: 2, 10"),
    ],
)
def test_a_chip_that_is_not_there_is_told_before_packages(
    driver: bool, chips: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(os.path, "isdir", lambda path: driver)
    monkeypatch.setattr(os, "listdir", lambda path: chips)
    with pytest.raises(HawkMemoryError, match="there is no such chip") as caught:
        Tenstorrent.obstacle(NO_CHIP)
    assert told in str(caught.value)


def test_a_chip_that_the_configuration_names_is_lacking(tmp_path: Path) -> None:
    config = Config(memory={"npu0": MemoryConfig(kind="tenstorrent", options=NO_CHIP)})
    (found,) = modules.drivers(tree(tmp_path, LINUX), config)
    assert (found.name, found.level) == ("Tenstorrent", Level.WARN)
    assert "tt-kmd" in found.remedy
    (problem,) = [f for f in configured(tree(tmp_path, LINUX), config) if f.name == "memory.npu0"]
    assert problem.level is Level.FAIL
    assert "/dev/tenstorrent/9000" in problem.text
    assert "Mend the table" not in problem.remedy


async def test_an_agent_says_so_before_it_fills_its_memory() -> None:
    config = Config(
        agent=AgentConfig(insecure=True),
        memory={"npu0": MemoryConfig(kind="tenstorrent", options=NO_CHIP)},
    )
    with (
        structlog.testing.capture_logs() as said,
        pytest.raises(HawkMemoryError, match="there is no such chip"),
    ):
        await Agent(config).start()
    assert not any("filling" in entry["event"] for entry in said)
