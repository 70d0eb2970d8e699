"""Temporary folders: those of the dead go, those of the living stay, whoever is quicker."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hawk import folders
from hawk.folders import TemporaryFolder, sweep

OWNER = (
    "import sys, hawk.folders as f; made = f.TemporaryFolder('x-', sys.argv[1]); "
    "print(made.path, flush=True); sys.stdin.read()"
)


def test_a_folder_is_private_and_goes_with_all_in_it(tmp_path: Path) -> None:
    with TemporaryFolder("x-", tmp_path) as made:
        assert made.path.parent == tmp_path
        assert made.path.stat().st_mode & 0o777 == 0o700
        (made.path / "a").mkdir()
        (made.path / "a" / "b").write_text("")
    made.close()
    assert not os.listdir(tmp_path)


def test_the_living_keep_theirs_and_the_dead_do_not(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        (theirs / "secret.key").write_text("")
        sweep("x-", tmp_path)
        assert theirs.is_dir()
        owner.kill()
        owner.wait(30)
    assert theirs.is_dir()
    sweep("y-", tmp_path)
    assert theirs.is_dir()
    with TemporaryFolder("x-", tmp_path) as ours:
        assert list(tmp_path.iterdir()) == [ours.path]


def test_what_is_listened_at_stays_though_nobody_holds_the_lock(short_path: Path) -> None:
    folder = short_path / "x-1"
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        folder.mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX, kind) as sock:
            sock.bind(str(folder / "s.sock"))
            sock.listen()
            sweep("x-", short_path)
            assert folder.is_dir()
        sweep("x-", short_path)
        assert not folder.exists()


def test_links_files_and_folders_of_others_are_let_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x-file").write_text("")
    (tmp_path / "kept").mkdir()
    (tmp_path / "x-link").symlink_to(tmp_path / "kept")
    sweep("x-", tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["kept", "x-file", "x-link"]
    (tmp_path / "x-other").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    sweep("x-", tmp_path)
    assert (tmp_path / "x-other").is_dir()
    sweep("x-", tmp_path / "none")


def test_a_sweep_between_making_and_locking_costs_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    make = tempfile.mkdtemp

    def slow(**options: str) -> str:
        made = make(**options)
        if not taken:
            taken.append(made)
            shutil.rmtree(made)
        return made

    monkeypatch.setattr(folders.tempfile, "mkdtemp", slow)
    with TemporaryFolder("x-", tmp_path) as made:
        assert str(made.path) != taken[0]
        assert made.path.is_dir()


def test_a_sweep_that_has_the_lock_is_given_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    make = tempfile.mkdtemp

    def seen(**options: str) -> str:
        made = make(**options)
        if not held:
            held.append(folders._locked(Path(made)))
        return made

    monkeypatch.setattr(folders.tempfile, "mkdtemp", seen)
    with TemporaryFolder("x-", tmp_path) as made:
        assert len(os.listdir(tmp_path)) == 2
        os.close(held[0])
        sweep("x-", tmp_path)
        assert list(tmp_path.iterdir()) == [made.path]
