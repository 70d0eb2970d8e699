"""scripts/lib/vmlab outside of any guest: what it prepares, what it judges, and that it leaves no process behind."""

from __future__ import annotations

import gzip
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vmlab
from vmlab import initrd, kernel, packages, suites

from tests.unit.scripts.conftest import VERSION

LIB = Path(vmlab.__file__).resolve().parents[1]


# -- packages ----------------------------------------------------------------------------------------------


def test_a_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packages.os, "geteuid", lambda: 1000)
    (tmp_path / "there").touch()
    needs = tuple(packages.Need(f"{name}-tools", (str(tmp_path / name),)) for name in ("there", "rdma", "vm"))
    with pytest.raises(vmlab.LabError, match=r"--no-install-recommends rdma-tools vm-tools$") as caught:
        packages.ensure(needs)
    assert "\n" not in str(caught.value)
    packages.ensure(needs[:1])


def test_root_installs_what_lacks_and_no_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, ...]] = []

    def apt(*arguments: str, **_: Any) -> str:
        asked.append(arguments)
        if arguments[0] == "install":
            (tmp_path / "rdma").touch()
        return ""

    monkeypatch.setattr(packages, "apt", apt)
    monkeypatch.setattr(packages, "may_install", lambda: True)
    needs = tuple(packages.Need(f"{name}-tools", (str(tmp_path / name),)) for name in ("rdma",))
    packages.ensure(needs)
    packages.ensure(needs)
    assert asked == [("update", "-qq"), ("install", "-y", "-qq", "--no-install-recommends", "rdma-tools")]
    with pytest.raises(vmlab.LabError, match="the files it should bring are not there"):
        packages.ensure((packages.Need("odd", (str(tmp_path / "odd"),)),))


def test_a_busybox_with_libraries_will_not_do(tmp_path: Path) -> None:
    file = tmp_path / "busybox"
    need = packages.Static("busybox-static", (str(file),))
    assert not need.met()
    file.write_bytes(b"\x7fELF....\0/lib64/ld-linux-x86-64.so.2\0")
    assert not need.met()
    file.write_bytes(b"\x7fELF....")
    assert need.met()


