"""Decode engines whose cache is in an NPU's channels, in tiles: an ordinary engine prefills, they say its tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.harness import Site
from tests.reference import tenstorrent as ref
from tests.vllm.conftest import EngineProcess, Fleet
from tests.vllm.test_pairs import NUMBERS, SEEDS, TOKENS, prompt, spec

pytestmark = pytest.mark.timeout(1800)

BLOCKS = 64


def ordinary() -> dict[str, Any]:
    """vLLM's own attention and cache; blocks of 128 tokens."""
    return spec("kv_both", "cpu", "bfloat16", 128)


def eight() -> dict[str, Any]:
    """Eight channels, tiles of bf16, blocks of 64 as they are served; the agent inside."""
    memory = {"npu0": {"kind": "emulated-npu", "capacity": "24MiB", "channels": 8}}
    made = spec("kv_both", "npu8", "bfloat16", 64, hawk={"memory": memory}, cache_options={"codec": "bf16"})
    return {**made, "npu": True, "blocks": BLOCKS}


def seven(agent: str) -> dict[str, Any]:
    """Seven channels, tiles of block floats, blocks of 32; an agent beside."""
    made = spec("kv_both", "npu7", "bfloat16", 32, agent=agent, cache_options={"codec": "bfp8_b"})
    return {**made, "npu": True, "blocks": 2 * BLOCKS}


@pytest.fixture(scope="module")
def agent() -> Iterator[str]:
    site = Site()
    try:
        memory = {"kind": "emulated-npu", "capacity": "24MiB", "channels": 7}
        yield site.start("d0", {"memory.npu0": memory, "jobs": {"chunk": "1MiB"}}).local
    finally:
        site.close()


@pytest.fixture
def engines(fleet: Fleet, agent: str) -> Iterator[list[EngineProcess]]:
    """The three; whatever a test had them do, no page of vLLM's was written, and nothing is held."""
    p, d8, d7 = fleet.engines(cpu=ordinary(), npu8=eight(), npu7=seven(agent))
    assert (d8("npu", call="channels"), d7("npu", call="channels")) == (8, 7)
    yield [p, d8, d7]
    for d in (d8, d7):
        assert d("npu", call="untouched")
    assert [engine("idle")["usage"] for engine in (p, d8, d7)] == [0, 0, 0]


def one(
    engine: EngineProcess, asked: list[int], tokens: int, params: dict[str, Any] | None
) -> dict[str, Any]:
    """A request by itself, a prompt that is computed here in two steps: all but the last token, and that one.

    So is every row computed in the same company wherever it is, and numbers are the same to the last bit.
    """
    key = f"one-{next(NUMBERS)}"
    engine("add", key=key, prompt=asked, tokens=tokens, params=params)
    if not params or "do_remote_prefill" not in params:
        engine("step", most=len(asked) - 1)
    found: dict[str, Any] = engine("run", keys=[key])[key]
    return found


def prefilled(engine: EngineProcess, asked: list[int], **params: Any) -> dict[str, Any]:
    """What a prefill engine answers."""
    answer: dict[str, Any] = one(engine, asked, 1, {"do_remote_decode": True, **params})["params"]
    answer.pop("remote_prefill_cached_tokens")  # or vLLM tells the other engine's hits in place of its own
    return answer


def handed_over(source: EngineProcess, target: EngineProcess, length: int) -> list[int]:
    """The tokens of the second engine after the first one's prefill."""
    asked = prompt(length)
    found = one(target, asked, TOKENS, prefilled(source, asked))
    assert found["cached"] == length
    tokens: list[int] = found["tokens"]
    return tokens


def alone(engine: EngineProcess, length: int) -> list[int]:
    """An engine's tokens without anybody else."""
    tokens: list[int] = one(engine, prompt(length), TOKENS, None)["tokens"]
    return tokens


def test_from_pages_into_tiles_of_bf16(engines: list[EngineProcess]) -> None:
    """Nothing is lost on the way, so the tokens are those of the ordinary engine alone."""
    p, d8, _ = engines
    for length in SEEDS:
        assert handed_over(p, d8, length) == alone(p, length), length


def test_from_pages_into_tiles_of_block_floats(engines: list[EngineProcess], tmp_path: Path) -> None:
    """What is lost is what the NPU loses when it prefills by itself: to the last bit, and in each token."""
    p, d8, d7 = engines
    for length in SEEDS:
        assert handed_over(p, d7, length) == alone(d7, length), length
    rows = {}
    for d in (d8, d7):
        d("add", key="rows", prompt=prompt(300), tokens=2, params=prefilled(p, prompt(300)))
        blocks = d("begun", key="rows")
        # The prompt's last row is the decode engine's own: vLLM computes it again for the first token.
        d("npu", call="save", blocks=blocks, tokens=299, file=str(tmp_path / "rows.npy"))
        d("run", keys=["rows"])
        rows[d] = np.load(tmp_path / "rows.npy")
    assert rows[d8].any(axis=(3, 4)).all()
    for kv in (0, 1):
        exact = np.ascontiguousarray(rows[d8][:, kv].transpose(0, 2, 1, 3))
        coded = ref.pages(exact.view(np.uint32), "bfp8_b", kv == 0)
        bits = ref.unpages(coded, "bfp8_b", exact.shape, kv == 0)
        assert np.array_equal(bits.view(np.float32), rows[d7][:, kv].transpose(0, 2, 1, 3))
        assert not np.array_equal(exact, bits.view(np.float32))


@pytest.mark.parametrize("how", ["channels", "faces"])
def test_tiles_that_are_read_otherwise_show(engines: list[EngineProcess], how: str) -> None:
    """The controls.  A device that reads as it writes does well alone; only what came from elsewhere is wrong."""
    p, d8, d7 = engines
    for d in (d8, d7):
        expected = alone(d, 129)
        assert handed_over(p, d, 129) == expected
        d("npu", call="made", how=how)
        try:
            assert alone(d, 129) == expected
            assert handed_over(p, d, 129) != expected
        finally:
            d("npu", call="made", how="")


def test_from_tiles_into_pages_and_into_other_tiles(engines: list[EngineProcess]) -> None:
    p, d8, d7 = engines
    for length in (40, 129):
        assert handed_over(d8, p, length) == alone(p, length)
        assert handed_over(d8, d7, length) == alone(d7, length)


def test_an_early_fetch_into_tiles_and_a_client_that_leaves(engines: list[EngineProcess]) -> None:
    p, _, d7 = engines
    asked = prompt(129)
    answer = prefilled(p, asked)
    where = {key: answer[key] for key in ("remote_engine_id", "remote_host", "remote_port")}
    early = {"do_remote_prefill": True, "transfer_id": "npu-early", **where}
    d7("add", key="early", prompt=asked, tokens=TOKENS, params=early)
    for _ in range(5):
        d7("step")  # the fetch waits at the prefill engine
    prefilled(p, asked, transfer_id="npu-early")
    found = d7("run", keys=["early"])["early"]
    assert (found["cached"], found["tokens"]) == (129, alone(d7, 129))
    d7("add", key="left", prompt=asked, tokens=TOKENS, params={**early, "transfer_id": "npu-left"})
    d7("step")
    d7("abort", key="left")
    assert d7("idle")["usage"] == 0
    one(d7, asked, TOKENS, answer)  # the first one is still to be had
