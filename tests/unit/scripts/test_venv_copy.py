"""scripts/lib/venv_setup.py: a copy of HAWK in `.venv` gives way to the clone."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

LIB = Path(__file__).resolve().parents[3] / "scripts" / "lib"


@pytest.fixture
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("venv_setup_copy", LIB / "venv_setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("said", ["copy", "other clone", "no word", "spoilt", "ours"])
def test_a_hawk_that_is_not_the_clone_is_installed_anew(
    said: str, setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install CLONE` without `-e` leaves a copy, which goes on running after `git pull`."""
    clone = tmp_path / "a clone"
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").symlink_to(sys.executable)
    for name in ("pyproject.toml", "setup.py"):
        (clone / name).touch()
    asked: list[list[str]] = []
    monkeypatch.setattr(setup, "_pip", lambda _env, arguments, _what: asked.append(arguments))
    setup.ensure("test", env=setup.Environment(clone))
    info = clone / ".venv" / "lib" / "python3.11" / "site-packages" / "hawk_kv-1.0.dist-info"
    info.mkdir(parents=True)
    told = {
        "copy": {"dir_info": {}, "url": clone.as_uri()},
        "other clone": {"dir_info": {"editable": True}, "url": "file:///elsewhere"},
        "spoilt": [],
        "ours": {"dir_info": {"editable": True}, "url": clone.as_uri()},
    }
    if said in told:
        (info / "direct_url.json").write_text(json.dumps(told[said]))
    setup.ensure("", env=setup.Environment(clone))
    assert asked[1:] == ([] if said == "ours" else [["-e", ".[test]"]])
