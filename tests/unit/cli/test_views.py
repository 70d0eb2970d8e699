"""What answers of an agent look like, on a narrow terminal and in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hawk.cli import views
from hawk.control.messages import PeerInfo
from hawk.doctor import Finding, Level

PEER = PeerInfo(
    name="a1",
    direction="reads-from",
    state="up",
    address="tcp://127.0.0.1:7400",
    version=2,
    role="prefill",
    software="hawk 0.1.0",
    transports=["shm", "tcp"],
)


def _on_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> list[str]:
    out = io.StringIO()
    monkeypatch.setattr(
        views, "_console", lambda: Console(file=out, force_terminal=True, width=width, color_system=None)
    )
    views.peers([PEER])
    return out.getvalue().splitlines()


def test_a_narrow_terminal_has_fewer_columns_and_whole_words(monkeypatch: pytest.MonkeyPatch) -> None:
    head, row, rest = _on_terminal(monkeypatch, 80)
    assert head.split() == ["peer", "direction", "state", "jobs", "protocol", "address"]
    assert row.split() == ["a1", "reads-from", "up", "0", "2", "tcp://127.0.0.1:7400"]
    assert "software" in rest
    head, row = _on_terminal(monkeypatch, 130)
    assert "transports" in head
    assert "shm, tcp" in row


def test_lines_in_a_pipe_end_with_their_text(capsys: pytest.CaptureFixture[str]) -> None:
    views.findings([Finding("short", Level.OK, "x"), Finding("long", Level.OK, "y " * 60)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ok", "short", "x"]
    assert all(line == line.rstrip() for line in lines)
