"""The pace of processors that are not a machine's own: taken, and taken into account."""

import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawk.bench.load_pace import Pace, pace_of, watched
from hawk.bench.load_single import Beside, Calibration, Single, Step
from hawk.errors import InternalError

SLOW = st.lists(st.floats(1, 4), max_size=30)


def test_samples_become_how_many_times_as_long_as_at_full_pace() -> None:
    times = np.array([5.0, 5.02, 5.04, 5.11, 5.13, 5.42])
    took = np.array([1.0, 1.0, 1.0, 2.0, 3.0, 1.5]) * 1e-4
    pace = pace_of(np.stack([times, took], axis=1))
    assert pace.since == 5.0
    assert pace.slow == pytest.approx([1.0, 2.5, 2.5, 2.5, 1.5])  # none in between: as before
    assert pace_of(np.empty((0, 2))).slow == []


def test_a_mean_is_of_what_was_sampled() -> None:
    pace = Pace(since=10.0, slow=[1.0, 2.0, 3.0])
    assert pace.mean(10.0, 10.05) == 1.0
    assert pace.mean(10.05, 10.25) == 2.0
    assert pace.mean(0.0, 10.15) == 1.5
    assert pace.mean(11.0, 12.0) == 3.0
    assert pace.mean(8.0, 9.5) == 1.0  # before: full pace, as work has it that begins then
    assert Pace(since=0.0, slow=[]).mean(0.0, 1.0) == 1.0
    with pytest.raises(msgspec.ValidationError, match=r">= 1.*slow\[0\]"):  # of a file: what would be no pace
        msgspec.convert({"since": 0.0, "slow": [0.0]}, Pace)
    assert pace.part(0.5).slow == [1.0, 1.5, 2.0]
    assert pace.from_(4.0).since == 6.0


def test_work_takes_what_the_pace_of_each_moment_makes_of_it() -> None:
    pace = Pace(since=1.0, slow=[1.0, 2.0, 4.0])
    assert pace.takes(1.0, 0.05) == pytest.approx(0.05)
    assert pace.takes(1.05, 0.1) == pytest.approx(0.15)  # half at full pace, half of it twice as long
    assert pace.takes(0.5, 0.55) == pytest.approx(0.55)
    assert pace.takes(9.0, 0.1) == pytest.approx(0.4)
    assert pace.takes(1.0, 0.25) == pytest.approx(0.2 + 4 * 0.1)


@given(SLOW, st.floats(0, 5), st.floats(0, 3), st.floats(0, 3))
def test_work_in_two_parts_takes_as_long_as_in_one(slow: list[float], now: float, a: float, b: float) -> None:
    pace = Pace(since=2.0, slow=slow)
    first = pace.takes(now, a)
    assert first + pace.takes(now + first, b) == pytest.approx(pace.takes(now, a + b), abs=1e-6)
    assert a - 1e-9 <= first <= 4 * a + 1e-9


def test_processors_are_sampled_for_as_long_as_a_block_runs() -> None:
    mine = frozenset([min(os.sched_getaffinity(0))])
    with watched({"prefill": mine, "decode": mine}) as watch:
        assert watch.samples == {}
    for samples in watch.samples.values():
        assert samples.shape[1] == 2
        assert len(samples) >= 1
        assert (samples[:, 1] > 0).all()
    assert set(watch.samples) == {"prefill", "decode"}


def test_a_python_that_cannot_sample_is_told_of(tmp_path: Path) -> None:
    false = tmp_path / "python"
    false.write_text(f"#!{sys.executable}\nraise SystemExit(3)\n")
    false.chmod(0o755)
    with (
        pytest.raises(InternalError, match=r"was not taken.*side=decode.*status=3"),
        watched({"decode": frozenset([0])}, false),
    ):
        pytest.fail("there is nothing to watch")


def test_a_python_that_greets_can_sample(tmp_path: Path) -> None:
    greets = tmp_path / "python"
    greets.write_text(f'#!/bin/sh\necho hello\nexec {sys.executable} "$@"\n')
    greets.chmod(0o755)
    with watched({"decode": frozenset(os.sched_getaffinity(0))}, greets) as watch:
        pass
    assert len(watch.samples["decode"]) >= 1


def test_what_a_block_raises_is_what_comes_out() -> None:
    mine = frozenset(os.sched_getaffinity(0))
    with pytest.raises(KeyError), watched({"prefill": mine}):
        raise KeyError


def calibration(pace: dict[str, Pace], share: float) -> Calibration:
    """Requests that take what a pace makes of 0.1 s a 1000 tokens."""

    def single(at: float, tokens: int) -> Single:
        full = tokens / 10_000
        prefill = full
        for _ in range(50):  # what it takes is over the time that it takes
            prefill = full * (1 + share * (pace["prefill"].mean(at, at + prefill) - 1))
        slow = 1 + share * (pace["decode"].mean(at + prefill, at + prefill + 0.05) - 1)
        return Single(
            input=tokens, first=prefill + 0.05, prefill=prefill, fetch=0.01 * slow, step=0.02 * slow, at=at
        )

    ones = [single(0.1 * k, tokens) for k in range(40) for tokens in (500, 1000)]
    step = Step(batch=1, context=5, seconds=0.01 * (1 + share), gaps=9, at=9.0, until=9.4)
    return Calibration(
        singles=ones, steps=[step], beside=[Beside(batch=1, others=0.02, one=ones[0])], behind=ones[:1]
    )


@pytest.mark.parametrize("share", [0.5, 1.0, 2.0])
def test_single_requests_tell_how_much_of_them_slows(share: float) -> None:
    quick, twice = [1.0] * 7, [2.0] * 5
    pace = {"prefill": Pace(since=0.0, slow=(quick + twice) * 4), "decode": Pace(since=0.0, slow=[2.0] * 100)}
    found = calibration(pace, share)
    assert found.share(pace["prefill"]) == pytest.approx(share, rel=0.12)  # a tenth of a second is one pace
    full = found.at_full_pace({side: of.part(share) for side, of in pace.items()})
    assert full.table("prefill") == pytest.approx({500: 0.05, 1000: 0.1}, rel=1e-6)
    assert full.table("fetch") == pytest.approx({500: 0.01, 1000: 0.01})
    assert full.step_table() == pytest.approx({1: 0.01})
    assert full.beside[0].one.prefill == full.behind[0].prefill == pytest.approx(0.05)


def test_a_pace_that_does_not_change_tells_nothing() -> None:
    steady = {side: Pace(since=0.0, slow=[1.0] * 100) for side in ("prefill", "decode")}
    found = calibration(steady, 2.0)
    assert found.share(steady["prefill"]) == 1.0
    assert found.at_full_pace(steady).table("prefill") == found.table("prefill")
