"""The verbs benchmark measures what it says, over a device without hardware."""

import io

import pytest
from rich.console import Console

from hawk.bench import verbs
from hawk.errors import InvalidArgument
from hawk.transports.verbs.testing import FakeDriver


def test_every_stage_and_every_size() -> None:
    result = verbs.run(segments=2000, runs=2, mebibytes=1, driver=FakeDriver())
    stages = set(verbs.STAGES) - set(result.left_out)
    wanted = {(k, w, s) for k in verbs.KINDS for w in verbs.WAYS for s in stages}
    assert {(r.kind, r.way, r.stage) for r in result.rows} == wanted
    assert {"build", "address"} <= stages
    pushed = {r.kind: r.requests for r in result.rows if (r.stage, r.way) == ("build", "push")}
    assert all(2000 / 30 <= count < 2000 / 20 for count in pushed.values()), (
        "targets are filled, whatever the arena"
    )
    requests = {r.kind: r.requests for r in result.rows if (r.stage, r.way) == ("build", "pull")}
    # Apart, each is a request of its own; together, 30 share one, but for where a half message or a batch ends.
    assert requests["apart"] == 2000
    assert 2000 / 30 <= requests["together"] < 2000 / 25
    assert all(len(r.seconds) == 2 and min(r.seconds) > 0 for r in result.rows)
    assert [(r.size, r.way) for r in result.rates] == [(s, w) for s in verbs.SIZES for w in verbs.WAYS]
    assert set(result.to_dict()) == {"rows", "rates", "left_out"}
    out = io.StringIO()
    verbs.render(result, Console(file=out, width=120))
    assert "ns/request" in out.getvalue()
    assert "CPU s/GiB" in out.getvalue()


@pytest.mark.parametrize("wrong", [{"segments": 7}, {"runs": 0}, {"mebibytes": 0}])
def test_too_few(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        verbs.run(**wrong)
