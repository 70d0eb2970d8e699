"""The range allocator against a model that knows every unit's state."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from hawk.errors import InternalError, InvalidArgument, OutOfMemory
from hawk.memory.ranges import Range, RangeAllocator

UNIT, UNITS = 8, 40


class Machine(RuleBasedStateMachine):
    """A list with one entry per aligned unit: None (free), "q" (quarantined) or the range that holds it."""

    live = Bundle("live")
    quarantined = Bundle("quarantined")

    def __init__(self) -> None:
        super().__init__()
        # The odd tail is never handed out.
        self.pool = RangeAllocator(UNIT * UNITS + 5, UNIT, "pool")
        self.model: list[Range | str | None] = [None] * UNITS

    def fit(self, units: int, step: int) -> int | None:
        for start in range(UNITS - units + 1):
            if start % step == 0 and all(x is None for x in self.model[start : start + units]):
                return start
        return None

    def paint(self, taken: Range, what: Range | str | None) -> None:
        first, count = taken.offset // UNIT, -(-taken.nbytes // UNIT)
        self.model[first : first + count] = [what] * count

    @rule(
        target=live,
        nbytes=st.integers(1, UNIT * 12),
        owner=st.sampled_from(["a", "b", "c"]),
        step=st.sampled_from([None, 1, 2, 3]),
    )
    def allocate(self, nbytes: int, owner: str, step: int | None) -> object:
        expected = self.fit(-(-nbytes // UNIT), step or 1)
        alignment = None if step is None else step * UNIT
        if expected is None:
            with pytest.raises(OutOfMemory):
                self.pool.allocate(nbytes, owner, alignment)
            return multiple()
        taken = self.pool.allocate(nbytes, owner, alignment)
        assert (taken.offset, taken.nbytes, taken.owner) == (expected * UNIT, nbytes, owner)
        self.paint(taken, taken)
        return taken

    @rule(taken=consumes(live))
    def free(self, taken: Range) -> None:
        self.pool.free(taken)
        self.paint(taken, None)
        with pytest.raises(InvalidArgument, match="not allocated"):
            self.pool.free(taken)

    @rule(target=quarantined, taken=consumes(live))
    def quarantine(self, taken: Range) -> Range:
        self.pool.quarantine(taken, "the peer is silent")
        self.paint(taken, "q")
        with pytest.raises(InvalidArgument, match="the peer is silent"):
            self.pool.free(taken)
        return taken

    @rule(taken=consumes(quarantined))
    def release(self, taken: Range) -> None:
        self.pool.release_quarantined(taken)
        self.paint(taken, None)
        with pytest.raises(InvalidArgument, match="not in quarantine"):
            self.pool.release_quarantined(taken)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.free_bytes == self.model.count(None) * UNIT
        assert self.pool.quarantined_bytes == self.model.count("q") * UNIT
        owned: dict[str, int] = {}
        for x in self.model:
            if isinstance(x, Range):
                owned[x.owner] = owned.get(x.owner, 0) + UNIT
        assert self.pool.owned() == owned
        runs, at = [0], 0
        for x in self.model:
            at = at + 1 if x is None else 0
            runs.append(at)
        assert self.pool.largest_free == max(runs) * UNIT


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_error_names_the_figures() -> None:
    pool = RangeAllocator(1024, 64, "npu0/channel3")
    keep = [pool.allocate(256, "x") for _ in range(4)]
    pool.free(keep[0])
    pool.free(keep[2])
    with pytest.raises(OutOfMemory) as e:
        pool.allocate(300, "y", alignment=128)
    assert e.value.field == "npu0/channel3"
    assert {k: e.value.facts[k] for k in ("asked", "free", "largest_piece", "alignment")} == {
        "asked": "300",
        "free": "512",
        "largest_piece": "256",
        "alignment": "128",
    }


def test_a_stale_claim_is_noticed_though_its_address_was_given_out_anew() -> None:
    pool = RangeAllocator(1024, 64)
    old = pool.allocate(100, "job")
    pool.free(old)
    new = pool.allocate(100, "job")
    assert old == new
    with pytest.raises(InvalidArgument):
        pool.free(old)
    with pytest.raises(InvalidArgument):
        pool.quarantine(old, "why")
    pool.free(new)
    pool.check()


@given(alignment=st.integers(1, 100), own=st.integers(1, 64), nbytes=st.integers(1, 500))
def test_alignments_combine(alignment: int, own: int, nbytes: int) -> None:
    pool = RangeAllocator(1 << 20, own)
    pool.allocate(1, "first")
    taken = pool.allocate(nbytes, "second", alignment)
    assert taken.offset % alignment == 0
    assert taken.offset % own == 0
    pool.check()


@pytest.mark.parametrize("offset", [0, 64, 96, 1000, -64, 1 << 20])
def test_claim_takes_only_what_is_free_and_aligned(offset: int) -> None:
    pool = RangeAllocator(1024, 64)
    pool.allocate(128, "x")
    with pytest.raises(InvalidArgument):
        pool.claim(offset, 64, "y")
    pool.check()


@pytest.mark.parametrize(("nbytes", "alignment"), [(0, None), (-1, None), (64, 0), (64, -8)])
def test_bad_sizes(nbytes: int, alignment: int | None) -> None:
    with pytest.raises(InvalidArgument):
        RangeAllocator(1024, 64).allocate(nbytes, "x", alignment)


def test_bad_pools() -> None:
    with pytest.raises(InvalidArgument):
        RangeAllocator(63, 64)
    with pytest.raises(InvalidArgument):
        RangeAllocator(1024, 0)


def test_check_finds_broken_books() -> None:
    pool = RangeAllocator(1024, 64)
    pool.allocate(128, "x")
    pool._starts[0] -= 64
    with pytest.raises(InternalError):
        pool.check()
    pool._starts[0] += 64
    pool._free -= 64
    with pytest.raises(InternalError):
        pool.check()


def test_ten_thousand_ranges() -> None:
    pool = RangeAllocator(10_000 * 64, 64)
    taken = [pool.allocate(64, f"owner{i % 7}") for i in range(10_000)]
    for r in taken[::2] + taken[1::2]:
        pool.free(r)
    pool.check()
    assert pool.free_pieces() == [(0, 640_000)]
