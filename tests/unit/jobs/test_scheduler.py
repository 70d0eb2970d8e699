"""Who goes next: nobody starves, nothing idles, shares are fair within a bound, and nothing piles up."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawk.jobs import scheduler as module
from hawk.jobs.scheduler import Ask, Scheduler

PEERS = st.sampled_from(["a", "b", "c"])
ASKS = st.builds(
    Ask,
    peer=PEERS,
    nbytes=st.integers(0, 1000),
    priority=st.integers(-2, 2),
    due=st.sampled_from([math.inf, 1.0, 2.0, 3.0]),
    left=st.integers(0, 5),
)


def free(ask: Ask) -> None:
    return None


def drain(scheduler: Scheduler, now: float = 0.0) -> list[Ask]:
    served = []
    while (ask := scheduler.next(free, now)) is not None:
        served.append(ask)
    assert len(scheduler) == 0
    return served


# -- the order -------------------------------------------------------------------------------------------


def test_within_a_peer_priority_then_deadline_then_what_is_left_then_age() -> None:
    ranked = [
        Ask("a", 1, priority=1, left=9),
        Ask("a", 1, due=2.0, left=9),
        Ask("a", 1, due=3.0, left=1),
        Ask("a", 1, left=1),
        Ask("a", 1, left=2),
        Ask("a", 1, left=2),
        Ask("a", 1, priority=-1, due=2.0),
    ]
    for order in (ranked, [*reversed(ranked[:4]), *ranked[4:]]):
        scheduler = Scheduler()
        for ask in order:
            scheduler.add(ask)
        assert drain(scheduler) == ranked


def test_a_deadline_that_has_passed_gives_no_precedence() -> None:
    scheduler = Scheduler()
    late, early, small = Ask("a", 1, due=1.0, left=5), Ask("a", 1, due=9.0, left=5), Ask("a", 1, left=1)
    for ask in (late, early, small):
        scheduler.add(ask)
    assert drain(scheduler, now=1.0) == [early, small, late]


def test_who_takes_much_waits_for_who_takes_little() -> None:
    scheduler = Scheduler()
    large = [Ask("a", 1000) for _ in range(3)]
    small = [Ask("b", 10) for _ in range(150)]
    for ask in (*large, *small):
        scheduler.add(ask)
    served = drain(scheduler)
    # After the first large piece the other peer goes until it has had as much.
    assert served.index(large[1]) == 1 + 100 + 1 or served.index(large[1]) == 1 + 100
    assert served[-1] is small[-1] or served[-1] is large[-1]


def test_priority_does_not_reach_beyond_a_peer() -> None:
    scheduler = Scheduler()
    mine = [Ask("a", 10) for _ in range(10)]
    for ask in (*(Ask("b", 10, priority=100) for _ in range(10)), *mine):
        scheduler.add(ask)
    served = drain(scheduler)
    assert sum(ask.peer == "a" for ask in served[:10]) == 5


def test_a_share_is_remembered_over_a_pause_and_a_long_pause_earns_nothing() -> None:
    scheduler = Scheduler()
    scheduler.add(Ask("a", 1000))
    assert scheduler.next(free) is not None
    # "a" has nothing waiting now; what it got counts when it comes back.
    scheduler.add(Ask("a", 1000))
    others = [Ask("b", 100) for _ in range(30)]
    for ask in others:
        scheduler.add(ask)
    served = drain(scheduler)
    assert [ask.peer for ask in served[:10]] == ["b"] * 10
    # "c" was away all the time, and does not get all that the others had.
    for ask in (*(Ask("b", 100) for _ in range(20)), *(Ask("c", 100) for _ in range(20))):
        scheduler.add(ask)
    served = drain(scheduler)
    assert 8 <= sum(ask.peer == "c" for ask in served[:20]) <= 12


# -- what is short ---------------------------------------------------------------------------------------


def test_others_go_before_one_that_does_not_fit_but_not_for_ever() -> None:
    scheduler = Scheduler(overtakes=3)
    large = Ask("a", 100, uses=("arena",))
    small = [Ask("b", 1, uses=("arena",)) for _ in range(10)]
    other = Ask("c", 1, uses=("elsewhere",))
    for ask in (large, *small):
        scheduler.add(ask)
    short = {"arena"}

    def take(ask: Ask) -> str | None:
        return "arena" if ask is large and short else None

    assert [scheduler.next(take) for _ in range(5)] == [*small[:3], None, None]
    scheduler.add(other)
    assert scheduler.next(take) is other  # which takes nothing of what is short
    assert scheduler.next(take) is None
    short.clear()
    assert scheduler.next(take) is large
    assert drain(scheduler) == small[3:]


def test_one_that_goes_away_is_in_nobodys_way() -> None:
    scheduler = Scheduler(overtakes=0)
    large, small = Ask("a", 100, uses=("arena",)), Ask("b", 1, uses=("arena",))
    scheduler.add(large)
    scheduler.add(small)

    def take(ask: Ask) -> str | None:
        return "arena" if ask is large else None

    assert scheduler.next(take) is None
    scheduler.discard(large)
    scheduler.discard(large)
    assert scheduler.next(take) is small
    assert scheduler.next(take) is None
    assert len(scheduler) == scheduler.remembered - len(scheduler._ends) == 0


# -- for all ---------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(ASKS, st.integers(0, 20), st.none()), max_size=80))
def test_everything_is_served_once_and_nothing_idles(steps: list[Ask | int | None]) -> None:
    """A ask comes, one of those waiting goes away (an int), or the next is served (None)."""
    scheduler = Scheduler(overtakes=2)
    waiting: list[Ask] = []
    for step in steps:
        if isinstance(step, Ask):
            scheduler.add(step)
            waiting.append(step)
        elif step is None:
            ask = scheduler.next(free, now=2.0)
            assert (ask is None) == (not waiting)
            if ask is not None:
                waiting.remove(ask)
        elif waiting:
            scheduler.discard(waiting.pop(step % len(waiting)))
        assert len(scheduler) == len(waiting)
    served = drain(scheduler, now=2.0)
    assert sorted(map(id, served)) == sorted(map(id, waiting))


@given(st.lists(st.tuples(PEERS, st.integers(1, 1000)), min_size=1, max_size=100))
def test_shares_are_fair_within_one_piece_of_each(pieces: list[tuple[str, int]]) -> None:
    scheduler = Scheduler()
    left: dict[str, int] = {}
    most: dict[str, int] = {}
    for peer, nbytes in pieces:
        scheduler.add(Ask(peer, nbytes))
        left[peer] = left.get(peer, 0) + 1
        most[peer] = max(most.get(peer, 0), nbytes)
    got = dict.fromkeys(left, 0)
    while (ask := scheduler.next(free)) is not None:
        got[ask.peer] += ask.nbytes
        left[ask.peer] -= 1
        busy = [peer for peer, count in left.items() if count]
        for a, b in itertools.combinations(busy, 2):
            assert abs(got[a] - got[b]) <= most[a] + most[b]


@given(st.integers(0, 5), st.integers(0, 5), st.lists(st.integers(-2, 2), min_size=40, max_size=40))
def test_nobody_starves(overtakes: int, ahead: int, better: list[int]) -> None:
    """However good those are that keep coming, the last of `ahead` + 1 asks has its turn."""
    scheduler = Scheduler(overtakes)
    for _ in range(ahead):
        scheduler.add(Ask("a", 1, priority=-9, left=99))
    last = Ask("a", 1, priority=-9, left=100)
    scheduler.add(last)
    turns = 0
    for priority in better:
        scheduler.add(Ask("a", 1, priority))
        turns += 1
        if scheduler.next(free) is last:
            break
    assert turns <= (ahead + 1) * (overtakes + 1)


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=300))
def test_what_is_kept_is_bounded(steps: list[tuple[int, bool]]) -> None:
    scheduler = Scheduler()
    keep = Ask("kept", 1, priority=-1)
    scheduler.add(keep)
    remembered, module._REMEMBERED = module._REMEMBERED, 4
    try:
        for peer, served in steps:
            ask = Ask(str(peer), 100 + peer)
            scheduler.add(ask)
            if served:
                scheduler.next(lambda c: "none" if c is keep else None)
            else:
                scheduler.discard(ask)
            assert len(scheduler._ends) <= 4
            lines = sum(len(line._ranked) + len(line._aged) for line in scheduler._lines.values())
            assert lines <= 4 * len(scheduler) + 16 * len(scheduler._lines)
    finally:
        module._REMEMBERED = remembered


def test_a_line_forgets_those_who_went_away() -> None:
    scheduler = Scheduler()
    for _ in range(1000):
        ask = Ask("a", 1)
        scheduler.add(ask)
        scheduler.discard(ask)
    line = scheduler._lines["a"]
    assert len(line._ranked) + len(line._aged) < 50


@pytest.mark.parametrize("peers", [1, 100])
def test_the_work_for_one_does_not_grow_with_what_waits(peers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons are counted, not seconds: ten times as many waiting may cost a few more, not ten times."""

    def comparisons(waiting: int) -> float:
        count = itertools.count()

        class Counted(int):
            def __lt__(self, other: int) -> bool:
                next(count)
                return int(self) < int(other)

            def __eq__(self, other: object) -> bool:
                next(count)
                return int(self) == other

            __hash__ = int.__hash__

        scheduler = Scheduler()
        for i in range(waiting):
            scheduler.add(Ask(str(i % peers), 1, left=Counted((i * 7919) % 1009)))
        before = next(count)
        for _ in range(100):
            assert scheduler.next(free) is not None
        return (next(count) - before) / 100

    assert comparisons(10_000) < 3 * comparisons(1_000) + 50


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)), max_size=30))
def test_who_comes_while_nobody_waits_leaves_the_same_shares(pieces: list[tuple[str, int]]) -> None:
    quick, slow = Scheduler(), Scheduler()
    for peer, nbytes in pieces:
        quick.served(Ask(peer, nbytes))
        slow.add(Ask(peer, nbytes))
        assert slow.next(lambda _: None) is not None
    for each in (quick, slow):
        for number, peer in enumerate("abcd" * 3):
            each.add(Ask(peer, 7, left=number))
    assert [quick.next(lambda _: None).left for _ in range(12)] == [
        slow.next(lambda _: None).left for _ in range(12)
    ]
