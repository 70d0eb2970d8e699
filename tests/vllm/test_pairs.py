"""Prefill and decode engines as processes: the decode engine's tokens are those that it says alone."""

import itertools
from typing import Any

import pytest

from tests.end_to_end.harness import Site
from tests.vllm.conftest import EngineProcess, Fleet, transfer
from tests.vllm.model import prompts

pytestmark = pytest.mark.timeout(1800)

SEEDS = {5: 534, 40: 106, 128: 26, 129: 115, 300: 6}
"""Prompts (by length) at whose every token the best leads by more than 16-bit numbers round off."""

TOKENS = 24
NUMBERS = itertools.count()


def prompt(length: int) -> list[int]:
    return prompts((length,), SEEDS[length])[0]


def alone(engine: EngineProcess, asked: list[list[int]]) -> list[list[int]]:
    """What the engine says without anybody else."""
    keys = [f"alone-{next(NUMBERS)}" for _ in asked]
    for key, one in zip(keys, asked, strict=True):
        engine("add", key=key, prompt=one, tokens=TOKENS)
    found = engine("run", keys=keys)
    return [found[key]["tokens"] for key in keys]


def prefilled(engine: EngineProcess, asked: list[list[int]], **params: Any) -> list[dict[str, Any]]:
    """What a prefill engine answers to the proxy, one at a time in line."""
    keys = [f"prefill-{next(NUMBERS)}" for _ in asked]
    for key, one in zip(keys, asked, strict=True):
        engine("add", key=key, prompt=one, tokens=1, params={"do_remote_decode": True, **params})
    found = engine("run", keys=keys)
    answers = [found[key]["params"] for key in keys]
    for answer in answers:
        answer.pop(
            "remote_prefill_cached_tokens"
        )  # or vLLM tells the other engine's hits in place of its own
    return answers


