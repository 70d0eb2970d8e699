"""Which stretches a sample looks at, what a check is, and the threads that take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import xxhash

from hawk.jobs import verify
from hawk.jobs.verify import Verifier, checks_of, chosen
from hawk.memory.region import Segments
from hawk.plan.stretches import Stretches


def test_a_stretch_is_chosen_as_often_as_the_share_says() -> None:
    rng, count, share, jobs = np.random.default_rng(0), 37, 0.1, 4000
    times = np.zeros(count)
    for number in range(jobs):
        picked = chosen(rng.bytes(16).hex(), number % 5, count, share)
        assert len(picked) == 4  # ceil(3.7)
        assert (np.diff(picked) > 0).all()
        times[picked] += 1
    # 4 of 37 each time: a mean of 432 with a deviation of 20.
    assert abs(times - jobs * 4 / count).max() < 5 * 20


def in_plain_integers(job: str, chunk: int, count: int) -> list[int]:
    """The numbers in the order of their hash, as SplitMix64 is written down."""
    mask = (1 << 64) - 1
    seed = int(job[:16], 16) ^ int(job[16:], 16) ^ chunk * 0x9E3779B97F4A7C15 & mask

    def mixed(number: int) -> int:
        z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    return sorted(range(count), key=mixed)


def test_which_are_chosen_follows_from_job_and_chunk() -> None:
    """For good: agents of two versions have to choose alike."""
    for job, chunk in (("0123456789abcdef" * 2, 3), ("f" * 31 + "0", 65535), ("0" * 32, 0)):
        order = in_plain_integers(job, chunk, 100)
        for share, wanted in ((0.05, 5), (0.051, 6), (0.999, 100), (1.0, 100)):
            assert chosen(job, chunk, 100, share).tolist() == sorted(order[:wanted])
    assert len(chosen(job, 3, 1, 0.001)) == 1
    assert len(chosen(job, 3, 0, 0.5)) == 0


@pytest.mark.parametrize("long", [1, 1 << 20], ids=["hashed where they lie", "gathered"])
@pytest.mark.parametrize("pieces", [1, 3], ids=["in one piece", "in three"])
def test_a_check_is_the_hash_of_the_bytes_in_order(
    pieces: int, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_BATCH", 500)
    monkeypatch.setattr(verify, "_LONG", long)
    rng = np.random.default_rng(2)
    regions = [rng.integers(0, 256, 5000, np.uint8) for _ in range(3)]
    rows = [(i % 3, 97 * i, 100 * i, 60 + i) for i in range(12)]
    segments = Segments.of(rows)
    first = np.arange(0, 13, pieces)
    found = Stretches(segments, first, segments.remote[first[:-1]])
    out = np.zeros(len(found), np.uint64)
    checks_of(found, regions, out)
    for i in range(len(found)):
        whole = b"".join(regions[r][a : a + n].tobytes() for r, a, _, n in rows[first[i] : first[i + 1]])
        assert int(out[i]) == xxhash.xxh3_64_intdigest(whole)


async def test_work_that_fails_ends_all_of_it_and_raises_its_error() -> None:
    verifier = Verifier(threads=3)
    done: list[int] = []

    def work() -> Iterator[Callable[[], None]]:
        for number in range(1000):
            yield lambda number=number: done.append(number) if number != 7 else 1 // 0  # type: ignore[misc]

    with pytest.raises(ZeroDivisionError):
        await verifier.run(work())
    at = len(done)
    assert at < 999
    await verifier.run([])
    assert len(done) == at
    verifier.close()
