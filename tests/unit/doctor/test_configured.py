"""Whether an agent of a configuration could start here: each obstacle by the key that it is at."""

from __future__ import annotations

from pathlib import Path

import pytest

from hawk.config import load_config
from hawk.doctor import Level
from hawk.doctor.configured import configured
from hawk.errors import NotViable
from hawk.transports import registry
from hawk.transports.base import Viability
from tests.unit.doctor.trees import tree

MEMORY = {"/proc/meminfo": "MemTotal:  8388608 kB\nMemAvailable:    4194304 kB"}


def _found(tmp_path: Path, text: str, local: str = "run/p0.sock") -> dict[str, str]:
    file = tmp_path / "node.toml"
    file.write_text(f'[agent]\ncontrol = "ipc://{tmp_path}/c"\nlocal = "ipc://{tmp_path}/{local}"\n{text}')
    machine = tree(tmp_path / "machine", MEMORY)
    found = list(configured(machine, load_config(file, {})[0]))
    assert all(bool(one.remedy) == (one.level is not Level.OK) for one in found)
    return {one.name: one.text if one.level is not Level.WARN else f"perhaps: {one.text}" for one in found}


def test_one_line_where_nothing_stands_in_the_way(tmp_path: Path) -> None:
    assert list(_found(tmp_path, '[memory.npu0]\nkind = "emulated-npu"\ncapacity = "1GiB"\n')) == ["start"]
    assert not (tmp_path / "run").exists()


def test_what_is_not_there_is_told_at_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"verbs": Viability(False, "there is no RDMA device"), "tcp": Viability(True)}
    monkeypatch.setattr(registry, "viability", said.__getitem__)
    missing = tmp_path / "hawk_npu0"
    found = _found(
        tmp_path,
        '[transport]\nprefer = ["verbs"]\n[memory.big]\nkind = "host"\ncapacity = "400GiB"\n'
        f'[memory.npu0]\nkind = "npu"\ndevice = "{missing}"\n',
    )
    assert set(found) == {"transport.prefer", "memory.npu0", "memory of the machine"}
    assert found["transport.prefer"].endswith("here: verbs: there is no RDMA device")
    assert str(missing) in found["memory.npu0"]
    assert "take 400 GiB, and there are 8 GiB" in found["memory of the machine"]
    registry.require(["verbs", "tcp"])
    with pytest.raises(NotViable, match=r"^transport\.prefer: none .*; got verbs: there is no RDMA device\."):
        registry.require(["verbs"])


def test_what_a_running_agent_may_hold_itself_is_no_failure(tmp_path: Path) -> None:
    found = _found(tmp_path, '[memory.npu0]\nkind = "emulated-npu"\ncapacity = "5GiB"\n')
    assert list(found) == ["memory of the machine"]
    assert found["memory of the machine"].startswith("perhaps: arena and memories take 5.25 GiB")


def test_a_folder_that_this_user_may_not_write_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    assert list(_found(tmp_path, "")) == ["start"]
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path / "run")
    assert _found(tmp_path, "") == {"agent.local": f"this user may not write into {tmp_path / 'run'}"}
    assert list(_found(tmp_path, "", local="s")) == ["start"]


def test_a_table_of_a_transport_that_is_not_preferred_is_told(tmp_path: Path) -> None:
    table = "[transport.cuda]\ngpu = 99\n"
    found = _found(tmp_path, f'[transport]\nprefer = ["tcp"]\n{table}')
    assert list(found) == ["transport.cuda"]
    assert found["transport.cuda"].startswith("perhaps: nothing in its table is used")
    assert "transport.cuda" not in _found(tmp_path, f'[transport]\nprefer = ["tcp", "cuda"]\n{table}')
