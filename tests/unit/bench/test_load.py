"""What `hawk bench serving` measures of a pair that takes known times, in simulated time; vLLM itself runs by hand."""

import asyncio
import json
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from hawk._version import __version__
from hawk.bench import load
from hawk.bench.load_client import Arrival, arrivals, open_loop
from hawk.bench.load_pace import Pace
from hawk.bench.load_pair import Spoken
from hawk.bench.load_predict import foretell
from hawk.bench.load_rates import Rates
from hawk.bench.load_result import Lengths, Measured, read
from hawk.bench.load_single import Calibration
from hawk.cli import cli
from hawk.errors import InternalError, InvalidArgument
from tests.fake_pair import BUDGET, FakePair, SimulatedTime

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        return runner.run(work)


def pair(**more: Any) -> FakePair:
    return FakePair(
        prefill=lambda n: 0.01 + n / 5000,
        fetch=lambda n: 0.002 + n / 1e5,
        step=lambda batch: 0.01 + 0.002 * batch,
        **more,
    )


def test_single_requests_and_batches_are_what_the_pair_takes() -> None:
    async def measure() -> Calibration:
        rates = Rates(pair(rest=0.003), 100, random.Random(1))
        return await rates.measure([100, 1000], [1, 4], 300, 2, lambda _: None)

    found, near = run(measure()), 0.02  # no two prompts are of the same length
    assert found.table("prefill") == pytest.approx({100: 0.03, 1000: 0.21}, rel=near)
    assert found.table("fetch") == pytest.approx({100: 0.003, 1000: 0.012}, rel=near)
    assert found.table("step") == pytest.approx({100: 0.012, 1000: 0.012})
    assert found.table("rest") == pytest.approx({100: 0.003, 1000: 0.003})
    assert found.table("first") == pytest.approx({100: 0.048, 1000: 0.237}, rel=near)
    assert found.step_table() == pytest.approx({1: 0.012, 4: 0.018})
    assert found.slowed("prefill") == pytest.approx({1: 1.0, 4: 1.0}, rel=near)
    assert found.slowed("fetch") == pytest.approx({1: 1.0, 4: 1.0}, rel=near)
    assert all(0 <= later <= 0.02 for later in found.later().values())  # until the step that runs is over
    assert found.steps_slowed() == pytest.approx({1: 1.0, 4: 1.0})


def test_what_the_sides_take_from_each_other_is_seen() -> None:
    async def measure() -> Calibration:
        rates = Rates(pair(slowed=1.5), 100, random.Random(1))
        return await rates.measure([500, 1000], [2], 300, 2, lambda _: None)

    found = run(measure())
    assert found.slowed("prefill") == pytest.approx({2: 1.5}, rel=0.02)
    assert found.steps_slowed() == pytest.approx({2: 1.5}, rel=0.05)
    assert found.step_table() == pytest.approx({2: 0.014})  # alone
    assert found.slowed_behind("fetch") == pytest.approx(1.5, rel=0.02)
    assert found.later_behind() < 1e-6
    assert [one.input for one in found.behind] in ([500, 1000], [1000, 500])


def test_single_requests_are_of_lengths_that_are_new_to_the_engine() -> None:
    prepared: set[int] = set()

    def prefill(tokens: int) -> float:
        """The first of a size has to be prepared for, which no later one pays."""
        new = tokens not in prepared
        prepared.add(tokens)
        return 0.01 + tokens / 5000 + 0.05 * new

    made = FakePair(
        prefill=prefill,
        fetch=lambda n: n / 1e5,
        step=lambda batch: 0.01,
    )

    async def measure() -> Calibration:
        rates = Rates(made, 100, random.Random(1), 2048)
        return await rates.measure([128, 2048], [1, 2], 300, 3, lambda _: None)

    found = run(measure())
    asked = [length for way, length, _ in made.asked if way != "decode"]
    assert len(set(asked)) == len(asked) == 2 * (1 + 3) + 2 * 2 + 2 * 2
    assert all(min(abs(length - near) for near in (128, 2048)) < len(asked) for length in asked)
    assert max(asked) == 2048  # more would not be one step
    assert found.lengths() == [128, 2048]
    assert found.table("prefill") == pytest.approx({128: 0.0856, 2048: 0.4696}, rel=0.02)
    assert found.slowed("prefill") == pytest.approx({1: 1.0, 2: 1.0}, rel=0.02)


