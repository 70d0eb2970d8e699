"""The benchmark runs, checks what it measures, and refuses wrong answers."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from hawk.bench import retile, retile_cases
from hawk.errors import InternalError, InvalidArgument, OutOfMemory
from hawk.retile import cpu, native


def test_a_small_run():
    result = retile.run(1, 1, "nhd > tiles*")
    assert {row.group for row in result.rows} == {"engine to tiles", "engine to tiles, other codec"}
    assert {row.tensor for row in result.rows} == {"K", "V"}
    assert all(row.gb_per_s > 0 and row.ratio > 0 and row.numpy_gb_per_s > 0 for row in result.rows)
    told = json.loads(json.dumps(result.to_dict()))["rows"][0]
    assert told["pair"] == "nhd > tiles"
    assert told["met"] == (told["ratio"] >= told["goal"])
    out = io.StringIO()
    retile.render(result, Console(file=out, width=120))
    assert "np.copyto" in out.getvalue()
    assert "nhd > tiles:bfp8_b" in out.getvalue()


def test_every_pair_is_planned():
    """Each side compiles, each pair maps, and every row has something to do."""
    found = retile_cases.cases(1 << 20)
    assert len({(case.pair, case.group) for case in found}) == len(found) > 70
    for case in found:
        planned = retile_cases.Planned(case)
        work = planned.work()
        assert work, case.pair
        assert all(w.steps and w.read > 0 and w.written > 0 for w in work), case.pair


def test_what_matches():
    assert {case.group for case in retile_cases.cases(1 << 20, "latents")} == {
        "latents",
        "latents, other codec",
    }
    assert [case.pair for case in retile_cases.cases(1 << 20, "hnd > nz")] == ["hnd > nz"]
    with pytest.raises(InvalidArgument, match="no pair matches"):
        retile_cases.cases(1 << 20, "none such")


@pytest.mark.skipif(not native.available(), reason="the C core is not built")
def test_wrong_bytes_are_no_result(monkeypatch):
    right = cpu.run_step

    def wrong(step, regions, arena, **kw):
        right(step, regions, arena, **kw)
        if native.core_name() == "c":
            arena[step.dst_offset[3]] ^= 1

    monkeypatch.setattr(cpu, "run_step", wrong)
    with pytest.raises(InternalError, match="a conversion is wrong"):
        retile.run(1, 1, "hnd > tiles")
    with pytest.raises(InvalidArgument):
        retile.run(-1)


def test_a_size_without_room_is_refused_before_anything_is_touched(monkeypatch):
    monkeypatch.setattr(retile, "available_memory", lambda: 1 << 30)
    monkeypatch.setattr(retile, "_aligned", lambda nbytes: pytest.fail("allocated"))
    with pytest.raises(OutOfMemory) as caught:
        retile.run(1 << 20)
    assert caught.value.field == "size_mb"
    assert caught.value.facts == {"asked": str(10 << 40), "available": str(1 << 30)}


def test_a_core_that_was_forced_is_not_announced(monkeypatch):
    said = []
    monkeypatch.setattr(native, "announce", said.append)
    with native.using("numpy"):
        assert native.core_name() == "numpy"
    assert said == []
    monkeypatch.setenv("HAWK_CORE", "numpy")
    assert native.core_name() == "numpy"
    assert said == ["HAWK_CORE=numpy asks for it"]
