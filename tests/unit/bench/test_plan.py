"""The planning benchmark measures what it says, at a size that takes no time."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hawk.bench import plan
from hawk.errors import InvalidArgument


def test_every_stage_at_every_size():
    result = plan.run(tokens=512, layers=2, channels=(7, 8), runs=2)
    assert {(r.channels, r.tokens, r.stage) for r in result.rows} == {
        (c, n, stage) for c in (7, 8) for n in (64, 128, 256, 512) for stage in plan.STAGES
    }
    assert all(len(r.seconds) == 2 and min(r.seconds) > 0 for r in result.rows)
    by_size = {(r.channels, r.tokens): r.segments for r in result.rows}
    # Scattered blocks: a run for each block and channel, in each of two layers, K and V.
    assert 0.5 * 8 * 8 * 4 < by_size[8, 512] <= 8 * 8 * 4
    rows = result.to_dict()["rows"]
    assert all(r["fastest"] <= r["median"] <= r["slowest"] for r in rows)
    assert all(0 <= r["cpu_least"] <= r["cpu_median"] for r in rows)
    out = io.StringIO()
    plan.render(result, Console(file=out, width=200))
    assert "shape never seen" in out.getvalue()
    assert "per 1,000 segments" in out.getvalue()
    assert "processor, least" in out.getvalue()


@pytest.mark.parametrize("wrong", [{"tokens": 7}, {"layers": 1}, {"runs": 0}])
def test_too_small(wrong):
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        plan.run(**wrong)