def test_apts_last_words_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "apt-get"
    program.write_text(
        "#!/bin/sh\necho 'W: something' >&2\necho 'E: Unable to locate package x' >&2\nexit 100\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(vmlab.LabError, match=r"E: Unable to locate package x$"):
        packages.apt("install", "x")


# -- kernel and initrd -------------------------------------------------------------------------------------


def test_a_package_for_the_current_kernel_names_the_one_with_the_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = f"linux-image-amd64\n  Depends: linux-image-{VERSION}\n"
    monkeypatch.setattr(packages, "apt", lambda *_, **__: text)
    assert kernel._concrete("linux-image-amd64") == f"linux-image-{VERSION}"
    monkeypatch.setattr(packages, "apt", lambda *_, **__: f"linux-image-{VERSION}\n  Depends: kmod\n")
    assert kernel._concrete(f"linux-image-{VERSION}") == f"linux-image-{VERSION}"


def test_an_unpacked_kernel_has_all_its_parts(unpacked: kernel.Kernel, tmp_path: Path) -> None:
    assert unpacked.version == VERSION
    unpacked.image.unlink()
    with pytest.raises(vmlab.LabError, match=f"lacks .*vmlinuz-{VERSION}"):
        kernel.find(str(unpacked.root), tmp_path, print)
    with pytest.raises(vmlab.LabError, match="holds 0 versions"):
        kernel.find(str(tmp_path / "none"), tmp_path, print)


def test_the_cache_goes_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HAWK_LAB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel.cache_folder() == tmp_path / "hawk" / "lab"
    monkeypatch.setenv("HAWK_LAB_CACHE", str(tmp_path / "own"))
    assert kernel.cache_folder() == tmp_path / "own"


def _entries(data: bytes) -> dict[str, tuple[int, bytes]]:
    """Mode and content of what is in a cpio archive, as its documentation tells it."""
    found: dict[str, tuple[int, bytes]] = {}
    at = 0
    while True:
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        mode, size, length = fields[1], fields[6], fields[11]
        name = data[at + 110 : at + 110 + length - 1].decode()
        at += (110 + length + 3) // 4 * 4
        if name == "TRAILER!!!":
            return found
        found[name] = mode, data[at : at + size]
        at += (size + 3) // 4 * 4


def test_an_archive_has_the_folders_before_what_lies_in_them() -> None:
    archive = initrd.Archive()
    archive.file("bin/tool", b"12345", 0o755)
    archive.file("bin/other", b"")
    archive.folder("proc")
    found = _entries(archive.bytes())
    assert list(found) == ["bin", "bin/tool", "bin/other", "proc"]
    assert found["bin/tool"] == (stat.S_IFREG | 0o755, b"12345")
    assert stat.S_ISDIR(found["bin"][0])


def test_an_initrd_is_made_once_for_what_it_is_made_of(
    unpacked: kernel.Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busybox, module = tmp_path / "busybox", tmp_path / "one.ko"
    busybox.write_bytes(b"busybox")
    module.write_bytes(b"module")
    monkeypatch.setattr(packages, "BUSYBOX", (str(busybox),))
    monkeypatch.setattr(initrd, "load_order", lambda *_: [module])
    made: list[str] = []
    first = initrd.make(unpacked, tmp_path, made.append)
    assert initrd.make(unpacked, tmp_path, made.append) == first
    assert len(made) == 1
    found = _entries(gzip.decompress(first.read_bytes()))
    assert found["modules/order"][1] == b"one.ko\n"
    assert found["modules/one.ko"][1] == b"module"
    assert found["init"][1].startswith(b"#!/bin/busybox sh")
    busybox.write_bytes(b"another")
    assert initrd.make(unpacked, tmp_path, made.append) != first


@pytest.mark.parametrize("name", ["initrd.sh", "guest.sh"])
def test_the_guests_scripts_can_be_read_by_their_shell(name: str) -> None:
    subprocess.run(["bash", "-n", str(LIB / "vmlab" / name)], check=True)


def test_a_module_is_built_in_a_copy_and_once(
    unpacked: kernel.Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "ensure", lambda *_: None)
    source = tmp_path / "mod"
    source.mkdir()
    (source / "Makefile").write_text("lab:\n\techo $(KDIR) > built.ko; date +%N >> built.ko\n")
    folder = kernel.build(unpacked, source, tmp_path, print)
    text = (folder / "built.ko").read_text()
    assert text.startswith(f"/usr/src/linux-headers-{VERSION}\n")
    assert not (source / "built.ko").exists()
    kernel.build(unpacked, source, tmp_path, print)
    assert (folder / "built.ko").read_text() == text
    (source / "Makefile").write_text("lab:\n\techo no such thing; false\n")
    with pytest.raises(vmlab.LabError, match="no such thing"):
        kernel.build(unpacked, source, tmp_path, print)


def test_a_kernel_of_ones_own_brings_the_tree_it_was_built_in(
    unpacked: kernel.Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[packages.Need, ...]] = []
    monkeypatch.setattr(packages, "ensure", lambda needs, _: asked.append(needs))
    tree = tmp_path / "linux"
    tree.mkdir()
    (tree / "Makefile").touch()
    (unpacked.modules / VERSION / "build").symlink_to(tree)
    source = tmp_path / "mod"
    source.mkdir()
    (source / "Makefile").write_text("lab:\n\techo $(KDIR) > built.ko\n")
    first = kernel.build(unpacked, source, tmp_path, print)
    assert (first / "built.ko").read_text() == f"{tree}\n"
    assert [need.package for need in asked[0]] == ["make"]
    os.utime(unpacked.image, (1, 1))
    assert kernel.build(unpacked, source, tmp_path, print) != first


@pytest.mark.parametrize(
    ("config", "patience"), [("", 1), ("CONFIG_KASAN=y\n", 4), ("CONFIG_PROVE_LOCKING=y\n", 4)]
)
def test_limits_are_wider_for_a_kernel_with_checkers(
    unpacked: kernel.Kernel, config: str, patience: float
) -> None:
    (unpacked.root / "boot" / f"config-{VERSION}").write_text(f"CONFIG_SMP=y\n{config}")
    assert unpacked.patience == patience


# -- suites ------------------------------------------------------------------------------------------------


def test_the_suites_of_the_tree_can_be_read() -> None:
    found = vmlab.load_suites()
    plan = vmlab.together([suite for suite in found.values() if not suite.by_hand])
    assert [[suite.name for suite in now] for now in plan] == [["kmod-use", "kmod"], ["rdma"]]
    # One that is chosen alone has the first guest, and its PCI device, for itself.
    assert vmlab.together([found["kmod"]]) == [(found["kmod"],)]


def test_what_suites_choose_is_there() -> None:
    """A name that no test has would leave tests out without a word."""
    root = suites.ROOT
    contract = [
        *(root / "transports" / "testing").glob("*.py"),
        root / "tests" / "contract" / "verbs_keys.py",
    ]
    for suite in vmlab.load_suites().values():
        files = [*contract, *(suites.GUEST_TESTS / file for file in suite.files)]
        text = "\n".join([path.read_text() for path in files] + [Path(file).stem for file in suite.files])
        missing = [word for word in re.findall(r"\w+", suite.tests) if word not in text]
        assert not missing, f"[{suite.name}]"


def test_a_suite_chooses_by_pytests_own_option() -> None:
    command = vmlab.Lab()._command(vmlab.Suite("one", "x", ("smoke.py",), tests="a\n  or b"), ["-x"])
    assert command[command.index("-k") + 1] == "a or b"
    assert list(command[-2:]) == ["tests/lab/guest/smoke.py", "-x"]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('about = "x"', "files is missing"),
        ('files = ["smoke.py"]', "about is missing"),
        ('about = "x"\nfiles = ["none.py"]', "there is no none.py"),
        ('about = "x"\nfiles = ["smoke.py"]\nguests = 3', "expected 1 or 2"),
        ('about = "x"\nfiles = ["smoke.py"]\nguest = 2', "no such key 'guest'"),
        ('about = "x"\nfiles = "smoke.py"', "wrong kind"),
        ('about = "x"\nfiles = ["smoke.py"]\nbeside = "none"', "another suite of one guest"),
        ('about = "x"\nfiles = ["smoke.py"]\nbeside = "one"', "another suite of one guest"),
        (
            'about = "x"\nfiles = ["smoke.py"]\nbeside = "two"\n[two]\nabout = "x"\nfiles = ["pair.py"]\nguests = 2',
            "another suite of one guest",
        ),
        ("about", "Expected"),
    ],
)
def test_a_bad_table_is_told(tmp_path: Path, table: str, said: str) -> None:
    path = tmp_path / "suites.toml"
    path.write_text(f"[one]\n{table}\n")
    with pytest.raises(vmlab.LabError, match=said):
        suites.load_suites(path)


