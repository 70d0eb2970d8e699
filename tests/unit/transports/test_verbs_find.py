"""Finding pyverbs: the package alone and not its folder, and what is missing by name."""

import importlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from hawk.errors import MissingDependency
from hawk.transports.verbs import VerbsTransport, _find


@pytest.fixture(autouse=True)
def _no_pyverbs() -> Iterator[None]:
    def take() -> dict[str, object]:
        names = [n for n in sys.modules if n == "pyverbs" or n.startswith("pyverbs.")]
        return {n: sys.modules.pop(n) for n in names}

    kept = take()
    yield
    take()
    sys.modules.update(kept)  # type: ignore[arg-type]


def package(folder: Path, **modules: str) -> Path:
    (folder / "pyverbs").mkdir(parents=True)
    for name, text in {"__init__": "", **modules}.items():
        (folder / "pyverbs" / f"{name}.py").write_text(text)
    return folder


def test_the_package_is_found_and_nothing_beside_it(tmp_path: Path) -> None:
    folder = package(tmp_path / "dist-packages", device="import pyverbs.base", base="value = 7")
    (folder / "neighbour_of_pyverbs.py").write_text("")
    before = list(sys.path)
    module = _find.load([tmp_path / "absent", folder])
    assert module.__name__ == "pyverbs"
    assert importlib.import_module("pyverbs.base").value == 7
    assert sys.path == before
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("neighbour_of_pyverbs")
    assert _find.load() is module, "once found it stays"
    assert os.environ["RDMAV_ALLOW_DISASSOC_DESTROY"] == "1"


def test_none_is_said_by_the_name_of_its_debian_package(tmp_path: Path) -> None:
    with pytest.raises(MissingDependency, match="python3-pyverbs"):
        _find.load([tmp_path])
    assert "pyverbs" not in sys.modules


def test_one_for_another_python_is_said(tmp_path: Path) -> None:
    folder = package(tmp_path)
    (folder / "pyverbs" / "device.cpython-39-x86_64-linux-gnu.so").write_bytes(b"")
    with pytest.raises(MissingDependency, match="built for another Python") as caught:
        _find.load([folder])
    assert sysconfig.get_config_var("EXT_SUFFIX") in str(caught.value)
    assert "pyverbs" not in sys.modules


def test_one_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    folder = package(tmp_path, device="raise ImportError('libibverbs.so.1: cannot open shared object file')")
    with pytest.raises(MissingDependency, match=r"libibverbs\.so\.1"):
        _find.load([folder])
    assert "pyverbs" not in sys.modules


def test_a_wrong_one_on_the_path_is_not_taken_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of that name with nothing in it, or one whose first line fails: each time the same answer."""
    for text in ("", "import no_such_part_of_it_either", "raise ImportError('torn')"):
        folder = package(tmp_path / f"path{len(text)}", __init__=text)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder))
            patch.setattr(_find, "folders", lambda: [tmp_path / "absent"])
            for _ in range(2):
                with pytest.raises(MissingDependency):
                    _find.load()
            good = package(tmp_path / f"good{len(text)}", device="")
            patch.setattr(_find, "folders", lambda good=good: [good])
            assert str(good) in str(_find.load().__file__)
        for name in [n for n in sys.modules if n.split(".")[0] == "pyverbs"]:
            del sys.modules[name]


def test_the_distributions_that_does_not_start_says_why(tmp_path: Path) -> None:
    folder = package(tmp_path, __init__="raise ImportError('torn')")
    with pytest.raises(MissingDependency, match="torn"):
        _find.load([folder])


def test_probe_says_the_first_thing_that_is_missing(tmp_path: Path) -> None:
    sysfs, devices = tmp_path / "class", tmp_path / "dev"

    def absent() -> object:
        raise MissingDependency("pyverbs is not installed", hint=_find.HINT)

    def there() -> object:
        return sys

    def probed(load: object) -> str:
        verdict = _find.probe(load, sysfs, devices)  # type: ignore[arg-type]
        assert verdict.ok == (verdict.reason == "")
        return verdict.reason

    assert "no RDMA device" in probed(there)
    assert "rdma_rxe" in probed(there)
    (sysfs / "rxe0").mkdir(parents=True)
    assert "rxe0: no" in probed(there)
    assert "ib_uverbs" in probed(there)
    devices.mkdir()
    (devices / "uverbs0").touch()
    assert "python3-pyverbs" in probed(absent)
    assert probed(there) == ""


def test_probe_of_this_machine_never_raises() -> None:
    verdict = VerbsTransport.probe()
    assert verdict.ok or verdict.reason


def test_a_variable_names_the_only_folder_to_look_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = package(tmp_path / "mine", device="value = 3")
    monkeypatch.setenv("HAWK_PYVERBS_PATH", str(tmp_path / "none"))
    assert _find.places() == [tmp_path / "none"]
    with pytest.raises(MissingDependency, match="HAWK_PYVERBS_PATH") as caught:
        _find.load()
    assert str(tmp_path / "none") in str(caught.value)
    monkeypatch.setenv("HAWK_PYVERBS_PATH", str(folder))
    assert _find.load().__path__ == [str(folder / "pyverbs")]
    assert importlib.import_module("pyverbs.device").value == 3
