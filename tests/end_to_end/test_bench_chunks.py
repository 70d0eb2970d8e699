"""`hawk bench chunks`: whether it works without a GPU, tells what it says and leaves nothing changed."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from hawk.bench import chunks
from hawk.errors import InvalidArgument
from hawk.jobs.gpus import Gpus
from hawk.memory import cuda_driver


def test_every_part_of_a_chunk_is_told() -> None:
    before, driver = Gpus.make, cuda_driver._known
    result = chunks.run(tokens=(128,), runs=2, chunk=4 << 20)
    assert (Gpus.make, cuda_driver._known) == (before, driver)
    told = json.loads(json.dumps(result.to_dict()))
    (size,) = told["sizes"]
    assert size["chunks"] >= 4
    assert set(size["parts"]) == {"prefill", "kernels", "decode", "reads", "planning", "others"}
    assert all(
        0 < size["parts"][name]["least"] <= size["parts"][name]["median"] for name in ("prefill", "kernels")
    )
    out = io.StringIO()
    chunks.render(result, Console(file=out, width=200))
    assert "A driver that does nothing" in out.getvalue()


def test_nothing_to_measure() -> None:
    with pytest.raises(InvalidArgument, match="nothing to measure"):
        chunks.run(tokens=(), runs=1)
