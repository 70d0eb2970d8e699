"""What other programs take of the processors, told from ours."""

import os
from pathlib import Path

import pytest

from hawk.bench.load_others import Others


class Proc:
    """A folder as `/proc` is: processors 0 to 2, this process, a child with a strange name, and a stranger."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mine = folder, os.getpid()
        self.tick = os.sysconf("SC_CLK_TCK")
        self.says({}, {})

    def says(self, busy: dict[int, float], took: dict[str, float]) -> None:
        """Seconds of each processor, and of each process; interrupts and idle time are always as much."""
        lines = ["cpu 0 0 0 0 0 0 0 0"]
        for number in range(3):
            ticks = round(busy.get(number, 0.0) * self.tick)
            lines.append(f"cpu{number} {ticks} 0 0 77 5 900 900 0")
        (self.folder / "stat").write_text("\n".join(lines))
        for name, number, parent in (
            ("mine", self.mine, 1),
            ("child", 4_000_001, self.mine),
            ("other", 4_000_002, 1),
        ):
            ticks = round(took.get(name, 0.0) * self.tick)
            (self.folder / str(number)).mkdir(exist_ok=True)
            fields = [0] * 9 + [ticks, 0, 0, 0, 0]
            text = f"{number} (a) b (c) S {parent} {' '.join(map(str, fields))}"
            (self.folder / str(number) / "stat").write_text(text)
        (self.folder / "4000003").mkdir(exist_ok=True)  # it has ended, and its folder is just going


@pytest.mark.parametrize(
    ("busy", "took", "part"),
    [
        ({0: 6.0, 1: 4.0}, {"mine": 3.0, "child": 7.0}, 0.0),
        ({0: 6.0, 1: 4.0}, {"mine": 3.0, "child": 3.0, "other": 4.0}, 0.2),
        ({0: 6.0, 1: 4.0, 2: 9.0}, {"mine": 10.0, "other": 9.0}, 0.0),  # on a processor that is not ours
        ({}, {"mine": 1.0}, 0.0),  # counts of processors come later than those of processes
    ],
)
def test_what_is_neither_idle_nor_ours_is_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    busy: dict[int, float],
    took: dict[str, float],
    part: float,
) -> None:
    now = [100.0]
    monkeypatch.setattr("hawk.bench.load_others.time.monotonic", lambda: now[0])
    proc = Proc(tmp_path)
    others = Others([0, 1], tmp_path)
    proc.says(busy, took)
    now[0] = 110.0
    assert others.part() == pytest.approx(part, abs=0.01)
    now[0] = 120.0
    assert others.part() == 0.0  # since then


def test_the_system_itself_can_be_asked() -> None:
    assert 0.0 <= Others(os.sched_getaffinity(0)).part() <= 1.0
