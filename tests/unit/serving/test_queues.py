"""The simulator beside closed forms: queues with one server, Little's law, steps passed over at once."""

from dataclasses import replace

import numpy as np
import pytest

from hawk.serving import (
    Decode,
    Device,
    Lengths,
    Outcome,
    Prefill,
    Scenario,
    Slo,
    Workload,
    knee,
    simulate,
)
from hawk.serving.scenario import FirstToken

ONE = Device.measured("one second a thousand tokens", prefill={1000: 1.0})
AT_ONCE = Device.measured("no time at all")
ALONE = Prefill(ONE, max_tokens=1)  # each prompt in a step of its own


def queue(workload: Workload, load: float, requests: int = 40_000, seed: int = 5) -> Outcome:
    return simulate(Scenario(ALONE, Decode(AT_ONCE), workload, None, rate=load, requests=requests, seed=seed))


@pytest.mark.parametrize("load", [0.3, 0.5])
def test_exponential_service_waits_as_one_server_does(load: float) -> None:
    found = queue(Workload("exponential", Lengths("exponential", 1000), Lengths("fixed", 1)), load)
    assert found.ttft.mean() == pytest.approx(1 / (1 - load), rel=0.02)  # M/M/1


@pytest.mark.parametrize("load", [0.3, 0.5])
def test_fixed_service_waits_half_as_long(load: float) -> None:
    found = queue(Workload.fixed(1000, 1), load)
    assert found.ttft.mean() == pytest.approx(1 + load / (2 * (1 - load)), rel=0.02)  # M/D/1


def test_the_number_inside_is_rate_times_time() -> None:
    found = queue(Workload.fixed(1000, 1), 0.7, 10_000)
    rate = len(found) / found.seconds
    assert found.inside_seconds / found.seconds == pytest.approx(
        rate * (found.end - found.arrival).mean(), rel=1e-3
    )


def test_work_on_devices_whose_pace_changes_takes_what_it_makes_of_it() -> None:
    def takes(now: float, seconds: float) -> float:
        """Half as quick from the tenth second on."""
        quick = min(seconds, max(0.0, 10.0 - now))
        return quick + 2 * (seconds - quick)

    workload = Workload.of([(float(at), 1000, 1) for at in (0, 9, 9.5, 30)])
    scenario = Scenario(
        replace(ALONE, takes=takes), Decode(AT_ONCE), workload, None, rate=None, requests=None, warm_up=0.0
    )
    found = simulate(scenario)
    assert found.prefill_end.tolist() == pytest.approx([1.0, 10.0, 12.0, 32.0])
    assert found.prefill_busy.tolist() == pytest.approx([1 + 1 + 2 + 2])


@pytest.mark.parametrize("load", [0.5, 1.5])
def test_load_is_what_was_asked_and_utilisation_what_was_busy_meanwhile(load: float) -> None:
    found = queue(Workload.fixed(1000, 1, "even"), load, 1000)
    assert found.load[0] == pytest.approx(load, rel=1e-6)
    assert found.load[1:] == (0.0, 0.0)
    assert found.utilisation[0] == pytest.approx(min(load, 1.0), rel=1e-2)


def test_power_is_that_of_the_time_in_which_requests_come() -> None:
    """One long answer at the end keeps the whole system on for longer, but is not what it serves."""
    watt = Device.measured("w", prefill={1000: 1.0}, power=100.0)
    idle = {"power_idle": replace(watt.figures["power_idle"], value=0.0)}
    decoder = Device.measured("d", decode={1: 0.1})
    rows = [(float(n), 500, 1) for n in range(100)]
    for last in (1, 5000):
        found = simulate(
            Scenario(
                replace(ALONE, device=watt.with_figures(idle)),
                Decode(decoder),
                Workload.of([*rows, (100.0, 500, last)]),
                None,
                rate=None,
                requests=None,
            )
        )
        assert found.utilisation[0] == pytest.approx(0.5)
        assert found.power == pytest.approx(50.0)


