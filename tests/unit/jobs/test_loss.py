"""Frames are lost, repeated and delayed: a job ends ready with the right bytes, or with a named error."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hawk.errors import HawkError
from hawk.jobs.past import Outcome
from tests.unit.jobs import clock
from tests.unit.jobs.rig import Rig, rig

KINDS = [
    "fetch",
    "accepted",
    "prepared",
    "consumed",
    "poll",
    "alive",
    "release",
    "released",
    "abort",
    "ended",
]
FAULTS = st.dictionaries(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 3)),
    st.sampled_from(["drop", "twice", "late"]),
    max_size=8,
)

pytestmark = pytest.mark.usefixtures("impatient")


async def transfer(made: Rig) -> None:
    entry = made.offer()
    job = made.fetch(entry.claim)
    await job.run()
    made.check_bytes()
    assert made.progress[-1][0] == "ready"
    await asyncio.wait_for(entry.ended.wait(), 20)
    assert entry.outcome is Outcome.CONSUMED


@pytest.mark.parametrize("kind", KINDS[:8])
@pytest.mark.parametrize("fault", ["drop", "twice", "late"])
@pytest.mark.parametrize("together", [False, True])
async def test_any_one_frame(kind: str, fault: str, together: bool) -> None:
    async with rig(faults={(kind, 0): fault}) as made:
        made.to_d.together = together
        await transfer(made)


@pytest.mark.parametrize("kind", ["accepted", "prepared", "consumed", "release", "released", "fetch"])
async def test_one_kind_thrice_in_a_row(kind: str) -> None:
    async with rig(faults={(kind, n): "drop" for n in range(3)}) as made:
        await transfer(made)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(faults=FAULTS, mode=st.sampled_from(["direct", "staged"]), small=st.booleans(), together=st.booleans())
def test_any_frames(faults: dict[tuple[str, int], str], mode: str, small: bool, together: bool) -> None:
    async def run() -> None:
        async with rig(faults=faults, mode=mode, arena=1 << 17 if small else 1 << 18) as made:
            made.to_d.together = together
            await transfer(made)

    asyncio.run(run())


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(faults=FAULTS, after=st.integers(0, 30))
def test_an_abort_at_any_moment(faults: dict[tuple[str, int], str], after: int) -> None:
    """Ended by its owner after so many turns of the loop; the offer is whole afterwards and can be had again.

    The clock is the test's: a busy machine lets no lease run out, and one that must run out costs no time.
    """

    async def run() -> None:
        async with rig(faults=faults, lease=0.3) as made:
            clock.without_threads(made)
            entry = made.offer()
            job = made.fetch(entry.claim)
            task = asyncio.get_running_loop().create_task(job.run())
            for _ in range(after):
                await asyncio.sleep(0)
            job.stop(HawkError("enough"))
            await asyncio.wait({task}, timeout=20)
            if task.exception() is not None:
                assert str(task.exception()) == "enough"
                assert made.target.owners == made.target.quarantined == {}
                await asyncio.wait_for(made.serving.idle(), 20)
                if entry.outcome is Outcome.CONSUMED:
                    # It had been released when the end came, and P cannot take back what it confirmed.
                    assert any(frame.startswith("release") for frame in made.seen)
                    return
                assert entry.outcome is None
                await made.fetch(entry.claim).run()
            made.check_bytes()

    clock.run(run())
