"""What docs/tenstorrent.md has one write into a file is read, and is what the engine's reservation says."""

import contextlib
import io
import re
from pathlib import Path
from types import SimpleNamespace

from hawk.config import load_config
from hawk.memory.tenstorrent import Reservation

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "tenstorrent.md").read_text()


def test_configurations_are_read(tmp_path: Path) -> None:
    whole, table = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "node.toml"
    path.write_text(whole)
    config = load_config(path, {})[0]
    assert (config.agent.role, list(config.peers)) == ("decode", ["p0"])
    path.write_text(table)
    short = load_config(path, {}, complete=False)[0]
    assert short.memory["npu0"] == config.memory["npu0"]


def test_what_the_engine_prints_is_the_table_of_its_reservation(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    mesh = Reservation((1, 0), 0x100080, 3 << 20, 8, lowest=0x100080, highest=0xFF000000)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(program, {"cache": SimpleNamespace(reservation=lambda: mesh)})
    path = tmp_path / "node.toml"
    path.write_text(said.getvalue())
    memory = load_config(path, {}, complete=False)[0].memory
    assert {name: entry.options.reservation() for name, entry in memory.items()} == {
        f"npu{one.chips[0]}": one for one in mesh.each()
    }
