"""scripts/lib/venv_setup.py: done once, begun anew after a kill, and every failure one line with its remedy."""

import fcntl
import importlib.util
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

LIB = Path(__file__).resolve().parents[3] / "scripts" / "lib"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, LIB / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


setup = _load("venv_setup")
tiers = _load("tiers")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    root = tmp_path / "clone"
    (root / "hawk" / "retile").mkdir(parents=True)
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "setup.py").write_text("")
    return root


@pytest.fixture
def pips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """What pip was asked to install; neither pip nor venv really runs."""
    base = tmp_path / "base-python"
    base.write_text(
        "#!/bin/sh\n"
        f'mkdir -p "$3/bin" && ln -s "{sys.executable}" "$3/bin/python" && echo "version = 3.11.9" > "$3/pyvenv.cfg"\n'
    )
    base.chmod(0o755)
    asked: list[list[str]] = []
    monkeypatch.setattr(setup, "_base_python", lambda: str(base))
    monkeypatch.setattr(setup, "_pip", lambda _env, arguments, _what: asked.append(arguments))
    return asked


def test_it_is_done_once(clone: Path, pips: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    env = setup.Environment(clone)
    assert setup.ensure("test", env=env) == clone / ".venv" / "bin" / "python"
    assert pips == [["-e", ".[test]"]]
    capsys.readouterr()
    setup.ensure("test", env=setup.Environment(clone))
    setup.ensure("", env=setup.Environment(clone))  # the demonstration needs less
    assert len(pips) == 1
    assert capsys.readouterr().err == ""


def test_more_is_added_to_what_is_there(clone: Path, pips: list[list[str]]) -> None:
    setup.ensure("", env=setup.Environment(clone))
    kept = clone / ".venv" / "kept"
    kept.touch()
    setup.ensure("test", env=setup.Environment(clone))
    setup.ensure("test", ("torch==2", "transformers>=4"), env=setup.Environment(clone))
    setup.ensure("test", ("torch==2",), env=setup.Environment(clone))
    assert pips == [["-e", "."], ["-e", ".[test]"], ["torch==2", "transformers>=4"]]
    assert kept.exists()


@pytest.mark.parametrize("changed", ["pyproject.toml", "setup.py", "hawk/retile/_core.c"])
def test_changed_requirements_or_sources_install_again(
    clone: Path, pips: list[list[str]], changed: str
) -> None:
    setup.ensure("test", ("torch==2",), env=setup.Environment(clone))
    (clone / changed).write_text("changed")
    setup.ensure("", env=setup.Environment(clone))
    assert pips[2:] == [["-e", ".[test]"]]  # with the tests' tools, which were there
    assert setup.Environment(clone).ready({"test", "core", "torch==2"})


@pytest.mark.parametrize("moment", ["venv", "pip"])
def test_a_killed_set_up_is_begun_anew(
    clone: Path, pips: list[list[str]], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(setup, "_pip", killed)
        if moment == "venv":
            patch.setattr(setup.subprocess, "run", killed)
        with pytest.raises(KeyboardInterrupt):
            setup.ensure("test", env=setup.Environment(clone))
    rest = clone / ".venv" / "half-written"
    rest.touch()
    assert not setup.Environment(clone).ready({"test"})
    setup.ensure("test", env=setup.Environment(clone))
    assert not rest.exists()
    assert pips == [["-e", ".[test]"]]
    assert not list(clone.glob(".venv-*"))


def test_a_venv_that_someone_made_is_kept_or_refused(clone: Path, pips: list[list[str]]) -> None:
    mine = clone / ".venv" / "bin"
    mine.mkdir(parents=True)
    (mine / "python").write_text("#!/bin/sh\nexit 1\n")
    (mine / "python").chmod(0o755)
    with pytest.raises(setup.SetupError, match="remove it and run this again"):
        setup.ensure("test", env=setup.Environment(clone))
    (mine / "python").unlink()
    (mine / "python").symlink_to(sys.executable)
    setup.ensure("test", env=setup.Environment(clone))
    assert pips == [["-e", ".[test]"]]


@pytest.mark.usefixtures("pips")
def test_low_disk_is_told_before_anything_is_made(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda _: SimpleNamespace(free=599_000_000))
    with pytest.raises(setup.SetupError, match=r"599 MB free .* 600 MB needed"):
        setup.ensure("test", env=setup.Environment(clone))
    assert not (clone / ".venv").exists()


@pytest.mark.usefixtures("pips")
def test_an_unwritable_folder_is_told(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.os, "access", lambda path, _mode: path != clone)
    with pytest.raises(setup.SetupError, match="cannot write into"):
        setup.ensure("test", env=setup.Environment(clone))


def test_a_venv_module_that_lacks_ensurepip_is_told(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = clone / "base"
    base.write_text(
        "#!/bin/sh\necho 'The virtual environment was not created: ensurepip is not available'; exit 1\n"
    )
    base.chmod(0o755)
    monkeypatch.setattr(setup, "_base_python", lambda: str(base))
    with pytest.raises(setup.SetupError, match=r"install the package python3\.\d+-venv") as caught:
        setup.ensure("test", env=setup.Environment(clone))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("ERROR: No matching distribution found for numpy>=1.26", "a download failed"),
        (
            "WARNING: Retrying: Connection refused\nERROR: Could not find a version that satisfies",
            "a download failed",
        ),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "the disk is full",
        ),
        ("ERROR: Could not install: [Errno 13] Permission denied: 'x'", "mend the folder's permissions"),
        (
            "   ERROR: No matching distribution found for setuptools\n   [end]\nerror: subprocess-exited-with-error",
            r"\(ERROR: No matching distribution found for setuptools\): a download failed",
        ),
        (
            "error: something never seen before\nerror: subprocess-exited-with-error",
            r"never seen before\): mend that",
        ),
        ("", "mend that and run this again"),
    ],
)
def test_what_pip_says_becomes_one_line(
    clone: Path, said: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    env = setup.Environment(clone)
    env.python.parent.mkdir(parents=True)
    env.python.write_text(f'#!/bin/sh\necho "Collecting numpy"\necho "{said}"\nexit 1\n')
    env.python.chmod(0o755)
    with pytest.raises(setup.SetupError, match=remedy) as caught:
        setup._pip(env, ["-e", "."], "HAWK")
    assert "\n" not in str(caught.value)
    assert "Collecting numpy" in capsys.readouterr().err
    assert said.strip() in env.log.read_text()


def test_pip_runs_under_the_user_own_settings(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = setup.Environment(clone)
    env.python.parent.mkdir(parents=True)
    env.python.write_text('#!/bin/sh\necho "$PIP_INDEX_URL|$*"\n')
    env.python.chmod(0o755)
    monkeypatch.setenv("PIP_INDEX_URL", "file:///mirror")
    setup._pip(env, ["-e", "."], "HAWK")
    assert env.log.read_text() == "file:///mirror|-m pip install -e .\n"


def test_two_set_ups_do_not_meet(clone: Path, pips: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()
    monkeypatch.setattr(setup, "say", lambda text: waiting.set() if "waiting for it" in text else None)
    held = os.open(clone, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    second = threading.Thread(target=setup.ensure, args=("test",), kwargs={"env": setup.Environment(clone)})
    second.start()
    assert waiting.wait(30)
    assert pips == []
    os.close(held)
    second.join(30)
    assert pips == [["-e", ".[test]"]]


@pytest.mark.usefixtures("pips")
def test_waiting_for_another_set_up_has_an_end(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "LOCK_SECONDS", -1)
    held = os.open(clone, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(setup.SetupError, match="another set-up"):
        setup.ensure("test", env=setup.Environment(clone))
    os.close(held)


# -- tiers ------------------------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Commands that `scripts/test` ran; there are tests in unit, lab, device and ttnn only."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append([str(part) for part in command])
        return SimpleNamespace(returncode=3 if "pytest" in command else 1)  # 1: no module can be imported

    for name in ("unit", "lab", "device", "ttnn"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test_it.py").touch()
    monkeypatch.setattr(tiers, "TESTS", tmp_path)
    monkeypatch.setattr(tiers, "ensure", lambda *_: Path("python"))
    monkeypatch.setattr(tiers.subprocess, "run", run)
    monkeypatch.setattr(tiers.shutil, "which", lambda _: None)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    return commands


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing"], "no such tier: nothing"),
        (["unit", "lab"], "no such tier"),
        (["vllm"], "the tier vllm is not built yet"),
        (["device"], "the tier device needs nvidia-smi"),
    ],
)
def test_a_tier_that_cannot_run_fails_in_one_line(
    ran: list[list[str]], arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        tiers.main(arguments)
    assert caught.value.code == 1
    said = capsys.readouterr()
    assert text in said.err
    assert said.err.count("\n") == 1
    assert not any("pytest" in command for command in ran)


def test_a_tier_whose_preparation_fails_runs_no_test(ran: list[list[str]]) -> None:
    assert tiers.main(["lab"]) == 1  # it has said why itself
    assert ran == [["python", "scripts/lib/vmlab", "prepare"]]


def test_where_python_writes_no_byte_code_it_is_written_once(
    ran: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert tiers.main([]) == 3
    assert ran[0] == ["python", "-m", "compileall", "-q", "hawk", "transports", "layouts"]
    assert ran[-1][:3] == ["python", "-m", "pytest"]


def test_all_that_needs_nothing_runs_and_the_rest_is_told(
    ran: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiers.main(["--", "-x", "-k", "word"]) == 3  # pytest's own status
    assert ran[-1][-4:] == ["tests/unit", "-x", "-k", "word"]
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "tiers not run:"
    assert any(line.split()[0] == "lab" and "runs on request" in line for line in table)
    assert any(line.split()[0] == "device" and "not here: nvidia-smi" in line for line in table)
    assert any(line.split()[0] == "vllm" and "not built yet" in line for line in table)
    assert any("scripts/test ttnn" in line for line in table)
    assert not any(line.split()[0] == "unit" for line in table)


def test_in_ci_pytest_has_the_last_word(
    ran: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI", "true")
    printed: list[bool] = []
    run = tiers.subprocess.run

    def note(command: list[str], **options: Any) -> Any:
        if "pytest" in command:
            printed.append("tiers not run" in capsys.readouterr().out)
        return run(command, **options)

    monkeypatch.setattr(tiers.subprocess, "run", note)
    assert tiers.main([]) == 3
    assert printed == [True]
    assert capsys.readouterr().out == ""


def test_the_help_tells_which_tiers_are_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit" / "test_one.py").write_text("")
    monkeypatch.setattr(tiers, "TESTS", tmp_path)
    lines = {line.split()[0]: line for line in tiers.usage().splitlines() if line.startswith("  ")}
    assert "not built" not in lines["unit"]
    assert lines["contract"].endswith(" (not built yet)")


def test_a_path_after_the_dashes_narrows_a_tier() -> None:
    unit = [tiers.TIERS["unit"]]
    assert tiers.selected(unit, ["-q", "-k", "plan"]) == ["tests/unit"]
    assert tiers.selected(unit, ["tests/unit/plan", "-q"]) == []
    assert tiers.selected(unit, ["tests/unit/test_house.py::test_format"]) == []


def test_the_quick_tiers_are_spread_over_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    unit, chaos = [tiers.TIERS["unit"]], [tiers.TIERS["chaos"]]
    monkeypatch.delenv("HAWK_TEST_WORKERS", raising=False)
    monkeypatch.setattr(tiers.os, "sched_getaffinity", lambda _: {0, 5, 6})
    assert tiers.workers(unit, []) == ["-n", "3", "--dist", "loadfile"]
    assert tiers.workers(chaos, []) == []  # its agents take what there is
    assert tiers.workers(unit, ["-k", "plan"]) == []  # for a debugger, and to see the order
    monkeypatch.setattr(tiers.os, "sched_getaffinity", lambda _: set(range(64)))
    assert tiers.workers(unit, [])[1] == "4"
    monkeypatch.setenv("HAWK_TEST_WORKERS", "1")
    assert tiers.workers(unit, []) == []


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "Downloading https://host/a/pyzmq-27.1.0-cp312-abi3-manylinux_2_26_x86_64.manylinux_2_28.whl (840 kB)",
            "Downloading pyzmq-27.1.0 (840 kB)",
        ),
        ("Collecting numpy>=2", "Collecting numpy>=2"),
        ("Building editable for hawk-kv (pyproject.toml): started", "Building hawk-kv with its C core"),
    ],
)
def test_what_is_told_of_pip_is_short(said: str, told: str) -> None:
    assert setup._short(said) == told


def test_a_long_list_is_cut_between_words() -> None:
    words = [f"package-{number}" for number in range(30)]
    told = setup._short("Installing collected packages: " + ", ".join(words))
    assert len(told) <= 100
    assert told.endswith(" ...")
    assert told.removesuffix(" ...").split()[-1].rstrip(",") in words


def test_a_tier_with_a_place_of_its_own_runs_there(
    ran: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HAWK_TTNN_PYTHON", raising=False)
    monkeypatch.setattr(
        tiers.subprocess, "run", lambda command, **_: ran.append(command) or SimpleNamespace(returncode=0)
    )
    assert tiers.main(["ttnn"]) == 0
    assert ran[0] == ["python", "scripts/lib/ttnn_env.py"]
    assert ran[-1][0] == str(tiers.ROOT / ".venv-ttnn" / "bin" / "python")
    monkeypatch.setenv("HAWK_TTNN_PYTHON", "/opt/python")
    assert tiers.main(["ttnn"]) == 0
    assert ran[-1][:3] == ["/opt/python", "-m", "pytest"]
    assert [command[0] for command in ran if command[-1] == "scripts/lib/ttnn_env.py"] == [
        "python",
        sys.executable,
    ]
    assert tiers.main(["lab"]) == 0
    assert ran[-1][0] == "python"
