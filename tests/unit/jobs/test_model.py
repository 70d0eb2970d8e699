"""The life of a job as a state machine: whatever is lost, late, repeated, aborted or dead, the books are right.

Hypothesis draws what happens (frames of every type one by one, reads that end well, badly or heed nobody, time, ends
and deaths), the real code of both sides runs in a loop whose clock it holds, and the pure model of `books.py` says
what must be.  That it would see a broken promise is shown for each of those in `BROKEN`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hawk.control.messages import Alive, Fetch, Release
from hawk.jobs import dialogue
from hawk.jobs.dialogue import Dialogue
from hawk.jobs.fetch import FetchJob
from hawk.jobs.part import PartJob
from hawk.jobs.receive import Receiver
from hawk.jobs.room import Room
from hawk.jobs.serve import ServeJob
from hawk.jobs.serving import Serving
from hawk.jobs.shelf import Shelf
from tests.end_to_end import caches as c
from tests.unit.jobs.device import PAIRS
from tests.unit.jobs.world import ENDS, STAGES, World

LEASE = 5.0
SIDES = st.sampled_from(["p", "d"])
WHICH = st.integers(0, 5)
PAIR = st.integers(0, len(PAIRS) - 1)

JOBS = list(product([c.LAYERS, 1, 0], [False, True], STAGES, ["on", "on", *ENDS]))
"""Layers that are written at first, whether reads are stubborn, how far it comes, what happens then."""


def step(method: Callable[..., None]) -> Callable[..., None]:
    """What a rule does, and a look at everything after it."""

    @functools.wraps(method)
    def run(self: JobLife, *args: Any, **kwargs: Any) -> None:
        self.broken = True
        method(self, *args, **kwargs)
        self.world.check()
        self.broken = False

    return run


class JobLife(RuleBasedStateMachine):
    """As many offers and fetches as happen to be, at most three fetches at a time."""

    world: World
    broken = True

    @initialize(
        fenced=st.booleans(),
        arena=st.sampled_from([1 << 18, 1 << 17]),
        credit=st.sampled_from([1 << 17, 1 << 16]),
        together=st.booleans(),
        at_once=st.booleans(),
    )
    def begin(self, fenced: bool, arena: int, credit: int, together: bool, at_once: bool) -> None:
        self.world = World(
            fenced=fenced, arena=arena, credit=credit, lease=LEASE, together=together, at_once=at_once
        )
        self.world.check()
        self.broken = False

    @precondition(lambda self: len(self.world.live_jobs) < 3)
    @rule(how=st.sampled_from(JOBS))
    @step
    def job(self, how: tuple[int, bool, str, str]) -> None:
        """A request is offered, fetched and brought to a stage; reads from now on heed cancellations or do not."""
        layers, stubborn, stage, then = how
        world = self.world
        world.stubborn = stubborn
        world.offer(layers)
        world.fetch(len(world.offers) - 1, world.free_pair, 30.0)
        world.reach(stage)
        if then != "on":
            world.check()
            world.stop(max(world.tasks), then)

    @precondition(lambda self: len(self.world.live_jobs) < 3)
    @rule(which=WHICH, pair=PAIR, timeout=st.sampled_from([30.0, 4.0]))
    @step
    def fetch(self, which: int, pair: int, timeout: float) -> None:
        """A fetch of any offer, or of one that nobody made."""
        self.world.fetch(which if which < len(self.world.offers) else -1, pair, timeout)

    @precondition(lambda self: self.world.offers)
    @rule(which=WHICH)
    @step
    def layers(self, which: int) -> None:
        self.world.layers(-1 - which % len(self.world.offers))

    @rule(side=SIDES, which=WHICH)
    @step
    def late(self, side: str, which: int) -> None:
        """Any of the frames arrives, the older ones after it."""
        self.world.deliver(side, which)

    @rule(side=SIDES, which=WHICH)
    @step
    def twice(self, side: str, which: int) -> None:
        self.world.deliver(side, which, keep=True)

    @rule(side=SIDES, which=WHICH)
    @step
    def lost(self, side: str, which: int) -> None:
        self.world.drop(side, which)

    @rule(steps=st.integers(1, 8), reads=st.booleans())
    @step
    def flow(self, steps: int, reads: bool) -> None:
        self.world.flow(steps, reads=reads)

    @rule(which=WHICH, how=st.sampled_from(["well", "badly"]))
    @step
    def read(self, which: int, how: str) -> None:
        self.world.end_read(which, how)

    @rule(seconds=st.sampled_from([1.1, LEASE * 0.8, LEASE * 1.1]))
    @step
    def silence(self, seconds: float) -> None:
        """Time passes and no frame arrives."""
        self.world.loop.advance(seconds)

    @rule(seconds=st.sampled_from([0.3, 2.0]))
    @step
    def live(self, seconds: float) -> None:
        self.world.live(seconds)

    @precondition(lambda self: self.world.live_jobs)
    @rule(which=WHICH, how=st.sampled_from(ENDS))
    @step
    def end(self, which: int, how: str) -> None:
        live = self.world.live_jobs
        self.world.stop(live[-1 - which % len(live)], how)

    @precondition(lambda self: not self.world.parted and len(self.world.tasks) > 3 and self.world.live_jobs)
    @rule(whose=SIDES)
    @step
    def die(self, whose: str) -> None:
        self.world.die(whose)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        if self.broken:
            self.world.abandon()
            return
        try:
            self.world.end()
        except BaseException:
            self.world.abandon()
            raise


HOW = settings(
    max_examples=50,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_the_life_of_a_job() -> None:
    run_state_machine_as_test(JobLife, settings=HOW)


def walk(seed: int) -> None:
    """The same steps from plain dice.  Hypothesis shrinks, and comes back to what is simple; dice go everywhere."""
    dice = random.Random(seed)
    pick, which = dice.choice, dice.randrange
    life = JobLife()
    try:
        life.begin(
            fenced=pick([True, False]),
            arena=pick([1 << 17, 1 << 18]),
            credit=pick([1 << 16, 1 << 17]),
            together=bool(seed % 2),
            at_once=bool(seed // 2 % 2),
        )
        for _ in range(dice.randint(5, 40)):
            world = life.world
            steps: list[Callable[[], None]] = [
                lambda: life.late(side=pick("pd"), which=which(6)),
                lambda: life.twice(side=pick("pd"), which=which(6)),
                lambda: life.lost(side=pick("pd"), which=which(6)),
                lambda: life.flow(steps=which(1, 9), reads=pick([True, False])),
                lambda: life.read(which=which(6), how=pick(["well", "well", "badly"])),
                lambda: life.silence(seconds=pick([1.1, LEASE * 0.8, LEASE * 1.1])),
                lambda: life.live(seconds=pick([0.3, 2.0])),
            ]
            if len(world.live_jobs) < 3:
                steps += [lambda: life.job(how=pick(JOBS))] * 3
                steps += [lambda: life.fetch(which=which(6), pair=which(3), timeout=pick([30.0, 4.0]))]
            if world.offers:
                steps.append(lambda: life.layers(which=which(6)))
            if world.live_jobs:
                steps.append(lambda: life.end(which=which(6), how=pick(ENDS)))
            pick(steps)()
        if not which(6):
            life.die(whose=pick("pd"))
    finally:
        life.teardown()


def test_an_answer_older_than_the_lease_is_none() -> None:
    """Found by the walks: a lease that was over when the decode side learnt of it let one read begin."""
    world = World(fenced=True, arena=1 << 18, credit=1 << 17, lease=LEASE)
    world.offer(c.LAYERS)
    number = world.fetch(0, 0, 30.0)
    world.loop.advance(LEASE / 2)
    world.deliver("p")
    world.deliver("d")  # Accepted, so late that it asks anew
    while world.frames["p"]:
        world.deliver("p")
    answers = [i for i, frame in enumerate(world.frames["d"]) if isinstance(frame, Alive)]
    world.loop.advance(LEASE * 1.1)
    world.deliver("d", answers[0])
    while world.frames["d"]:
        world.deliver("d")
    world.check()
    assert not world.reads
    assert world.books.wanted[number].states[-1] == "failed"
    world.end()


@pytest.mark.parametrize("seeds", [range(n, n + 20) for n in range(0, 80, 20)], ids=str)
def test_walks_through_it(seeds: range) -> None:
    for seed in seeds:
        walk(seed)


# -- that it would see it --------------------------------------------------------------------------------


async def _nothing(*_: Any, **__: Any) -> None:
    return


def _frees(self: Room, ask: Any, taken: Any, *, quarantine: str = "") -> None:
    self._return(ask)
    self.arena.free(taken)
    self._turns.check()


async def _asks_only(self: Dialogue) -> None:
    self._asked_release = True
    self._send(Release(self.id))


async def _does_not_wait(self: Receiver) -> None:
    for task in self._tasks:
        task.cancel()


def _disowns(self: FetchJob, error: Any) -> None:
    super(FetchJob, self).stop(error)
    self.request.cache.disown(self.request.job)


def _begins_anew(self: Serving, identity: bytes, header: Any, message: Any) -> None:
    if isinstance(message, Fetch):
        self._jobs.pop((identity, message.job), None)
    _take(self, identity, header, message)


_take = Serving._take


def _consumed_at_once(self: Shelf, number: int) -> None:
    held = self._held.pop(number, None)
    if held is not None:
        self._arena_room.give(held.ask, held.range)


BROKEN: dict[str, tuple[Any, str, Any]] = {
    "ready without a flush": (PartJob, "flush", _nothing),
    "the prefill side ignores its lease": (ServeJob, "_lease_ran_out", lambda self: None),
    "the decode side ignores its lease": (dialogue, "MARGIN", -1000.0),
    "ranges are freed under a reader": (Room, "give", _frees),
    "ready before Released": (Dialogue, "release", _asks_only),
    "an end does not wait for reads": (Receiver, "stop", _does_not_wait),
    "blocks go back before the end": (FetchJob, "stop", _disowns),
    "a repeated Fetch begins anew": (Serving, "_take", _begins_anew),
    "credit of a consumed chunk is lost": (Shelf, "consumed", _consumed_at_once),
}


@pytest.mark.parametrize("promise", BROKEN)
def test_a_broken_promise_is_seen(promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, broken = BROKEN[promise]
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(AssertionError):
        for seed in range(400):
            walk(seed)
