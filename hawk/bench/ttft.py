"""`hawk bench vllm`: the time to the first token, by who carries the cache from the engine that prefills.

Pairs of vLLM engines on the CPUs of this machine, half of the processors for prefill and half for decode; each pair
has another connector, and one engine has none.  All get the same prompts in turn.  The time begins when the first
engine is asked and ends when the decode engine's first token is there; no HTTP is in it.  Only the pair whose turn it
is runs, the others' processes are stopped, for an idle engine may take a processor.

Tokens that differ from what the engine alone says are an error: nothing is reported of a cache that is wrong.  Where
the decode engine computed a part of the prompt itself, in boxes of another size, 16-bit numbers round apart; then only
the first token has to be the same, and answers that go on otherwise are counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hawk.bench.ttft_process import ROOT, START, Process
from hawk.bench.ttft_result import Result, Way, render
from hawk.errors import InternalError, InvalidArgument, MissingDependency

__all__ = ["render", "run"]

LENGTHS = (64, 512, 2048)
TOKENS = 8
"""Tokens that are compared."""

BLOCK = 128
SHAPE = {
    "vocabulary": 1024,
    "width": 1024,
    "inner": 2048,
    "layers": 4,
    "heads": 8,
    "kv_heads": 8,
    "dim": 128,
}
"""KV heads and width of head of a model of 8 billion weights, in few layers."""


def hawk_pair(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both engines are told, of HAWK."""
    more = {
        "kv_connector": "HawkConnector",
        "kv_connector_module_path": "hawk.integrations.vllm",
        "kv_connector_extra_config": {
            "layerwise": True,
            "hawk": {"agent": {"local": f"ipc://{folder}/any.sock"}},
        },
    }
    return (
        {**more, "kv_role": "kv_producer", "engine_id": "bench-p"},
        {**more, "kv_role": "kv_consumer", "engine_id": "bench-d"},
    )


def example_pair(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of vLLM's own example, which goes by files: here in memory."""
    more = {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "files")},
    }
    return {**more, "kv_role": "kv_producer"}, {**more, "kv_role": "kv_consumer"}


