"""Tables of what else was measured: no two rows under one label, nothing told that was not seen."""

from pathlib import Path
from typing import Any

from hawk.bench.samples import of_runs
from hawk.evaluate import machines, sources, transfers
from hawk.evaluate.records import Origin, Table
from tests.unit.evaluate import made


def row(launch: str, beside: str, after: float = 0.0, part: float = 0.0, **changes: Any) -> dict[str, Any]:
    slows = {"slows": 0.01, "least": -0.0001, "most": 0.02}
    about = {"agent": "embedded", "launch": launch, "beside": beside, "seconds": 0.05}
    return about | slows | {"launching": 0.001, "after": after, "part": part} | changes


def table(*rows: dict[str, Any]) -> Table:
    size = {"tokens": 2048, "nbytes": 268_000_000, "alone": {}, "rows": list(rows)}
    tree = {"benchmark": "overlap", "machine": made.MACHINE, "device": "A GPU", "runs": 7, "sizes": [size]}
    found = machines.beside_prefill([sources.source(tree, Path("a.json"), Origin.ELSEWHERE, "a.json")])
    assert found is not None
    return found


def test_rows_that_differ_only_in_how_the_prefill_was_launched_say_so() -> None:
    found = table(row("kernels", "job", 0.004, 0.2), row("graphs", "job", 0.004, 0.2))
    head, (first, second) = found.rows()
    assert first != second
    assert [n for n, a, b in zip(head, first, second, strict=True) if a != b] == ["launch"]
    seen = dict(zip(head, first, strict=True))
    assert (seen["tokens"], seen["size_mb"], seen["part_of_job"]) == (2048, 268, 0.2)
    assert (seen["slows_percent"], seen["least_percent"], seen["most_percent"]) == (1.0, -0.01, 2.0)
    assert seen["after_ms"] == 4.0


def test_where_nothing_moves_nothing_is_left_after_it() -> None:
    found = table(row("graphs", "nothing", 0.0005), row("graphs", "told"), row("graphs", "kernels", 0.0005))
    head, rows = found.rows()
    after, part = head.index("after_ms"), head.index("part_of_job")
    assert [one[after] for one in rows] == [None, None, 0.5]
    assert [one[part] for one in rows] == [None, None, None]


def test_every_word_of_its_cells_is_explained_above_it() -> None:
    found = table(row("kernels", "job"))
    for word in ("embedded", "apart", "none", "kernels", "graphs", "nothing", "told", "job", "copies"):
        assert word in found.caption


def test_one_run_is_no_median() -> None:
    assert of_runs(1, ", with the slowest") == "one run"
    assert of_runs(3, ", with the slowest") == "the median of 3 runs, with the slowest"
    for runs, said in ((1, "One run of each, "), (5, "Median of 5 with ")):
        source = sources.source(made.between(runs=runs), Path("a.json"), Origin.ELSEWHERE, "a.json")
        assert said in transfers.latency(source, "figure-9", "Figure 9").caption
