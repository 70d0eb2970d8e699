"""The folder of a report: whose files go, whose stay, and what is refused."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path

import pytest

from hawk.errors import InvalidArgument
from hawk.evaluate import output


def earlier(folder: Path, *files: str) -> None:
    folder.mkdir(exist_ok=True)
    names = [output.PAGE, output.SUMMARY, *files]
    (folder / output.SUMMARY).write_text(json.dumps({"report": output.PAGE, "files": names}))
    (folder / output.PAGE).write_text("old")


def test_there_is_a_summary_only_beside_a_whole_report(tmp_path: Path) -> None:
    earlier(tmp_path, "a.csv")
    output.begin(tmp_path, output.claim(tmp_path, overwrite=True))
    assert [p.name for p in tmp_path.iterdir()] == [output.UNFINISHED]  # nobody takes this for a report
    with pytest.raises(InvalidArgument, match="has not ended"):
        output.claim(tmp_path, overwrite=False)
    left = output.claim(tmp_path, overwrite=True)
    assert {"a.csv", "measured/between.json"} <= set(left)
    output.remove(tmp_path, left)
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_is_made_and_an_empty_one_taken(tmp_path: Path) -> None:
    assert output.claim(tmp_path / "a" / "b", overwrite=False) == []
    assert output.claim(tmp_path / "a" / "b", overwrite=False) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_others_have_put_there_is_never_touched(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InvalidArgument) as caught:
        output.claim(tmp_path, overwrite=overwrite)
    assert caught.value.field == "out"
    assert str(tmp_path) in str(caught.value)


def test_an_earlier_report_goes_when_it_may(tmp_path: Path) -> None:
    earlier(tmp_path, "a.csv", "measured/between.json")
    (tmp_path / "a.csv").write_text("old")
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "between.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidArgument, match="--overwrite"):
        output.claim(tmp_path, overwrite=False)
    output.remove(tmp_path, output.claim(tmp_path, overwrite=True))
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_summary_that_names_files_elsewhere_takes_none_of_them(tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    earlier(tmp_path / "out", "../outside.txt", str(outside))
    output.remove(tmp_path / "out", output.claim(tmp_path / "out", overwrite=True))
    assert outside.read_text() == "mine"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"report": "report.html", "files": [1]}', '{"report": 1, "files": []}']
)
def test_what_is_no_summary_of_ours_is_no_report(tmp_path: Path, text: str) -> None:
    (tmp_path / output.SUMMARY).write_text(text)
    with pytest.raises(InvalidArgument):
        output.claim(tmp_path, overwrite=True)


def test_figures_that_would_be_overwritten_are_not_read(tmp_path: Path) -> None:
    earlier(tmp_path, "measured/between.json")
    folder = tmp_path / "measured"
    folder.mkdir()
    (folder / "between.json").write_text("{}")
    with pytest.raises(InvalidArgument) as caught:
        output.claim(tmp_path, overwrite=True, kept=[folder])
    assert caught.value.field == "from"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(InvalidArgument, match="file"):
        output.claim(path, overwrite=True)


@pytest.mark.parametrize("name", ["", ".", "measured", "a\0b"])
def test_a_summary_that_names_no_files_takes_no_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "mine.txt").write_text("mine")
    earlier(tmp_path, name)
    with contextlib.suppress(InvalidArgument):
        output.remove(tmp_path, output.claim(tmp_path, overwrite=True))
    assert (tmp_path / "measured" / "mine.txt").read_text() == "mine"


def test_a_summary_deeper_than_can_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / output.SUMMARY).write_text("[" * 100_000)
    with pytest.raises(InvalidArgument):
        output.claim(tmp_path, overwrite=True)


def test_figures_of_ones_own_in_the_folder_are_neither_read_nor_written_over(tmp_path: Path) -> None:
    earlier(tmp_path)  # of a run that has measured nothing
    folder = tmp_path / "measured"
    folder.mkdir()
    (folder / "between.json").write_text("{}")
    with pytest.raises(InvalidArgument) as caught:
        output.claim(tmp_path, overwrite=True, kept=[folder])
    assert caught.value.field == "from"
    with pytest.raises(InvalidArgument, match=r"between\.json") as caught:
        output.claim(tmp_path, overwrite=True)
    assert caught.value.field == "out"


def test_what_a_link_leads_to_stays(tmp_path: Path) -> None:
    outside = tmp_path / "thesis.csv"
    outside.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "inputs.csv").symlink_to(outside)
    output.whole(tmp_path / "out" / "inputs.csv", "new")
    assert outside.read_text() == "mine"
    assert (tmp_path / "out" / "inputs.csv").read_text() == "new"


def test_what_cannot_be_written_whole_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("old")
    with pytest.raises(UnicodeEncodeError):
        output.whole(tmp_path / "a.csv", "new" * 10_000 + "\ud800")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.csv", "old")]


def test_of_two_runs_that_begin_at_once_one_goes_on(tmp_path: Path) -> None:
    first, second = (output.claim(tmp_path, overwrite=False) for _ in range(2))
    output.begin(tmp_path, first)
    with pytest.raises(InvalidArgument, match="another run") as caught:
        output.begin(tmp_path, second)
    assert caught.value.field == "out"


def test_a_full_disk_is_told_with_the_file_that_it_was_too_small_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write does: without a name

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left") as caught:
        output.whole(tmp_path / "a.csv", "new")
    assert caught.value.filename == str(tmp_path / "a.csv")
