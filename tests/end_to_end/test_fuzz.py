"""A few seconds of `scripts/fuzz`; docs/testing.md says what a long run saw."""

from tests.fuzz.run import run


async def test_a_few_thousand_frames_and_hundreds_of_strangers() -> None:
    figures = await run(frames=3000, connections=300, seed=4)
    assert figures.connections == 300
    assert figures.jobs > 0
