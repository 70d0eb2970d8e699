"""The benchmark's arithmetic, and that it notices bytes that are wrong and sizes that do not fit."""

import numpy as np
import pytest

from hawk.bench import bytes_alone, transfer
from hawk.bench.samples import Samples, ratio
from hawk.bench.whole_job import WholeJob
from hawk.errors import InternalError, InvalidArgument


def test_samples() -> None:
    samples = Samples(2_000_000_000, [1.0, 4.0, 2.0])
    assert samples.median == 2.0
    assert samples.rate == 1e9
    assert samples.told() == ("1.00", "0.50", "2.00")
    told = samples.to_dict()
    assert (told["fastest"], told["slowest"]) == (1.0, 4.0)
    assert (told["gb_per_s_most"], told["gb_per_s_least"]) == (2.0, 0.5)


def test_a_ratio_compares_runs_that_followed_each_other() -> None:
    # The machine became three times slower half-way; medians of either side alone would say something else.
    baseline = Samples(10, [1.0, 1.0, 3.0, 3.0, 3.0])
    measured = Samples(10, [2.0, 2.0, 6.0, 6.0, 6.0])
    assert ratio(measured, baseline) == pytest.approx(0.5)
    assert ratio(Samples(5, [1.0]), Samples(10, [1.0])) == pytest.approx(0.5)


def test_a_job_beside_its_parts() -> None:
    job = WholeJob(
        "tcp",
        "direct",
        Samples(100, [3.0]),
        phases={"connect": 0.1, "accept": 0.2, "read": 2.0, "release": 0.3, "client": 0.4},
        parts={"plan": 9.0, "retile": 1.0, "read": 3.0, "finish": 0.0},
    )
    assert job.control == pytest.approx(1.0)
    assert job.parts_sum == 4.0
    assert job.over_sum == 0.75
    assert job.over_largest == 1.0


def test_every_word_of_the_source_is_different() -> None:
    array = np.zeros(1 << 20, np.uint8)
    bytes_alone.scramble(array)
    assert len(np.unique(array.view(np.uint64))) == len(array) // 8


@pytest.mark.parametrize("scattered", [False, True])
def test_wrong_bytes_are_noticed(scattered: bool) -> None:
    source, target = np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    bytes_alone.scramble(source)
    place = np.random.default_rng(1).permutation(len(source) // bytes_alone.PIECE)
    rows = source.reshape(-1, bytes_alone.PIECE)
    if scattered:
        target.reshape(-1, bytes_alone.PIECE)[place] = rows
    else:
        target[:] = source
    where = place if scattered else None
    bytes_alone._compare(source, target, where, "way")
    target[len(target) // 2] ^= 1
    with pytest.raises(InternalError, match="way"):
        bytes_alone._compare(source, target, where, "way")


def test_sizes_become_whole_blocks() -> None:
    block = 8 << 20
    for asked, blocks in ((1, 1), (10_000_000, 1), (80_000_000, 10), (1_280_000_000, 153)):
        assert transfer.tokens_of(asked) * (128 << 10) == blocks * block


def test_sizes_that_do_not_fit_are_left_out_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "available_memory", lambda: 1 << 20)
    result = transfer.run(sizes=(80_000_000,))
    assert result.sizes == []
    assert result.left_out[0][0] == 80_000_000
    assert "1 MiB are available" in result.left_out[0][1]
    left = result.to_dict()["left_out"]
    assert isinstance(left, list)
    assert left[0]["asked"] == 80_000_000


@pytest.mark.parametrize(
    ("field", "arguments"),
    [("runs", {"runs": 0}), ("sizes", {"sizes": (0,)}), ("transport", {"transports": ("x",)})],
)
def test_nonsense_is_refused(field: str, arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=field):
        transfer.run(**arguments)  # type: ignore[arg-type]
