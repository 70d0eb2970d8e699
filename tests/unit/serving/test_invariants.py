"""What holds of every simulation, whatever it is of."""

import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk.errors import InvalidArgument, MissingDependency
from hawk.serving import (
    CONFIGURATIONS,
    Decode,
    Device,
    Lengths,
    Outcome,
    Prefill,
    Scenario,
    Transfer,
    Workload,
    knee,
    load_calibration,
    paper_scenario,
    simulate,
    sweep,
)

PAPER = load_calibration("paper")
SLACK = 1e-9


def orderly(found: Outcome) -> None:
    """Nothing before its time, nothing lost, nothing over its room."""
    stages = [
        found.arrival,
        found.prefill_start,
        found.prefill_end,
        found.transfer_end,
        found.decode_start,
        found.end,
    ]
    for before, after in pairwise(stages):
        assert (before <= after + SLACK).all()
    assert (found.transfer_start >= found.prefill_start - SLACK).all()
    assert (found.transfer_end >= found.transfer_start).all()
    assert (found.first_token >= found.arrival).all()
    assert (found.end >= found.first_token - SLACK).all()
    assert (found.decode_kv_peak <= found.decode_kv_tokens).all()
    assert (found.prefill_instance >= 0).all()
    assert (found.decode_instance >= 0).all()
    assert found.bytes_sent.sum() == found.bytes_received.sum()
    assert (found.prefill_busy <= found.seconds + SLACK).all()
    assert found.decode_busy.sum() <= found.seconds * len(found.decode_busy) + SLACK
    # Of each decode instance: the integral of its batch is the sum of what its requests spent in it.
    for number, inside in enumerate(found.decode_batch_seconds):
        own = found.decode_instance == number
        spent = float((found.end - found.decode_start)[own].sum())
        assert inside == pytest.approx(spent, rel=1e-6, abs=1e-6)


def scenario(**changes: Any) -> Scenario:
    # Devices as fast as the requests ask, so that queues and stalls are met and end.
    device = Device.measured(
        "both",
        prefill={1: 0.01, 500: 0.1, 2000: 0.5},
        decode={1: 0.01, 16: 0.02},
        step_context=1e-7,
        kv_tokens=6000,
    )
    workload = Workload("any", Lengths("lognormal", 300, 1.0, 1, 2000), Lengths("exponential", 20, 0, 1, 500))
    base = Scenario(
        Prefill(device, kv_tokens=3000),
        Decode(device),
        workload,
        Transfer("gn-hawk", PAPER),
        model="llama-3.2-1b",
        rate=4.0,
        requests=120,
    )
    return replace(base, **changes)


