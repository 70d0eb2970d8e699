"""The documented decode loop: real agents, and a stand-in for ttnn whose operations compute."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import hawk
from hawk.errors import InvalidArgument
from hawk.integrations.ttnn import HostTensors, api
from hawk.model_caches import load_cache
from tests import fake_ttnn
from tests import fake_ttnn_programs as programs
from tests.end_to_end import caches as c
from tests.end_to_end.harness import Site
from tests.end_to_end.test_other_clients import embedded
from tests.reference import tenstorrent as reference
from tests.unit.jobs.test_tenstorrent import MovingChip

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ttnn_decode.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ttnn_decode", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def attended(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`[query heads, dim]` over `[tokens, heads, dim]`, everything as Hugging Face orders it."""
    group = len(query) // keys.shape[1]
    score = np.einsum("hd,thd->ht", query, np.repeat(keys, group, axis=1)) * query.shape[1] ** -0.5
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    weight /= weight.sum(axis=1, keepdims=True)
    return np.einsum("ht,thd->hd", weight, np.repeat(values, group, axis=1))


def test_attention_over_what_was_fetched_is_that_over_the_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ttnn = fake_ttnn.install(monkeypatch)
    new: list[np.ndarray] = []
    asked: list[tuple[np.ndarray, np.ndarray]] = []
    update, attention = fake_ttnn.paged_update_cache, fake_ttnn.attention

    def updated(cache: object, given: fake_ttnn.Tensor, **more: object) -> None:
        new.append(given.data[0, 0])
        update(cache, given, **more)

    def answered(query: fake_ttnn.Tensor, *arguments: object, **more: object) -> np.ndarray:
        out = attention(query, *arguments, **more)
        asked.append((query.data[0, 0], out[0, 0]))
        return out

    monkeypatch.setattr(ttnn.experimental, "paged_update_cache", updated)
    monkeypatch.setattr(ttnn.transformer, "paged_scaled_dot_product_attention_decode", answered)
    program = example()
    program.main()
    assert "100 tokens" in capsys.readouterr().out
    assert len(asked) == 2 * program.STEPS
    with_prompt = program.prompt()
    for layer in range(2):
        pages = with_prompt.buffers[layer].view(np.uint16).reshape(2, 128, 8, 128)[:, : program.TOKENS]
        keys, values = (pages.astype(np.uint32) << 16).view(np.float32)
        for at in range(program.STEPS):
            k, v = new[4 * at + 2 * layer : 4 * at + 2 * layer + 2]
            keys = np.concatenate([keys, reference.deinterleave(k)[None]])
            values = np.concatenate([values, v[None]])
            query, out = asked[2 * at + layer]
            wanted = attended(reference.deinterleave(query), keys, values)
            # Seven bits a number, 16 of a row sharing an exponent; a K in the wrong order is off by ten times that.
            assert np.abs(out - wanted).max() < 0.06
            assert np.abs(wanted).max() > 0.3
    with_prompt.close()


async def test_an_agent_of_another_process_writes_into_host_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ttnn.install(monkeypatch)
    model = load_cache("tt_transformers/llama-3.1-8b").with_layers(2)
    source = hawk.CacheSpec(layers=2, heads=8, dim=128, block_size=16, blocks=6, layout="vllm/nhd")
    site = Site()
    try:
        jobs = {"jobs": {"chunk": "256KiB"}}
        prefill = site.start("p0", jobs, role="prefill")
        decode = site.start("d0", {"peers": {"p0": prefill.control}, **jobs}, role="decode")
        with HostTensors.for_request(model, 90) as held:
            kv = hawk.KVCache.alloc(source)
            for i, buffer in enumerate(kv.buffers):
                numbers = np.random.default_rng(i).standard_normal(buffer.size // 2).astype(np.float32)
                buffer.view(np.uint16)[:] = reference.to_bf16(numbers.view(np.uint32))
            async with hawk.connect(prefill.local) as hp, hawk.connect(decode.local) as hd:
                given, into = await hp.register(kv), await hd.register(held.kv)
                offer = await hp.offer("r", given, [3, 0, 5, 1, 2, 4], tokens=90)
                await hd.fetch(offer, into=into, blocks=held.blocks(90), timeout="20s")
                await into.release()
                await given.release()
            for layer in range(2):
                pages = kv.array(layer).view(np.uint16).reshape(2, 6, 16, 8, 128)[:, [3, 0, 5, 1, 2, 4]]
                rows = np.zeros((2, 128, 8, 128), np.uint16)
                rows[:, :90] = pages.reshape(2, 96, 8, 128)[:, :90]
                for which in range(2):
                    x = np.ascontiguousarray(rows[which].transpose(1, 0, 2)[None])
                    wanted = reference.pages(x, "bfp8_b", interleave_dim=which == 0)
                    got = api.shard_bytes(held.tensor(layer, which))
                    assert np.array_equal(got, wanted.reshape(-1))
            kv.close()
    finally:
        site.close()


def test_without_ttnn_the_example_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ttnn", None)
    with pytest.raises(SystemExit, match=r"no ttnn here .*docs/ttnn\.md"):
        example()


@pytest.mark.parametrize("measured", [True, False])
async def test_pages_arrive_in_one_stretch_a_bank_and_the_chip_moves_them(
    measured: bool, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two agents in this process; that of the decode side has a memory with a program, which is used once measured."""
    lent = programs.Programs()
    lent.install(monkeypatch)
    memory = MovingChip()
    if not measured:
        memory.move_cost = math.inf
    mode = "staged" if measured else "auto"
    async with (
        embedded(short_path, "p0") as p,
        embedded(short_path, "d0", more=f'[transport]\nmode = "{mode}"\n', memories=[memory]) as d,
    ):
        async with hawk.connect(p) as hp, hawk.connect(d) as hd:
            source = await hp.register(c.filled())
            device = await hd.allocate(c.target_spec(), memory="npu0")
            src, dst = c.tables(3, 0, 0, 200, src=c.source_spec(), dst=c.target_spec())
            offer = await hp.offer("r", source, src, tokens=200)
            ready = await hd.fetch(offer, into=device, blocks=dst, timeout="20s")
            assert source.local is not None
            banks = [region.array.copy() for region in memory.regions]  # no client maps a window
            seen = SimpleNamespace(channels=banks, offsets=device.offsets, layout=device.layout)
            moved = c.Moved(source.local, src, dst, 0, 200)
            c.check(seen, c.target_spec(), moved, guards=[seen])  # type: ignore[arg-type, list-item]
            assert ready.mode == ("staged" if measured else "direct")
            assert bool(lent.seen) == measured
    assert memory.fake.fds == []


async def test_a_memory_that_is_given_has_a_name_of_its_own(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.Programs().install(monkeypatch)
    memory = MovingChip()
    with pytest.raises(InvalidArgument, match=r"memories\[0\]\.name: .*npu0"):
        embedded(short_path, "d0", memory=True, memories=[memory])
    with pytest.raises(InvalidArgument, match=r"memories\[1\]\.name"):
        embedded(short_path, "d0", memories=[memory, memory])
    with pytest.raises(InvalidArgument, match=r"memories\[0\]: .*a memory"):
        embedded(short_path, "d0", memories=["npu0"])
    memory.close()