def test_a_decode_side_that_drowns_is_seen_before_anybody_waits_too_long() -> None:
    # Each answer takes 10 s of one of 4 places, and two come in each second.
    decoder = Decode(Device.measured("d", decode={1: 0.1}), max_batch=4)
    scenario = Scenario(
        Prefill(AT_ONCE), decoder, Workload.fixed(10, 101, "even"), None, rate=2.0, requests=20
    )
    assert simulate(scenario).load[2] == pytest.approx(5.0)


@pytest.mark.parametrize("first", ["prefill", "transfer", "step"])
def test_who_waits_for_a_place_makes_no_tokens_meanwhile(first: FirstToken) -> None:
    decoder = Decode(Device.measured("d", decode={1: 0.1}), max_batch=4)
    asked = Workload.fixed(10, 101, "even")
    found = simulate(
        Scenario(Prefill(AT_ONCE), decoder, asked, None, rate=2.0, requests=400, first_token=first)
    )
    # Four tokens a step of 0.1 s; the first of each answer comes from prefill, two a second.
    assert found.output_throughput == pytest.approx(40 if first == "step" else 42, rel=0.01)


def test_a_knee_is_no_rate_at_which_queues_grow() -> None:
    """Ten servers of a request a second each: at 12 a second the last of 400 wait for 6 s, and 60 s are promised."""
    scenario = Scenario(
        replace(ALONE, instances=10),
        Decode(AT_ONCE),
        Workload.fixed(1000, 1, "even"),
        None,
        requests=400,
        slo=Slo(60.0, 1.0),
        router="round-robin",
    )
    found = knee(scenario, high=64.0)
    assert found.bounded
    assert found.rate == pytest.approx(10, rel=0.02)


def decoding(rates: dict[int, float], context: float, **changes: object) -> Outcome:
    device = Device.measured("decodes", decode=rates, step_context=context)
    workload = Workload("answers", Lengths("exponential", 50), Lengths("exponential", 30))
    scenario = Scenario(Prefill(AT_ONCE), Decode(device), workload, None, rate=2.0, requests=1500, seed=3)
    return simulate(replace(scenario, **changes))  # type: ignore[arg-type]


def by_step(found: Outcome, rates: dict[int, float], context: float) -> np.ndarray:
    """The ends of all requests of one decode instance, one step after another."""
    points = sorted(rates.items())
    ready = list(zip(found.transfer_end.tolist(), range(len(found)), strict=True))
    batch: dict[int, int] = {}
    ends, now, at = np.zeros(len(found)), 0.0, 0
    while at < len(ready) or batch:
        if not batch:
            now = max(now, ready[at][0])
        while at < len(ready) and ready[at][0] <= now:
            request = ready[at][1]
            batch[request] = int(found.output[request]) - 1
            at += 1
        for request in [r for r, left in batch.items() if left == 0]:
            ends[request] = now
            del batch[request]
        if not batch:
            continue
        tokens = sum(int(found.input[r]) + int(found.output[r]) - 1 - left for r, left in batch.items())
        base = np.interp(len(batch), [x for x, _ in points], [y for _, y in points])
        now += float(base) + tokens * context
        for request in batch:
            batch[request] -= 1
            if batch[request] == 0:
                ends[request] = now
        batch = {r: left for r, left in batch.items() if left}
    return ends


@pytest.mark.parametrize("context", [0.0, 2e-6])
def test_steps_passed_over_end_where_single_steps_do(context: float) -> None:
    rates = {1: 0.010, 8: 0.017, 64: 0.05}
    found = decoding(rates, context)
    assert found.mean_batch > 1
    np.testing.assert_allclose(found.end, by_step(found, rates, context), rtol=0, atol=1e-6)


def test_a_full_batch_makes_the_others_wait() -> None:
    free, full = (
        decoding({1: 0.02}, 0.0, decode=Decode(Device.measured("decodes", decode={1: 0.02}), max_batch=most))
        for most in (64, 1)
    )
    assert full.end.max() > free.end.max()
    order = np.argsort(full.decode_start)
    assert (full.decode_start[order][1:] >= full.end[order][:-1] - 1e-9).all()