@settings(max_examples=25, deadline=None)
@given(
    configuration=st.sampled_from(CONFIGURATIONS),
    chunk=st.sampled_from([None, 1, 128, 2048]),
    instances=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    per_node=st.integers(1, 3),
    max_batch=st.sampled_from([1, 3, 256]),
    room=st.tuples(st.integers(2000, 5000), st.integers(2600, 9000)),
    rate=st.floats(0.1, 40),
    first=st.sampled_from(["prefill", "transfer", "step"]),
    router=st.sampled_from(["round-robin", "least-loaded", "two-choices"]),
    overlap=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_simulation_is_orderly(
    configuration: Any,
    chunk: int | None,
    instances: tuple[int, int],
    per_node: int,
    max_batch: int,
    room: tuple[int, int],
    rate: float,
    first: Any,
    router: Any,
    overlap: bool,
    seed: int,
) -> None:
    base = scenario()
    by_layer = overlap and not configuration.endswith("-host")
    found = simulate(
        replace(
            base,
            prefill=replace(
                base.prefill, chunk=chunk, instances=instances[0], kv_tokens=room[0], per_node=per_node
            ),
            decode=replace(
                base.decode,
                instances=instances[1],
                kv_tokens=room[1],
                max_batch=max_batch,
                per_node=per_node,
            ),
            transfer=Transfer(configuration, PAPER, overlap="layers" if by_layer else "none"),
            rate=rate,
            first_token=first,
            router=router,
            seed=seed,
        )
    )
    assert len(found) == 120
    orderly(found)


def test_a_full_decode_side_holds_the_prefill_side_up() -> None:
    slow = Device.measured("slow", decode={1: 0.05})
    base = scenario(rate=10.0, decode=Decode(slow))
    small, large = (
        simulate(
            replace(
                base,
                prefill=replace(base.prefill, kv_tokens=2500),
                decode=replace(base.decode, kv_tokens=room),
            )
        )
        for room in (2600, 60_000)
    )
    orderly(small)
    waits = [float((found.prefill_start - found.arrival).mean()) for found in (small, large)]
    assert waits[0] > 1.5 * waits[1]


def test_bytes_are_what_the_planner_says() -> None:
    base = scenario()
    found = simulate(base)
    assert base.transfer is not None
    told = [base.transfer.moved(base.served, int(n), 1, 1).nbytes for n in found.input]
    assert found.bytes_sent.sum() == sum(told)


def test_a_seed_gives_one_outcome_and_another_gives_another() -> None:
    one, same, other = (simulate(scenario(seed=seed)) for seed in (7, 7, 8))
    for name, column in one.columns().items():
        np.testing.assert_array_equal(column, same.columns()[name])
    assert not np.array_equal(one.end, other.end)


def test_a_sweep_is_the_same_for_any_number_of_workers() -> None:
    asked = [scenario(rate=rate, seed=3) for rate in (1.0, 3.0, 9.0)]
    seen: list[tuple[int, int]] = []
    alone = sweep(asked, workers=1, progress=lambda done, of: seen.append((done, of)))
    together = sweep(asked, workers=2)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    for one, two in zip(alone, together, strict=True):
        for name, column in one.columns().items():
            np.testing.assert_array_equal(column, two.columns()[name])
        assert one.summary() == two.summary()


def test_overlap_by_layer_hides_transfers_and_no_more() -> None:
    base = scenario(rate=0.2)
    after = simulate(base)
    beside = simulate(replace(base, transfer=Transfer("gn-hawk", PAPER, overlap="layers")))
    orderly(beside)
    assert beside.ttft.mean() < after.ttft.mean()
    cost = base.transfer.cost(base.served, 64, 1, 1) if base.transfer else None
    assert cost is not None
    least = cost.alone / base.served.layers
    assert (beside.transfer_end - beside.prefill_end >= least - SLACK).all()


def test_events_of_a_request_do_not_grow_with_instances() -> None:
    def per_request(instances: int) -> float:
        base = paper_scenario("gn-hawk", "chatbot", 0.4 * instances, requests=1500)
        grown = replace(
            base,
            prefill=replace(base.prefill, instances=instances),
            decode=replace(base.decode, instances=instances),
        )
        found = simulate(grown)
        return found.events / len(found)

    few, many = per_request(2), per_request(400)
    assert many < 1.1 * few
    assert many < 9


def test_the_knee_is_where_the_promise_ends() -> None:
    base = scenario(decode=Decode(Device.measured("d", decode={1: 0.01}), instances=4), requests=400)
    found = knee(base, 0.9, low=0.05, tolerance=0.05)
    assert found.bounded
    assert found.outcome.attainment >= 0.9
    assert simulate(base.at(found.rate * 1.3)).attainment < 0.9
    never = knee(replace(base, slo=replace(base.slo, ttft=1e-6)), 0.9)
    assert never.rate == 0.0


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simpy", None)
    with pytest.raises(MissingDependency) as caught:
        simulate(scenario())
    assert "[evaluate]" in str(caught.value.hint)


@pytest.mark.parametrize("first", ["prefill", "transfer", "step"])
def test_answers_of_one_token_have_no_time_a_token(first: Any) -> None:
    workload = Workload.fixed(200, 1)
    found = simulate(scenario(workload=workload, first_token=first, requests=1))
    orderly(found)
    assert np.isnan(found.tpot).all()
    assert np.isnan(found.percentile("tpot", 90))
    assert found.attainment == 1.0


def test_a_request_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        simulate(scenario(decode=replace(scenario().decode, kv_tokens=64)))
    assert caught.value.field == "decode.kv_tokens"
    assert caught.value.got == "64"