def test_a_prompt_that_decode_computed_itself_is_no_fetch() -> None:
    class Forgets(FakePair):
        async def counts(self, side: str, names: Any) -> dict[str, float]:
            return {**await super().counts(side, names), "hawk_fetch_seconds_count": 0.0}

    broken = Forgets(lambda _: 0.1, lambda _: 0.1, lambda _: 0.1)
    with pytest.raises(InternalError, match=r"300 tokens: .*was to be fetched"):
        run(Rates(broken, 100, random.Random(1)).single(300))


def test_arrivals_are_a_poisson_stream_of_the_lengths_that_were_asked_for() -> None:
    lengths = Lengths(least=128, most=2048, output=12, output_most=48)
    plan = arrivals(5.0, 20_000, lengths, np.random.default_rng(3))
    gaps = np.diff([0.0, *(a.due for a in plan)])
    assert gaps.mean() == pytest.approx(0.2, rel=0.02)
    assert gaps.std() == pytest.approx(0.2, rel=0.03)
    inputs, outputs = [a.input for a in plan], [a.output for a in plan]
    assert (min(inputs), max(inputs)) == (128, 2048)
    assert np.mean(inputs) == pytest.approx(1920 / np.log(16), rel=0.02)
    assert (min(outputs), max(outputs)) == (2, 48)
    assert np.mean(outputs) == pytest.approx(12, rel=0.04)  # less what is cut off
    assert plan == arrivals(5.0, 20_000, lengths, np.random.default_rng(3))


def test_a_request_that_does_not_end_delays_no_other() -> None:
    class Waits(FakePair):
        """The first ends when the last has."""

        def __init__(self) -> None:
            super().__init__(lambda _: 0.0, lambda _: 0.0, lambda _: 0.0)
            self.last = asyncio.Event()

        async def stream(self, way: str, prompt: Any, tokens: int, spoken: Spoken) -> None:
            spoken.sent = asyncio.get_running_loop().time()
            if len(self.asked) == 0:
                self.asked.append((way, len(prompt), tokens))
                await self.last.wait()
            self.asked.append((way, len(prompt), tokens))
            if len(prompt) == 30:
                self.last.set()
            spoken.times += [asyncio.get_running_loop().time()] * tokens

    async def measure() -> list[Any]:
        plan = [Arrival(1.0, 10, 2), Arrival(2.0, 20, 2), Arrival(9.0, 30, 2)]
        return (await open_loop(Waits(), plan, 100, random.Random(1)))[1]

    found = run(measure())
    assert [r.sent for r in found] == pytest.approx([1.0, 2.0, 9.0])
    assert [r.ttft for r in found] == pytest.approx([8.0, 0.0, 0.0])


def test_a_request_that_is_sent_late_has_waited_since_it_was_due() -> None:
    class Busy(FakePair):
        """Keeps the loop busy for 5 s when the first request comes."""

        async def stream(self, way: str, prompt: Any, tokens: int, spoken: Spoken) -> None:
            loop = asyncio.get_running_loop()
            if not self.asked and isinstance(loop, SimulatedTime):
                loop.hog(5.0)
            await super().stream(way, prompt, tokens, spoken)

    async def measure() -> list[Any]:
        busy = Busy(lambda _: 0.5, lambda _: 0.0, lambda _: 0.0)
        return (await open_loop(busy, [Arrival(1.0, 9, 2), Arrival(2.0, 9, 2)], 100, random.Random(1)))[1]

    first, second = run(measure())
    assert second.sent == pytest.approx(6.0)
    assert second.ttft == pytest.approx(5.0)  # until 7.0, behind the first, which began at 6.0
    assert first.ttft == pytest.approx(5.5)


def test_a_request_that_fails_is_kept_as_one() -> None:
    class Fails(FakePair):
        async def stream(self, way: str, prompt: Any, tokens: int, spoken: Spoken) -> None:
            await super().stream(way, prompt, tokens, spoken)
            if len(prompt) == 7:
                raise InternalError("no more")

    async def measure() -> list[Any]:
        fails = Fails(lambda _: 0.5, lambda _: 0.0, lambda _: 0.0)
        return (await open_loop(fails, [Arrival(1.0, 7, 2), Arrival(2.0, 9, 2)], 100, random.Random(1)))[1]

    first, second = run(measure())
    assert (first.error, first.first, first.ttft) == ("no more", None, float("inf"))
    assert not second.error


