"""The package as a user gets it: built from the sources, installed elsewhere, run without this clone."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _run(*command: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("HAWK_")}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean | env, capture_output=True, text=True, check=False
    )


def _copy_of_the_tree(to: Path) -> Path:
    """What git would hand over, symlinks as symlinks; builds leave nothing behind in the clone."""
    listed = _run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT)
    assert listed.returncode == 0, listed.stderr
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.is_symlink() or source.is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name, follow_symlinks=False)
    return to


def _build(tree: Path, **env: str) -> Path:
    done = _run(
        sys.executable, "-m", "build", "--no-isolation", "--outdir", tree / "dist", tree, cwd=tree, **env
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return tree / "dist"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    return _build(_copy_of_the_tree(tmp_path_factory.mktemp("tree")))


def _wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("hawk_kv-*.whl")
    return wheel


def _install(wheel: Path, where: Path) -> Path:
    """An empty virtual environment with the wheel; only the dependencies come from this one, so no network is used."""
    done = _run(sys.executable, "-m", "venv", "--without-pip", where, cwd=where.parent)
    assert done.returncode == 0, done.stderr
    python = where / "bin" / "python"
    done = _run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=where.parent,
    )
    assert done.returncode == 0, done.stderr
    (packages,) = where.glob("lib/python*/site-packages")
    # A folder added this way brings its packages, not its own .pth files: the editable HAWK stays out.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def test_the_sdist_has_what_a_build_needs(dist: Path) -> None:
    (sdist,) = dist.glob("hawk_kv-*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    sources = {f"hawk/retile/{path.name}" for path in (ROOT / "hawk" / "retile").glob("*.[ch]")}
    assert sources | {"pyproject.toml", "setup.py", "LICENSE", "hawk/py.typed"} <= set(members)
    assert "hawk/transports/base.py" in members
    assert not any(member.issym() for member in members.values())


def test_the_wheel_has_the_symlinked_folders_and_their_data(dist: Path) -> None:
    names = set(zipfile.ZipFile(_wheel(dist)).namelist())
    layouts = {f"hawk/layouts/{path.name}" for path in (ROOT / "layouts").glob("*.toml")}
    assert "hawk/integrations/ttnn/move.cpp" in names
    assert layouts
    assert layouts | {"hawk/transports/base.py", "hawk/layouts/library.py", "hawk/py.typed"} <= names
    others = [*(ROOT / "hawk" / "evaluate").glob("*.html"), *(ROOT / "hawk" / "serving").rglob("*.toml")]
    assert {str(path.relative_to(ROOT)) for path in others} <= names
    assert not any(name.startswith(("tests/", "transports/", "layouts/", "scripts/")) for name in names)


def test_the_core_is_built_once_for_all_pythons(dist: Path) -> None:
    names = zipfile.ZipFile(_wheel(dist)).namelist()
    if shutil.which(os.environ.get("CC", "cc")) and list((ROOT / "hawk" / "retile").glob("_core*.c")):
        assert "hawk/retile/_core.abi3.so" in names
        assert "-cp311-abi3-" in _wheel(dist).name
    else:
        assert not any(name.endswith(".so") for name in names)


def test_it_runs_from_an_empty_environment_elsewhere(dist: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    python = _install(_wheel(dist), tmp_path / "venv")
    where = _run(python, "-c", "import hawk; print(hawk.__file__)", cwd=elsewhere)
    assert Path(where.stdout.strip()).is_relative_to(tmp_path / "venv"), where.stderr
    listed = _run(python.with_name("hawk"), "layout", "list", cwd=elsewhere)
    assert listed.returncode == 0, listed.stderr
    assert "vllm/nhd" in listed.stdout
    shown = _run(python.with_name("hawk"), "config", "show", cwd=elsewhere)
    assert shown.returncode == 0, shown.stderr
    assert "transport.tcp.port" in shown.stdout
    agent = _run(python.with_name("hawk-agent"), "--version", cwd=elsewhere)
    assert agent.returncode == 0, agent.stderr


def test_without_a_compiler_the_build_goes_on(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    nothing = str(tmp_path / "no-such-compiler")
    dist = _build(_copy_of_the_tree(tree), CC=nothing, LDSHARED=nothing)
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(_wheel(dist)).namelist())
    python = _install(_wheel(dist), tmp_path / "venv")
    listed = _run(python.with_name("hawk"), "layout", "list", cwd=tmp_path)
    assert "vllm/nhd" in listed.stdout, listed.stderr