# -- the command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", ["nan", "-5", "0", "inf", "soon"])
def test_a_limit_that_is_none_is_refused(seconds: str) -> None:
    command = [sys.executable, str(LIB / "vmlab"), "--timeout", seconds, "exec", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--timeout" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["list", "smoke"], "smoke"),
        (["prepare", "smoke", "--", "-k", "x"], "smoke -k x"),
        (["--keep", "list"], "--keep"),
        (["--guests", "2", "run", "smoke"], "--guests"),
        (["--timeout", "20", "--build", "kmod", "run"], "--timeout, --build"),
        (["--build", "kmod", "prepare"], "--build"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(arguments: list[str], named: str) -> None:
    command = [sys.executable, str(LIB / "vmlab"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert named in done.stdout + done.stderr


def test_a_run_goes_on_in_the_environment_as_the_same_process(tmp_path: Path) -> None:
    """Who ends it by its id ends the run itself, which tidies up; a child of it would be killed outright."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho $$ $2 $3\n")
    python.chmod(0o755)
    text = (
        f"import sys, runpy; sys.path.insert(0, {str(LIB)!r}); sys.modules['pytest'] = None; import venv_setup; "
        f"venv_setup.ensure = lambda *_: {str(python)!r}; sys.argv = ['vm-lab', 'run', 'npu']; "
        f"runpy.run_path({str(LIB / 'vmlab' / '__main__.py')!r}, run_name='__main__')"
    )
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    said, _ = process.communicate(timeout=60)
    assert said.split() == [str(process.pid), "run", "npu"]
