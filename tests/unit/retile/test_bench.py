"""The benchmark runs, checks what it measures, and refuses wrong answers."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from hawk.bench import retile
from hawk.errors import InternalError, InvalidArgument, OutOfMemory
from hawk.retile import cpu, native


def test_a_small_run():
    result = retile.run(1, 1)
    cores = 2 if native.available() else 1
    assert len(result.rows) == cores * len(retile.CASES)
    assert all(row.seconds > 0 and row.ratio > 0 for row in result.rows)
    assert json.loads(json.dumps(result.to_dict()))["rows"][0]["case"] == retile.CASES[0][0]
    out = io.StringIO()
    retile.render(result, Console(file=out, width=120))
    assert "np.copyto" in out.getvalue()


def test_wrong_bytes_are_no_result(monkeypatch):
    right = cpu.run

    def wrong(program, pieces, src, dst, **kw):
        right(program, pieces, src, dst, **kw)
        dst[3][0] ^= 1

    monkeypatch.setattr(cpu, "run", wrong)
    with pytest.raises(InternalError, match="a conversion is wrong"):
        retile.run(1, 1)
    with pytest.raises(InvalidArgument):
        retile.run(0)


def test_a_size_without_room_is_refused_before_anything_is_touched(monkeypatch):
    monkeypatch.setattr(retile, "available_memory", lambda: 1 << 30)
    monkeypatch.setattr(retile, "_aligned", lambda nbytes: pytest.fail("allocated"))
    with pytest.raises(OutOfMemory) as caught:
        retile.run(1 << 20)
    assert caught.value.field == "size_mb"
    assert caught.value.facts == {"asked": str(8 << 40), "available": str(1 << 30)}


def test_a_core_that_was_forced_is_not_announced(monkeypatch):
    said = []
    monkeypatch.setattr(native, "announce", said.append)
    with native.using("numpy"):
        assert native.core_name() == "numpy"
    assert said == []
    monkeypatch.setenv("HAWK_CORE", "numpy")
    assert native.core_name() == "numpy"
    assert said == ["HAWK_CORE=numpy asks for it"]
