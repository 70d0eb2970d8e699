"""The paper's numbers beside the simulated ones."""

from __future__ import annotations

import pytest

from hawk.evaluate import beside, paper
from tests.unit.evaluate import made


def test_every_number_of_the_papers_text_has_its_row() -> None:
    found = beside.compared(made.simulated())
    count = (
        2 * len(paper.FIGURE_9)
        + 2
        + len(paper.KNEES)
        + len(paper.THROUGHPUT)
        + len(paper.TABLE_8)
        + len(paper.TABLE_9)
    )
    assert len(found) == count
    assert all(one.where for one in found)
    assert len({(one.what, one.workload) for one in found}) == count


def test_a_knee_that_is_in_neither_agrees_and_one_in_one_of_them_does_not() -> None:
    found = made.simulated()
    rows = {(c.what, c.workload): c for c in beside.compared(found)}
    key = "rate of GN-Host at 90 % attainment", "chatbot"
    assert rows[key].agrees.startswith("agrees")
    found.knees["chatbot", "gn-host"] = found.knees["chatbot", "gg-host"]
    assert {(c.what, c.workload): c for c in beside.compared(found)}[key].agrees.startswith("differs")


def test_ratios_are_those_of_the_knees() -> None:
    found = made.simulated()
    table = beside.efficiency(found, 8)
    (row,) = [r for r in table.body if r[:2] == ("chatbot", "cost efficiency")]
    theirs, ours, ratio, printed, difference = (float(cell or 0.0) for cell in row[3:])
    assert ratio == pytest.approx(9e4 / 5e4)  # the same output, for the price of either
    assert ours == pytest.approx(ratio * theirs)
    assert printed == 1.72
    assert difference == pytest.approx(100 * (ratio / 1.72 - 1))


def test_without_a_knee_there_is_no_ratio() -> None:
    found = made.simulated()
    found.knees["chatbot", "gn-hawk"] = None
    for row in beside.efficiency(found, 9).body:
        if row[0] == "chatbot":
            assert row[4] is row[5] is None
    assert any(row[0] == "summarization" and row[5] for row in beside.efficiency(found, 9).body)


def test_what_does_not_fit_is_said() -> None:
    found = made.simulated(quick=False)
    sentence, far = beside.verdict(found)
    free = [c for c in beside.compared(found) if not c.used]
    assert f"{sum(c.near for c in free)} of {len(free)} numbers" in sentence
    assert f"{len(paper.SOLVED_FROM)} more were used" in sentence
    assert not any("GN-Host at 90 %" in line for line in far)  # never in both
    found.knees["chatbot", "gn-host"] = found.knees["chatbot", "gg-host"]
    assert any("GN-Host at 90 % attainment, chatbot" in line for line in beside.verdict(found)[1])


def test_the_order_is_held_against_the_papers() -> None:
    found = made.simulated()
    assert all(row[3] == "yes" for row in beside.order(found).body)
    # GG-Host quicker than GG-Direct: not as in the paper.
    for at, run in enumerate(found.runs):
        if run.way == "gg-host":
            found.runs[at] = type(run)(**{**run.__dict__, "ttft_p90": 0.1})
    assert all(row[3] == "no" for row in beside.order(found).body)


def test_numbers_are_numbers_in_the_csv() -> None:
    table = beside.against_paper(made.simulated())
    head, rows = table.rows()
    at = {name: head.index(name) for name in ("paper", "simulated", "difference_percent")}
    numbers = [row for row in rows if "never" not in (row[at["paper"]], row[at["simulated"]])]
    assert len(numbers) > 20
    for row in numbers:
        paper_says, ours, difference = (float(row[at[name]] or 0.0) for name in at)
        assert difference == pytest.approx(100 * (ours / paper_says - 1))


def test_what_hawk_takes_beyond_the_direct_way_is_compared() -> None:
    (row,) = [c for c in beside.compared(made.simulated()) if "beyond GG-Direct" in c.what]
    assert row.paper == pytest.approx(0.65)
    assert row.simulated == pytest.approx(100 * (5.0 / 4.0 - 1))
    assert any("beyond GG-Direct" in line for line in beside.verdict(made.simulated())[1])


def test_what_the_calibration_was_solved_from_is_no_number_that_comes_out() -> None:
    found = made.simulated(quick=False)
    used = [c for c in beside.compared(found) if c.used]
    assert len(used) == len(paper.SOLVED_FROM)
    assert {c.judged for c in used} == {"solved from it"}
    before = beside.verdict(found)[0]
    found.knees["chatbot", "gg-host"] = found.knees["chatbot", "gg-direct"]  # one of these, now far off
    assert beside.verdict(found)[0] == before


def test_few_requests_judge_no_knee() -> None:
    quick, whole = made.simulated(quick=True), made.simulated(quick=False)
    coarse = [c for c in beside.compared(quick) if c.coarse]
    assert {c.what for c in beside.compared(whole)} >= {c.what for c in coarse}
    assert any("at 90 % attainment" in c.what for c in coarse)
    assert not any("latency" in c.what for c in coarse)
    assert {c.judged for c in coarse} <= {"too few requests", "solved from it"}
    assert "100 requests" in beside.verdict(quick)[0]
    assert not any("attainment" in line for line in beside.verdict(quick)[1])
    assert "coarse" in beside.against_paper(quick).caption
    assert "coarse" in beside.efficiency(quick, 8).caption
    assert "coarse" not in beside.against_paper(whole).caption
