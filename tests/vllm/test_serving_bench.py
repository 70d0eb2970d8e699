"""`hawk bench serving` on a real pair, in small: how well it is foretold is not judged."""

import json
from pathlib import Path

import pytest

from hawk.bench import load
from hawk.bench.load_pace import GRAIN
from hawk.bench.load_result import read
from tests.vllm.conftest import PYTHON


@pytest.mark.timeout(1800)
def test_a_pair_under_load_is_measured_and_foretold(tmp_path: Path) -> None:
    found = load.run(python=str(PYTHON), fractions=(0.3,), requests=12, quick=True)
    (rate,) = found.rates
    assert rate.failed == [], found.logs
    assert len(rate.requests) == rate.fetched == 12
    for request in rate.requests:
        assert request.first is not None
        assert request.last is not None
        assert request.due <= request.sent <= request.first <= request.last
    calibration = found.calibration
    assert calibration.lengths() == list(load.SINGLES)
    assert [step.batch for step in calibration.steps] == list(load.BATCHES)
    assert {entry.batch for entry in calibration.beside} == {1, 2, 4}
    assert {(e.model, e.percentile) for e in rate.compared} == {
        (model, percentile) for model in ("apart", "shared", "paced") for percentile in (50, 90)
    }
    for pace in found.pace.values():
        assert min(pace.slow) >= 1
        assert pace.since < calibration.singles[0].at < rate.at < pace.since + GRAIN * len(pace.slow)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(found.to_dict()))
    assert read(file) == found