def test_capacity_is_of_the_prefill_beside_decode() -> None:
    async def measure() -> Calibration:
        rates = Rates(pair(slowed=1.25), 100, random.Random(1))
        return await rates.measure([100, 1000], [1], 300, 1, lambda _: None)

    assert load.capacity(run(measure()), [100, 1000, 550]) == pytest.approx(1 / (1.25 * 0.12), rel=0.02)


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5, float("nan")])
def test_a_fraction_that_is_none_is_refused(fraction: float) -> None:
    with pytest.raises(InvalidArgument, match="--fraction: no part of a rate"):
        load.run(fractions=[fraction])


def measured(made: FakePair, fractions: list[float], requests: int = 250, **more: Any) -> Measured:
    """A whole run over that pair."""
    result = Measured(
        date="2026-01-01T00:00:00+00:00",
        machine={"cpus": 2},
        versions={},
        seed=5,
        setting=msgspec.structs.replace(
            load.SETTING,
            budget=BUDGET,
            lengths=Lengths(least=128, most=2048, output=8, output_most=24),
        ),
    )

    async def whole() -> None:
        await load.measure(
            made, result, fractions, requests, 2, singles=(128, 512, 2048), batches=(1, 2, 4), **more
        )

    run(whole())
    foretell(result)
    return result


def test_a_pair_that_does_what_single_requests_did_is_foretold() -> None:
    found = measured(pair(rest=0.004), [0.3, 0.7])
    assert found.holds == {"apart": True, "shared": True}
    assert found.lacks == []
    for rate in found.rates:
        for entry in rate.compared:
            assert abs(entry.difference) < 0.05
        assert rate.fetched == len(rate.requests) == 250
        assert rate.late < 1e-6
        for part, seconds in rate.parts["measured"].items():
            assert seconds == pytest.approx(rate.parts["shared"][part], rel=0.1, abs=0.004)
    low, high = found.rates
    assert high.parts["measured"]["rest"] > 2 * low.parts["measured"]["rest"]
    assert high.ttft(90) > 1.5 * low.ttft(90)  # there is a line to be foretold


def test_what_other_programs_take_meanwhile_is_said() -> None:
    taken = iter([0.5, 0.01, 0.5, 0.25])  # before each rate it is asked as well, for the count to begin there
    found = measured(pair(), [0.3, 0.4], 40, others=lambda: next(taken))
    assert [rate.others for rate in found.rates] == [0.01, 0.25]
    assert found.lacks[0] == "40%: other programs took 25% of the processors meanwhile"


def test_sides_that_slow_each_other_are_foretold_only_by_the_model_that_knows() -> None:
    found = measured(pair(rest=0.004, slowed=2.0), [0.6])
    (rate,) = found.rates
    apart, shared = (
        max(abs(entry.difference) for entry in rate.compared if entry.model == model)
        for model in ("apart", "shared")
    )
    assert shared < 0.1
    assert apart > 0.25
    assert found.holds == {"apart": False, "shared": True}
    assert found.lacks


def test_processors_whose_pace_changes_are_foretold_only_by_the_model_that_was_told_of_it(
    tmp_path: Path,
) -> None:
    def slow(now: float) -> float:
        """Alone for the single requests, and then in part somebody else's, for seconds on end."""
        return 2.2 if now > 9 and now % 9 > 3 else 1.0

    made = FakePair(
        prefill=lambda n: (0.01 + n / 5000) * slow(asyncio.get_running_loop().time()),
        fetch=lambda n: 0.002 + n / 1e5,
        step=lambda batch: 0.01 + 0.002 * batch,
    )
    found = measured(made, [0.35])
    assert max(one.at + one.first for one in found.calibration.behind) < 9 < found.rates[0].at
    times = np.arange(0, 400, 0.1)
    found.pace = {
        "prefill": Pace(since=0.0, slow=[slow(float(t) + 0.05) for t in times]),
        "decode": Pace(since=0.0, slow=[1.0] * len(times)),
    }
    foretell(found)
    (rate,) = found.rates
    off = {
        model: max(abs(entry.difference) for entry in rate.compared if entry.model == model)
        for model in ("apart", "shared", "paced")
    }
    assert off["paced"] < 0.1
    assert min(off["apart"], off["shared"]) > 0.25
    assert found.holds == {"apart": False, "shared": False, "paced": True}
    assert "others have a part of the machine" in found.lacks[0]
    file = tmp_path / "run.json"
    file.write_text(json.dumps(found.to_dict()))
    assert read(file) == found
    said = Console(width=200, record=True)
    load.render(found, said)
    assert "the same work took 1.00 to 2.20 times as long as at full pace" in said.export_text()


