"""What `hawk bench vllm` makes of what engines answer; the engines themselves run by hand."""

import io
import json
import random
import sys
from typing import Any

import pytest
from rich.console import Console

from hawk.bench import ttft
from hawk.bench.ttft_result import Result, Way, render
from hawk.errors import HawkError, InternalError, InvalidArgument, MissingDependency


class Engine:
    """Answers at once, with tokens that follow from the prompt."""

    def __init__(self, shift: int = 0, cached: int | None = None) -> None:
        self.shift, self.cached = shift, cached
        self.asked: list[dict[str, Any] | None] = []
        self.running = False

    def go_on(self) -> None:
        self.running = True

    def stop(self) -> None:
        self.running = False

    def send(self, key: str, prompt: list[int], tokens: int, params: dict[str, Any] | None) -> None:
        assert self.running
        self.asked.append(params)
        said = [sum(prompt) + n for n in range(tokens)]
        self.said = {
            "first": sys.float_info.max,
            "tokens": [*said[:2], *(token + self.shift for token in said[2:])],
            "reason": "length",
            "cached": len(prompt) if self.cached is None else self.cached,
            "params": {"remote_engine_id": "p", "remote_host": "h", "remote_port": 1, "rest": 2},
        }

    def answer(self) -> dict[str, Any]:
        return self.said


def measured(decode: Engine, ways: list[str]) -> tuple[Result, Engine]:
    bench, prefill = ttft.Bench(random.Random(1)), Engine()
    bench.pairs = {"": (Engine(),), "hawk": (prefill, decode), "example": (prefill, decode)}  # type: ignore[dict-item]
    result = Result([Way(way) for way in ways], [64], ttft.SHAPE, "bfloat16", 128, {"nixl": "No module"})
    expected: dict[int, list[int]] = {}
    for way in ways:
        ttft._turn(bench, way, {64: list(range(64))}, expected, result)
    return result, decode


def test_an_early_fetch_is_told_where_to_go_and_both_sides_the_same_name() -> None:
    result, decode = measured(Engine(), ["alone", "hawk-early"])
    assert decode.asked[0] == {"remote_engine_id": "p", "remote_host": "h", "remote_port": 1, "rest": 2}
    for params in decode.asked[1:]:
        assert params is not None
        assert params["do_remote_prefill"]
        assert len(params["transfer_id"]) == 32
        assert params["remote_port"] == 1
    assert result.way("hawk-early").cached == {64: 64}
    assert result.token_bytes() == 16384
    out = io.StringIO()
    render(result, Console(file=out, width=200))
    assert "not measured: No module" in out.getvalue()
    assert json.loads(json.dumps(result.to_dict()))["ways"]["hawk-early"]["64"]["over_alone"] == 0.0


def test_other_tokens_are_an_error_unless_a_part_was_computed_anew() -> None:
    with pytest.raises(InternalError, match="hawk, 64 tokens: the decode engine says other tokens"):
        measured(Engine(shift=1), ["alone", "hawk"])
    result, _ = measured(Engine(shift=1, cached=0), ["alone", "example"])
    assert result.way("example").others == 1
    result.leave_out("example", "no answer in 120 s")
    assert [way.name for way in result.ways] == ["alone"]


@pytest.mark.parametrize("way", ["hawk", "hawk-early"])
def test_a_cache_that_did_not_come_is_no_time_of_hawks(way: str) -> None:
    """The decode engine has computed all of it, and its tokens are right."""
    with pytest.raises(InternalError, match=f"{way}, 64 tokens: .*fetched.*got.*0"):
        measured(Engine(cached=0), ["alone", way])


def test_a_run_in_which_less_came_shows() -> None:
    result = Result([Way("example")], [64], ttft.SHAPE, "bfloat16", 128, {})
    for cached in (64, 0, 64):
        result.add("example", 64, 1.0, cached, other=False)
    assert result.way("example").cached == {64: 0}


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"ways": ["slow"]}, InvalidArgument, "--way: no such way"),
        ({"python": "/nowhere/python"}, MissingDependency, "no Python with vLLM"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: dict[str, Any], kind: type[HawkError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        ttft.run(**options)