def nixl_pair(_: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of vLLM's NIXL connector."""
    more = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
    return (
        {**more, "kv_role": "kv_producer", "engine_id": "bench-np"},
        {**more, "kv_role": "kv_consumer", "engine_id": "bench-nd"},
    )


PAIRS = {"hawk": hawk_pair, "example": example_pair, "nixl": nixl_pair}
OURS = ("alone", "hawk", "hawk-early")
"""Ways whose failure ends the benchmark; others are left out from then on, with what happened."""

WAYS = {"alone": "", "hawk": "hawk", "hawk-early": "hawk", "example": "example", "nixl": "nixl"}


class Bench:
    """The engines, and the questions."""

    def __init__(self, dice: random.Random, files: Path | None = None) -> None:
        self.files = files
        self.pairs: dict[str, tuple[Process, ...]] = {}
        self.place: dict[str, Any] = {}
        self._dice = dice
        self._number = 0

    def sweep(self) -> None:
        """Files of the example that nobody needs any more: they are memory."""
        if self.files is not None:
            shutil.rmtree(self.files)
            self.files.mkdir()

    def prompt(self, length: int) -> list[int]:
        """One that nobody has seen."""
        return [self._dice.randrange(4, SHAPE["vocabulary"]) for _ in range(length)]

    def measure(self, way: str, prompt: list[int]) -> tuple[float, dict[str, Any]]:
        """Seconds to the first token, and the decode engine's answer."""
        engines = self.pairs[WAYS[way]]
        self._number += 1
        key = f"request-{self._number}"
        began = time.monotonic()
        if way == "alone":
            engines[0].send(key, prompt, TOKENS, None)
            answer = engines[0].answer()
            return answer["first"] - began, answer
        first, second = engines
        if way == "hawk-early":
            name = f"{self._dice.getrandbits(128):032x}"
            first.send(key, prompt, 1, {"do_remote_decode": True, "transfer_id": name})
            second.send(key, prompt, TOKENS, {"do_remote_prefill": True, "transfer_id": name, **self.place})
            first.answer()
        else:
            first.send(key, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
            params = first.answer()["params"]
            if params:
                params.pop("remote_prefill_cached_tokens", None)
                place = ("remote_engine_id", "remote_host", "remote_port")
                self.place = {word: params[word] for word in place} if way == "hawk" else self.place
            second.send(key, prompt, TOKENS, params)
        answer = second.answer()
        return answer["first"] - began, answer


def halves() -> tuple[frozenset[int], frozenset[int]]:
    """Processors for prefill and for decode."""
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        raise InvalidArgument(
            "a pair of engines needs two processors", field="processors", got=len(mine), expected="2"
        )
    middle = len(mine) // 2
    return frozenset(mine[:middle]), frozenset(mine[middle : 2 * middle])


def find_python(given: str) -> Path:
    """The Python that has vLLM; raises `MissingDependency`."""
    python = Path(given or os.environ.get("HAWK_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    if not python.exists():
        raise MissingDependency(
            "no Python with vLLM",
            field="--python",
            got=str(python),
            expected="one that has vLLM and what HAWK needs",
            hint="`scripts/bench vllm` makes one in the clone",
        )
    return python


def without(python: Path, ways: Sequence[str]) -> dict[str, str]:
    """Ways that cannot be measured here, and why."""
    left_out = {}
    if "nixl" in ways:
        done = subprocess.run(
            [python, "-c", "from nixl._api import nixl_agent"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            left_out["nixl"] = lines[-1] if lines else "nixl is not there"
    return left_out


@contextlib.contextmanager
def _started(python: Path, ways: Sequence[str], longest: int, dtype: str) -> Iterator[Bench]:
    prefill, decode = halves()
    with (
        tempfile.TemporaryDirectory(prefix="hawk-ttft-", dir=_memory()) as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        (folder / "files").mkdir()
        shape = folder / "shape.json"
        shape.write_text(json.dumps(SHAPE))
        made = subprocess.run(
            [python, "-m", "hawk.bench.ttft_engine", "--model", folder / "model", shape],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            raise InternalError("no model was made", reason=made.stderr[-2000:])
        bench = Bench(random.Random(7), folder / "files")
        base = {"model": str(folder / "model"), "dtype": dtype, "block": BLOCK, "longest": longest}
        base["blocks"] = 4 * -(-longest // BLOCK)
        for kind in dict.fromkeys(WAYS[way] for way in ways):
            told = PAIRS[kind](folder) if kind else (None,)
            engines = []
            for number, transfer in enumerate(told):
                process = Process(
                    f"{kind or 'alone'}-{number}",
                    python,
                    folder,
                    {**base, "transfer": transfer},
                    decode if number else prefill,
                    {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(_port())} if kind == "nixl" else {},
                )
                engines.append(stack.enter_context(process))
            for process in engines:
                process.answer(START)
            for process in engines:
                process.stop()
            bench.pairs[kind] = tuple(engines)
        yield bench


def _memory() -> str | None:
    """A folder in memory, where there is one: the example's files are not to wait for a disk."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(
    *,
    python: str = "",
    lengths: Sequence[int] = LENGTHS,
    ways: Sequence[str] = tuple(WAYS),
    runs: int = 5,
    dtype: str = "bfloat16",
    quick: bool = False,
) -> Result:
    """Measures `runs` prompts of each length by each way, in turn.

    Raises `MissingDependency` without vLLM, `InvalidArgument` for a way that is none or a machine with one processor,
    `InternalError` with an engine's log, or where a way's tokens are others than the engine's alone.
    """
    for way in ways:
        if way not in WAYS:
            raise InvalidArgument("no such way", field="--way", got=way, expected=", ".join(WAYS))
    lengths, runs = (tuple(lengths)[:1], 1) if quick else (tuple(lengths), runs)
    found = find_python(python)
    left_out = without(found, ways)
    asked = ["alone", *(way for way in ways if way != "alone" and way not in left_out)]
    if "hawk-early" in asked and "hawk" not in asked:
        asked.insert(1, "hawk")  # from whose answers an early fetch knows where to go
    result = Result([Way(way) for way in asked], list(lengths), SHAPE, dtype, BLOCK, left_out)
    # What follows a prompt of the longest length has its place, too.
    with _started(found, asked, max(lengths) + BLOCK, dtype) as bench:
        for number in range(runs):
            prompts = {length: bench.prompt(length) for length in lengths}
            expected: dict[int, list[int]] = {}
            turn = asked[1:]
            turn = turn[number % len(turn) :] + turn[: number % len(turn)] if turn else []
            for way in ["alone", *turn]:
                if way in result.left_out:
                    continue
                try:
                    _turn(bench, way, prompts, expected, result)
                except InternalError as fault:
                    if way in OURS:
                        raise
                    result.leave_out(way, str(fault))
    return result


def _turn(
    bench: Bench,
    way: str,
    prompts: dict[int, list[int]],
    expected: dict[int, list[int]],
    result: Result,
) -> None:
    engines = bench.pairs[WAYS[way]]
    for process in engines:
        process.go_on()
    try:
        if way == "hawk-early" and not bench.place:
            bench.measure("hawk", bench.prompt(BLOCK))
        for length in prompts:  # not measured: connections that a stop has cost, and memory that is new
            bench.measure(way, bench.prompt(length))
        for length, prompt in prompts.items():
            seconds, answer = bench.measure(way, prompt)
            if way == "alone":
                expected[length] = answer["tokens"]
            compared = TOKENS if way == "alone" or answer["cached"] == length else 1
            if answer["reason"] == "error" or answer["tokens"][:compared] != expected[length][:compared]:
                raise InternalError(
                    "the decode engine says other tokens than one alone",
                    field=f"{way}, {length} tokens",
                    got=answer["tokens"],
                    expected=str(expected[length]),
                )
            if WAYS[way] == "hawk" and answer["cached"] != length:
                raise InternalError(
                    "the decode engine computed what was to be fetched",
                    field=f"{way}, {length} tokens",
                    got=answer["cached"],
                    expected=str(length),
                )
            result.add(
                way, length, seconds, answer["cached"] or 0, other=answer["tokens"] != expected[length]
            )
    finally:
        for process in engines:
            process.stop()
        bench.sweep()
