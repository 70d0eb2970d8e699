"""The claim of the fragmentation bench, and what it prints."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from hawk.bench.fragmentation import render, run
from hawk.errors import InvalidArgument


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("channels", [7, 8, 12])
def test_contiguous_buffers_fail_with_bytes_free_where_channel_regions_fit(channels: int, seed: int) -> None:
    result = run(channels, seed=seed)
    assert result.claim_holds
    regions = result.scheme("per-channel")
    assert regions.failure is None
    assert regions.steps_done == result.steps
    assert regions.widest_spread == 0
    for name in ("contiguous/first", "contiguous/emptiest"):
        scheme = result.scheme(name)
        assert scheme.failure is not None
        # Enough bytes are free, over all channels, for what was asked; they do not lie where they are needed.
        assert scheme.failure.asked <= scheme.failure.free
        assert scheme.last.spread > 0
        assert scheme.failure.free == channels * result.channel_bytes - sum(scheme.last.used)
    # At the very step where the first contiguous buffer did not fit, the regions did.
    first = min(s.failure.step for s in result.schemes if s.failure is not None)
    assert result.compared is not None
    assert result.compared.step == first
    assert result.compared.spread == 0


def test_the_same_seed_gives_the_same_run_and_the_size_does_not_matter() -> None:
    assert run(8, seed=3) == run(8, seed=3)
    assert run(8, seed=3) != run(8, seed=4)
    small, large = run(8, 1 << 30), run(8)
    assert [s.failure and s.failure.step for s in small.schemes] == [
        s.failure and s.failure.step for s in large.schemes
    ]


def test_json_and_table() -> None:
    result = run(7)
    back = json.loads(json.dumps(result.to_dict()))
    assert back["claim_holds"] is True
    assert [s["name"] for s in back["schemes"]] == ["contiguous/first", "contiguous/emptiest", "per-channel"]
    assert len(back["schemes"][0]["last"]["used"]) == 7
    out = io.StringIO()
    render(result, Console(file=out, width=160))
    text = out.getvalue()
    failure = result.schemes[0].failure
    assert failure is not None
    assert f"fails at step {failure.step} of 200" in text
    assert "all 200 steps fit" in text


@pytest.mark.parametrize(("channels", "capacity"), [(1, 1 << 30), (8, 1 << 20), (0, 1 << 30)])
def test_bad_figures(channels: int, capacity: int) -> None:
    with pytest.raises(InvalidArgument):
        run(channels, capacity)
