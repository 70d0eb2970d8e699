"""Single requests in more numbers than there are lengths that are new to an engine."""

import random

import pytest

from hawk.bench.load_rates import KEPT, Rates
from tests.fake_pair import FakePair
from tests.unit.bench.test_load import run


@pytest.mark.parametrize(("longest", "length", "count", "far"), [(2048, 128, 300, KEPT // 2), (8, 5, 40, 4)])
def test_lengths_come_again_when_the_engine_has_forgotten_them(
    longest: int, length: int, count: int, far: int
) -> None:
    """However many runs there are, they stay near the length that they are counted as."""
    made = FakePair(prefill=lambda n: n / 5000, fetch=lambda n: n / 1e5, step=lambda batch: 0.01)

    async def ask() -> None:
        rates = Rates(made, 100, random.Random(1), longest)
        for _ in range(count):
            assert (await rates.single(length)).input == length

    run(ask())
    asked = [tokens for way, tokens, _ in made.asked if way != "decode"]
    assert len(asked) == count
    assert max(abs(tokens - length) for tokens in asked) <= far
    new = min(KEPT, longest)
    assert all(len(set(asked[i : i + new])) == len(asked[i : i + new]) for i in range(count))
    assert min(asked) > 0
    assert max(asked) <= longest