def decoded(
    engine: EngineProcess, asked: list[list[int]], params: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    keys = [f"decode-{next(NUMBERS)}" for _ in asked]
    for key, one, there in zip(keys, asked, params, strict=True):
        engine("add", key=key, prompt=one, tokens=TOKENS, params=there)
    found = engine("run", keys=keys)
    return [found[key] for key in keys]


def spec(role: str, name: str, dtype: str, block: int, **more: Any) -> dict[str, Any]:
    chunked = {"budget": 128} if more.pop("chunked", False) else {}
    prefix = {"prefix": True} if more.pop("prefix", False) else {}
    return {"dtype": dtype, "block": block, "transfer": transfer(role, name, **more), **chunked, **prefix}


@pytest.mark.parametrize(("source", "target"), [(32, 128), (128, 32), (64, 32)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_are_those_of_one_engine_alone(fleet: Fleet, dtype: str, source: int, target: int) -> None:
    name = f"{dtype}-{source}"
    p, d = fleet.engines(
        **{
            f"p-{name}": spec("kv_producer", f"p-{name}", dtype, source, chunked=source == 32),
            f"d-{dtype}-{target}": spec("kv_consumer", f"d-{dtype}-{target}", dtype, target),
        }
    )
    asked = [prompt(length) for length in SEEDS]
    # First those that are fetched: a decode engine may never have computed a prompt by itself.
    found = decoded(d, asked, prefilled(p, asked))
    assert [one["tokens"] for one in found] == alone(d, asked)
    assert [one["cached"] for one in found] == list(SEEDS)
    assert p("idle")["usage"] == d("idle")["usage"] == 0


@pytest.mark.parametrize("how", ["zero", "roll"])
def test_a_wrong_cache_shows(fleet: Fleet, how: str) -> None:
    """The controls: were nothing moved, or the wrong thing, the test above would have to fail."""
    p, d = fleet.engines(
        **{
            "p-float32-64": spec("kv_producer", "p-float32-64", "float32", 64),
            "d-float32-32": spec("kv_consumer", "d-float32-32", "float32", 32),
        }
    )
    asked = [prompt(300)]
    there = prefilled(p, asked)
    p("spoil", how=how)
    (found,) = decoded(d, asked, there)
    assert found["cached"] == 300
    assert found["tokens"] != alone(d, asked)[0]


def test_an_early_fetch_and_a_client_that_leaves(fleet: Fleet) -> None:
    p, d = fleet.engines(
        **{
            "p-float32-64": spec("kv_producer", "p-float32-64", "float32", 64),
            "d-float32-32": spec("kv_consumer", "d-float32-32", "float32", 32),
        }
    )
    asked = [prompt(129)]
    (answer,) = prefilled(p, asked)
    where = {key: answer[key] for key in ("remote_engine_id", "remote_host", "remote_port")}
    d(
        "add",
        key="early",
        prompt=asked[0],
        tokens=TOKENS,
        params={"do_remote_prefill": True, "transfer_id": "t1", **where},
    )
    for _ in range(5):
        d("step")  # the fetch waits at the prefill engine
    prefilled(p, asked, transfer_id="t1")
    found = d("run", keys=["early"])["early"]
    assert (found["cached"], found["tokens"]) == (129, alone(d, asked)[0])
    d(
        "add",
        key="left",
        prompt=asked[0],
        tokens=TOKENS,
        params={"do_remote_prefill": True, "transfer_id": "t2", **where},
    )
    d("step")
    d("abort", key="left")
    assert d("idle")["usage"] == 0
    decoded(d, asked, [answer])  # the first one is still to be had
    assert p("idle")["usage"] == 0


def test_prefix_hits_on_both_sides(fleet: Fleet) -> None:
    p, d = fleet.engines(
        p_prefix=spec("kv_producer", "p-prefix", "float32", 32, prefix=True),
        d_prefix=spec("kv_consumer", "d-prefix", "float32", 64, prefix=True),
    )
    first, other = prompt(300), prompt(128)
    asked = [first[:200] + other]  # 192 tokens of it are whole blocks on either side
    expected = alone(d, asked)[0]
    d("forget")
    decoded(d, [first], prefilled(p, [first]))
    (answer,) = prefilled(p, asked)
    before = d("counts")["vllm:hawk_fetch_bytes_sum"]
    (found,) = decoded(d, asked, [answer])
    assert found["tokens"] == expected
    row = 4 * 2 * 4 * 64 * 4  # bytes of one token: layers, K and V, heads, dims of fp32
    blocks = -(-328 // 64) - 192 // 64  # those that it lacked; the rest of the last one is zeros, which count
    assert d("counts")["vllm:hawk_fetch_bytes_sum"] - before == blocks * 64 * row
    (again,) = decoded(d, [first], prefilled(p, [first]))  # all its whole blocks are there
    assert again["cached"] == 300
    assert p("idle")["usage"] == d("idle")["usage"] == 0


def test_agents_beside_the_engines(fleet: Fleet) -> None:
    site = Site()
    try:
        big = {"jobs": {"chunk": "1MiB"}}
        agents = {
            name: site.start(name, big, role=role) for name, role in (("p0", "prefill"), ("d0", "decode"))
        }
        beside = {name: agent.local for name, agent in agents.items()}
        p, d = fleet.engines(
            p_beside=spec("kv_producer", "p-beside", "float32", 64, agent=beside["p0"], layerwise=True),
            d_beside=spec("kv_consumer", "d-beside", "float32", 32, agent=beside["d0"]),
        )
        asked = [prompt(129), prompt(300)]
        expected = alone(d, asked)
        found = decoded(d, asked, prefilled(p, asked))
        told = "\n".join(agent.log()[-3000:] for agent in agents.values())
        assert [one["tokens"] for one in found] == expected, told
        assert [one["cached"] for one in found] == [129, 300]
        assert p("idle")["usage"] == d("idle")["usage"] == 0
        fleet.forget("p_beside")
        fleet.forget("d_beside")
    finally:
        site.close()


def test_two_workers_prefill_for_one(fleet: Fleet) -> None:
    p, d = fleet.engines(
        p_two={**spec("kv_producer", "p-two", "float32", 64, decode_tp=1), "tp": 2},
        d_one=spec("kv_consumer", "d-one", "float32", 32),
    )
    asked = [prompt(129), prompt(300)]
    expected = alone(d, asked)
    found = decoded(d, asked, prefilled(p, asked))
    assert [one["tokens"] for one in found] == expected, d.log.read_text()[-2000:]
    assert [one["cached"] for one in found] == [129, 300]
    assert p("idle")["usage"] == d("idle")["usage"] == 0


def test_one_of_several_connectors(fleet: Fleet) -> None:
    """vLLM's MultiConnector: requests go through HAWK, and vLLM's example keeps prefixes in files beside it."""

    def several(role: str, name: str) -> dict[str, Any]:
        files = {"shared_storage_path": str(fleet.folder / name)}
        example = {"kv_connector": "ExampleConnector", "kv_role": role, "kv_connector_extra_config": files}
        ours = transfer(role, name)
        del ours["engine_id"]  # the children have their parent's
        return {
            "kv_connector": "MultiConnector",
            "kv_role": role,
            "engine_id": name,
            "kv_connector_extra_config": {"connectors": [example, ours]},
        }

    p, d = fleet.engines(
        p_several={"dtype": "float32", "block": 32, "transfer": several("kv_producer", "p-several")},
        d_several={"dtype": "float32", "block": 32, "transfer": several("kv_both", "d-several")},
    )
    asked = [prompt(129), prompt(300)]
    expected = alone(d, asked)  # whose whole blocks are in a file from then on
    found = decoded(d, asked[1:], prefilled(p, asked[1:]))
    assert [one["tokens"] for one in found] == expected[1:]
    assert p("idle")["usage"] == 0
    (other,) = prompts((140,), 99)
    (found,) = decoded(d, [other], prefilled(p, [other]))
    assert found["cached"] == 140
    assert [found["tokens"]] == alone(d, [other])
    assert d("counts")["vllm:hawk_fetched_total"] == 1
    assert p("idle")["usage"] == d("idle")["usage"] == 0


def test_a_prefill_engine_that_dies_in_the_middle(fleet: Fleet) -> None:
    small = {"jobs": {"chunk": "512KiB"}}
    p, fails, computes = fleet.engines(
        dies=spec("kv_producer", "p-dies", "float32", 32, layerwise=True, hawk=small),
        fails=spec("kv_consumer", "d-fails", "float32", 128, policy="fail", hawk=small),
        computes=spec("kv_consumer", "d-computes", "float32", 128, policy="recompute", hawk=small),
    )
    asked = prompt(300)
    expected = alone(computes, [asked])[0]
    (answer,) = prefilled(p, [prompt(5)])
    where = {key: answer[key] for key in ("remote_engine_id", "remote_host", "remote_port")}
    sides = {"a": fails, "b": computes}
    p("hold", layer=2)
    for key, side in sides.items():
        p("add", key=key, prompt=asked, tokens=1, params={"do_remote_decode": True, "transfer_id": key})
        params = {"do_remote_prefill": True, "transfer_id": key, **where}
        side("add", key=key, prompt=asked, tokens=TOKENS, params=params)
        side("step")
    p.send("run", keys=list(sides))  # and stands still after two layers
    for side in sides.values():
        assert side("moved", least=1) > 0
    p.kill()
    assert fails("run", keys=["a"])["a"]["reason"] == "error"
    found = computes("run", keys=["b"])["b"]
    assert found["tokens"] == expected
    assert fails("idle")["usage"] == computes("idle")["usage"] == 0
    fleet.forget("dies")