def test_a_request_that_failed_has_waited_for_good() -> None:
    found = measured(pair(), [0.3], 50)
    (rate,) = found.rates
    counted = sorted(r.ttft for r in rate.counted)
    assert rate.ttft(50) == pytest.approx(np.percentile(counted, 50))
    assert rate.ttft(90) == pytest.approx(np.percentile(counted, 90))

    def fail(number: int) -> None:
        rate.requests[number] = msgspec.structs.replace(
            rate.requests[number], first=None, last=None, error="gone"
        )

    shortest = min(range(rate.warm_up, 50), key=lambda n: rate.requests[n].ttft)
    fail(shortest)
    assert rate.ttft(50) >= np.percentile(counted, 50)
    foretell(found)
    assert [entry.percentile for entry in rate.compared] == [50, 90, 50, 90]
    assert found.lacks[0] == "30%: 1 of 50 requests failed: never answered"
    for number in range(10, 20):
        fail(number)
    foretell(found)
    assert [entry.percentile for entry in rate.compared] == [50, 50]
    assert not any(found.holds.values())
    for number in range(50):
        fail(number)
    foretell(found)
    assert rate.compared == []
    assert found.holds == {}


def plain(found: Measured) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(json.dumps(found.to_dict()))
    return told


def written(folder: Path, told: dict[str, Any]) -> Path:
    file = folder / "run.json"
    file.write_text(json.dumps(told))
    return file


@pytest.fixture(scope="module")
def small() -> Measured:
    return measured(pair(rest=0.004), [0.3], 30)


def test_what_was_written_is_read_back_and_can_be_foretold_anew(
    small: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = plain(small)
    assert told["holds"]["apart"] in (True, False)
    assert told["rates"][0]["compared"][0].keys() == {
        *("model", "percentile", "measured", "predicted", "difference", "within")
    }
    file = written(tmp_path, told)
    assert read(file) == small
    done = CliRunner().invoke(cli, ["bench", "serving", "--again", str(file)], env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "side by side" in done.output
    assert "shared" in done.output
    done = CliRunner().invoke(cli, ["bench", "serving", "--again", str(file), "--json"])
    assert json.loads(done.stdout) == {**told, "benchmark": "load", "hawk": __version__}


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        (["kind"], "other", "kind: not of this benchmark; got other; expected hawk-bench-serving"),
        (["benchmark"], "transfer", "benchmark: not a serving run: it says benchmark=transfer"),
        (["format"], 2, "format: .*got 2; expected 1"),
        (["rates", 0, "requests", 3, "due"], "soon", r"rates\[0\].requests\[3\].due|requests.*due"),
        (["rates", 0, "warm_up"], 99, r"rates\[0\].warm_up: no request is counted; got 99; expected 0..29"),
        (["rates", 0, "requests", 3, "first"], 0.0, r"requests\[3\].first: a token before its time"),
        (["rates", 0, "requests", 3, "last"], 1e-9, r"requests\[3\].first: a token before its time"),
        (["calibration", "singles"], [], "calibration.singles: nothing was measured"),
        (["calibration", "steps", 0, "seconds"], 0, r"seconds"),
        (["calibration", "beside", 0, "one", "input"], 77, r"beside\[0\].one.input: .*got 77"),
    ],
)
def test_a_file_that_is_none_is_refused_by_field(
    small: Measured, tmp_path: Path, where: list[Any], value: object, says: str
) -> None:
    told = plain(small)
    at: Any = told
    for step in where[:-1]:
        at = at[step]
    at[where[-1]] = value
    with pytest.raises(InvalidArgument, match=says):
        read(written(tmp_path, told))


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text("{")
    with pytest.raises(InvalidArgument, match="file: no JSON"):
        read(file)
