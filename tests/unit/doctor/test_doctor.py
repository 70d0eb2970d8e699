"""What the doctor says of limits and of software, and what the command makes of it."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import hawk.doctor
from hawk import cli
from hawk.doctor import Finding, Level, Machine, limits, software
from hawk.transports import registry
from hawk.transports.base import Viability
from tests.unit.doctor.trees import LINUX, ROCE, only, tree

MIB = 1 << 20
LOCKING = {"/proc/self/status": "Name:\tx\nCapEff:\t0000000000004000"}


@pytest.mark.parametrize(
    ("files", "memlock", "level"),
    [
        ({}, 8 * MIB, "ok"),
        (ROCE, 8 * MIB, "fail"),
        (ROCE, 2048 * MIB, "warn"),
        (ROCE, resource.RLIM_INFINITY, "ok"),
        ({**ROCE, **LOCKING}, 8 * MIB, "ok"),
        ({**ROCE, "/proc/self/status": "CapEff:\t000000000000bfff"}, 8 * MIB, "fail"),
    ],
)
def test_locked_memory_counts_where_there_is_rdma(
    tmp_path: Path, files: dict[str, str], memlock: int, level: str
) -> None:
    found = only(limits.locked, tree(tmp_path, files, memlock=memlock))
    assert found.level.value == level, found
    assert level == "ok" or "LimitMEMLOCK=infinity" in found.remedy


def test_open_files(tmp_path: Path) -> None:
    assert only(limits.files, tree(tmp_path, {}, nofile=8192)).level is Level.OK
    assert only(limits.files, tree(tmp_path, {}, nofile=8191)).level is Level.WARN


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = tree(tmp_path, {})
    assert only(limits.shared, machine).level is Level.WARN  # there is none
    for blocks, level in ((16384, Level.WARN), (1 << 20, Level.OK)):
        about = SimpleNamespace(f_blocks=blocks, f_frsize=4096)
        monkeypatch.setattr(limits.os, "statvfs", lambda _, about=about: about)
        assert only(limits.shared, machine).level is level


def test_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(limits.memfd, Machine()).level is Level.OK

    def refused(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(limits.os, "memfd_create", refused)
    assert only(limits.memfd, Machine()).level is Level.FAIL


@pytest.mark.parametrize(
    ("version", "level"), [((3, 10), "fail"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "warn")]
)
def test_python(version: tuple[int, int], level: str) -> None:
    (found,) = software.python(Machine(), version)
    assert found.level.value == level


@pytest.mark.parametrize(
    ("owners", "level", "text"),
    [
        (["hawk-kv"], "ok", "hawk-kv"),
        (["Hawk_KV", "hawk-kv"], "ok", "hawk-kv"),
        ([], "warn", "not installed"),
        (["hawk-kv", "hawk"], "fail", "hawk installs a package named hawk as well"),
    ],
)
def test_another_distribution_with_our_name(
    monkeypatch: pytest.MonkeyPatch, owners: list[str], level: str, text: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1")
    (found,) = software.package(Machine(), lambda: {"hawk": owners, "numpy": ["numpy"]})
    assert (found.level.value, text in found.text) == (level, True), found
    assert level != "fail" or "pip uninstall hawk`" in found.remedy


def test_transports_speak_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"tcp": Viability(True), "verbs": Viability(False, "no device")}
    monkeypatch.setattr(registry, "survey", lambda: said)
    assert [f.level.value for f in software.transports(Machine())] == ["ok", "warn"]
    said["tcp"] = Viability(False, "broken")
    assert [f.level.value for f in software.transports(Machine())] == ["warn", "warn", "fail"]


def test_an_empty_machine_is_told_of_and_raises_nothing(tmp_path: Path) -> None:
    found = hawk.doctor.examine(tree(tmp_path, {}))
    assert len({one.name for one in found}) == len(found) > 12
    assert all(one.text for one in found)
    assert all(bool(one.remedy) == (one.level is not Level.OK) for one in found)


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.cli, ["doctor", *arguments], standalone_mode=False)
    assert done.exception is None, done.exception
    return done.return_value, done.output


@pytest.mark.parametrize("level", list(Level))
def test_only_a_failure_ends_with_one(monkeypatch: pytest.MonkeyPatch, level: Level) -> None:
    found = Finding("a thing", level, "as it [is]", "" if level is Level.OK else "do this")
    monkeypatch.setattr(hawk.doctor, "examine", lambda *_: [found])
    status, said = _run()
    assert status == (1 if level is Level.FAIL else 0)
    assert "as it [is]" in said
    assert said.splitlines()[-1] == f"1 {level.value}"
    status, said = _run("--json")
    assert json.loads(said) == [
        {"name": "a thing", "level": level.value, "text": "as it [is]", "remedy": found.remedy}
    ]


def test_a_config_is_checked_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hawk.doctor, "examine", lambda *_: [])
    file = tmp_path / "node.toml"
    file.write_text('[agent]\nname = "p0"\nrole = "nothing"\n')
    status, said = _run("--config", str(file))
    assert status == 1
    said = " ".join(said.split())  # as if nothing had been folded
    assert "node.toml:3: agent.role" in said
    assert "hawk config doc" in said
    assert tree(tmp_path, LINUX).release_numbers == (6, 1)


def test_what_may_not_be_looked_at_or_is_torn_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = tree(tmp_path, {**ROCE, "/proc/sys/kernel/osrelease": "6.1.0"})
    (tmp_path / "proc" / "config.gz").write_bytes(
        gzip.compress(b"CONFIG_DMA_SHARED_BUFFER=y\n")[:12] + bytes(40)
    )
    assert machine.configured("DMA_SHARED_BUFFER") is None

    def shut(path: Path, **_: object) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", shut)
    assert not machine.loaded("nvidia")
    assert not machine.exists("/sys/module/nvidia")
