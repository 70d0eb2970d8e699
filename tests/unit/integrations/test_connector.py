"""vLLM's hooks, called as vLLM calls them, without vLLM: what each side is told, and what is refused by name."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hawk.errors import ConfigError, MissingDependency, RegistrationFailed
from tests import fake_vllm

LIMIT = 30.0
PROMPT = list(range(100, 140))


def extra(folder: Path, **more: Any) -> dict[str, Any]:
    tables = {
        "agent": {"local": f"ipc://{folder}/any.sock"},
        "arena": {"size": "1MiB"},
        "staging": {"size": "1MiB"},
        "jobs": {"chunk": "64KiB", "lease": "5s"},
    }
    return {"hawk": tables, "timeout": "20s", **more}


@pytest.fixture
def vllm() -> Iterator[None]:
    with fake_vllm.installed():
        yield


def engine(folder: Path, role: str, **more: Any) -> fake_vllm.Engine:
    shapes = {"kv_producer": ("p", 4, "LBHNC"), "kv_consumer": ("d", 16, "LBNHC")}
    name, block, order = shapes[role]
    return fake_vllm.Engine(
        role, engine_id=name, block=block, blocks=128 // block, order=order, extra=extra(folder), **more
    )


@contextlib.contextmanager
def pair(folder: Path, **more: Any) -> Iterator[tuple[fake_vllm.Engine, fake_vllm.Engine]]:
    from hawk.integrations.vllm import HawkConnector

    p, d = engine(folder, "kv_producer"), engine(folder, "kv_consumer")
    for side in (p, d):
        side.config.kv_transfer_config.kv_connector_extra_config.update(more)
        side.start(HawkConnector)
    dice = np.random.default_rng(3)
    for tensor in p.tensors.values():
        tensor.raw[:] = dice.integers(0, 256, tensor.raw.size, np.uint8)
    try:
        yield p, d
    finally:
        p.close()
        d.close()


def rows(side: fake_vllm.Engine, blocks: list[int]) -> np.ndarray:
    """`[layer, token, head, K and V]`"""
    found = []
    for tensor in side.tensors.values():
        b, h, n, c = tensor.shape
        raw = tensor.raw.view(np.uint16)
        if side.cache.kv_cache_layout == "LBHNC":
            found.append(raw.reshape(b, h, n, c)[blocks].transpose(0, 2, 1, 3).reshape(-1, h, c))
        else:
            found.append(raw.reshape(b, n, h, c)[blocks].reshape(-1, h, c))
    return np.stack(found)


def steps(
    side: fake_vllm.Engine, until: Callable[[fake_vllm.TransferResults], object]
) -> fake_vllm.TransferResults:
    """Empty steps, as an engine takes them while something is held or awaited."""
    limit = time.monotonic() + LIMIT
    while True:
        assert time.monotonic() < limit
        results = side.step()
        if until(results):
            return results


def prefill(p: fake_vllm.Engine, key: str, blocks: list[int], **params: Any) -> dict[str, Any]:
    """In two chunks, then the request ends; what the proxy gets."""
    p.request(key, list(PROMPT), {"do_remote_decode": True, "do_remote_prefill": False, **params})
    p.step(new={key: (blocks[:4], 0, 16)})
    p.step(cached={key: (blocks[4:], 16, 24)})
    held, answer = p.finish(key, blocks)
    assert held
    assert answer is not None
    return dict(answer)


def test_a_request_moves_and_both_engines_get_their_blocks_back(vllm: None, short_path: Path) -> None:
    with pair(short_path) as (p, d):
        blocks = [3, 1, 4, 15, 9, 2, 6, 5, 30, 8]
        answer = prefill(p, "p-1", blocks)
        assert answer["do_remote_prefill"] is True
        assert answer["remote_engine_id"] == "p"
        assert answer["remote_num_tokens"] == 40
        assert answer["remote_block_ids"] == [blocks]
        request = d.request("d-1", list(PROMPT), answer)
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (40, True)
        given = SimpleNamespace(get_block_ids=lambda: ([5, 2, 7],))
        d.scheduler.update_state_after_alloc(request, given, 40)
        d.scheduler.update_state_after_alloc(request, given, 0)  # as vLLM does once more when all is there
        assert steps(d, lambda r: r.finished_recving).finished_recving == {"d-1"}
        assert d.invalid == set()
        assert np.array_equal(rows(d, [5, 2, 7])[:, :40], rows(p, blocks)[:, :40])
        assert steps(p, lambda r: r.finished_sending).finished_sending == {"p-1"}
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)  # were it put back in line
        assert d.finish("d-1", [5, 2, 7]) == (False, None)
        counted = p.worker.build_kv_connector_stats().aggregate(d.worker.get_kv_connector_stats())
        assert counted.reduce()["Fetched"] == 1
        seen = d.worker.build_prom_metrics(None, None, ["engine"], {0: ["0"]})
        seen.observe(counted.data, 0)
        assert seen._counters["fetched"][0].seen == [1]


def test_layers_go_as_they_are_written(vllm: None, short_path: Path) -> None:
    with pair(short_path, layerwise=True) as (p, d):
        assert p.worker.requires_piecewise_for_cudagraph({"layerwise": True})
        assert not p.worker.requires_piecewise_for_cudagraph({})
        told = []
        written = p.worker._engine.written

        def spy(keys: list[str], layers: int) -> None:
            told.append((list(keys), layers))
            written(keys, layers)

        p.worker._engine.written = spy
        answer = prefill(p, "p", list(range(10)))
        assert told[-4:] == [(["p"], 1), (["p"], 2), (["p"], 3), (["p"], 3)]
        request = d.request("d", list(PROMPT), answer)
        d.scheduler.get_num_new_matched_tokens(request, 0)
        d.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 40)
        steps(d, lambda r: r.finished_recving)
        assert np.array_equal(rows(d, [1, 2, 3])[:, :40], rows(p, list(range(10)))[:, :40])


def test_what_the_decode_engine_has_is_not_fetched(vllm: None, short_path: Path) -> None:
    with pair(short_path) as (p, d):
        answer = prefill(p, "p", list(range(10)))
        request = d.request("d", list(PROMPT), answer)
        assert d.scheduler.get_num_new_matched_tokens(request, 32) == (8, True)
        d.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 8)
        steps(d, lambda r: r.finished_recving)
        assert not rows(d, [1, 2]).any()
        assert np.array_equal(rows(d, [3])[:, :8], rows(p, list(range(10)))[:, 32:40])


@pytest.mark.parametrize("how", ["all of it is there", "it never got room"])
def test_an_offer_that_is_not_needed_is_given_back(how: str, vllm: None, short_path: Path) -> None:
    with pair(short_path) as (p, d):
        request = d.request("d", list(PROMPT), prefill(p, "p", list(range(10))))
        if how == "all of it is there":
            assert d.scheduler.get_num_new_matched_tokens(request, 40) == (0, False)
            d.scheduler.update_state_after_alloc(
                request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 0
            )
        else:
            assert d.finish("d", [], "FINISHED_ABORTED") == (False, None)
        assert d.step().finished_recving == set()
        assert steps(p, lambda r: r.finished_sending).finished_sending == {"p"}
        assert not rows(d, list(range(8))).any()


def test_a_fetch_that_fails_names_its_blocks_in_the_step_in_which_it_ends(
    vllm: None, short_path: Path
) -> None:
    with pair(short_path, ttl="50ms") as (p, d):
        answer = prefill(p, "p", list(range(10)))
        assert steps(p, lambda r: r.finished_sending).finished_sending == {"p"}  # its time ran out
        request = d.request("d", list(PROMPT), answer)
        d.scheduler.get_num_new_matched_tokens(request, 16)
        d.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 24)
        assert steps(d, lambda r: r.finished_recving).finished_recving == {"d"}
        assert d.invalid == {2, 3}


def test_preempted_blocks_stay_held_until_they_are_read_no_more_and_are_offered_again(
    vllm: None, short_path: Path
) -> None:
    with pair(short_path) as (p, d):
        blocks = list(range(10))
        p.request("p", list(PROMPT), {"do_remote_decode": True})
        p.step(new={"p": (blocks, 0, 40)})
        assert p.pool.used() == blocks
        assert not p.scheduler.has_pending_block_frees()
        p.step(preempted={"p"})
        steps(p, lambda _: not p.pool.used())  # vLLM's own share ended with the preemption
        assert not p.scheduler.has_pending_block_frees()
        assert p.worker.get_kv_connector_stats().data["withdrawn"] == 1
        again = list(range(10, 20))
        p.step(cached={"p": (again, 0, 41)}, resumed={"p"})
        held, answer = p.finish("p", again)
        assert held
        request = d.request("d", list(PROMPT), answer)
        d.scheduler.get_num_new_matched_tokens(request, 0)
        d.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 40)
        steps(d, lambda r: r.finished_recving)
        assert d.invalid == set()
        assert np.array_equal(rows(d, [1, 2, 3])[:, :40], rows(p, again)[:, :40])
        assert steps(p, lambda r: r.finished_sending).finished_sending == {"p"}


def test_a_request_that_is_aborted_before_and_after_its_offer(vllm: None, short_path: Path) -> None:
    with pair(short_path) as (p, _):
        p.request("a", list(PROMPT), {"do_remote_decode": True})
        p.step(new={"a": (list(range(4)), 0, 16)})
        assert p.finish("a", list(range(4)), "FINISHED_ABORTED") == (False, None)
        assert p.step().finished_sending == set()
        p.request("b", list(PROMPT), {"do_remote_decode": True})
        p.step(new={"b": (list(range(10)), 0, 40)})
        assert p.finish("b", list(range(10)), "FINISHED_ABORTED") == (True, None)
        assert steps(p, lambda r: r.finished_sending).finished_sending == {"b"}


def test_a_client_that_leaves_while_it_waits(vllm: None, short_path: Path) -> None:
    with pair(short_path) as (p, d):
        where = prefill(p, "p", list(range(10)))
        early = {key: where[key] for key in ("remote_engine_id", "remote_host", "remote_port")}
        request = d.request("d", list(PROMPT), {"do_remote_prefill": True, "transfer_id": "later", **early})
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (40, True)
        d.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 40)
        d.step()
        assert d.finish("d", [1, 2, 3], "FINISHED_ABORTED") == (False, None)
        assert steps(d, lambda r: r.finished_recving).finished_recving == {"d"}
        assert d.invalid == set()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"transfer_id": 7},
        {"transfer_id": "t"},
        {"transfer_id": "t", "remote_engine_id": "p", "remote_host": "h", "remote_port": "80"},
        {"transfer_id": "t", "hawk_tickets": ["hawk1.xyz"]},
        {"transfer_id": "t", "hawk_tickets": []},
        {"transfer_id": "t", "hawk_tickets": [3]},
        {
            "transfer_id": "t",
            "remote_engine_id": "p",
            "remote_host": "h",
            "remote_port": 80,
            "tp_size": 10**9,
        },
    ],
)
def test_params_that_cannot_be_used_cost_nobody_anything(
    params: dict[str, Any], vllm: None, short_path: Path
) -> None:
    from hawk.integrations.vllm import HawkConnector

    d = engine(short_path, "kv_consumer")
    scheduler = HawkConnector(d.config, fake_vllm.Role.SCHEDULER, d.cache)
    d.scheduler = scheduler
    request = d.request("d", list(PROMPT), {"do_remote_prefill": True, **params})
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert scheduler.get_kv_connector_stats().data["bad_params"] == 1


def test_a_hook_that_fails_does_not_end_the_engine(vllm: None, short_path: Path) -> None:
    with pair(short_path) as (_, d):
        request = SimpleNamespace(
            request_id="x", kv_transfer_params={"do_remote_prefill": True}, prompt_token_ids="?"
        )
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        d.worker._engine.ended = None
        assert d.step().finished_recving == set()
        assert d.scheduler.get_kv_connector_stats().data["faults"] == 1
        assert d.worker.get_kv_connector_stats().data["faults"] == 1


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"model_config__enable_sleep_mode": True}, "sleep mode"),
        ({"parallel_config__pipeline_parallel_size": 2}, "stages of different lengths"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    change: dict[str, Any], names: str, vllm: None, short_path: Path
) -> None:
    from hawk.integrations.vllm import HawkConnector

    side = engine(short_path, "kv_producer", **change)
    with pytest.raises(RegistrationFailed, match=names):
        HawkConnector(side.config, fake_vllm.Role.SCHEDULER, side.cache)


def test_other_caches_are_refused_by_name(vllm: None, short_path: Path) -> None:
    from hawk.integrations.vllm import HawkConnector

    side = engine(short_path, "kv_producer")
    group = side.cache.transfer_groups[0]
    for groups, names in (
        ([group, group], "different caches"),
        ([SimpleNamespace(layer_names=[], kv_cache_spec=SimpleNamespace())], "caches of this kind"),
        ([SimpleNamespace(kv_cache_spec=fake_vllm.FullAttentionSpec(4, 2, sliding_window=8))], "windows"),
        ([SimpleNamespace(kv_cache_spec=fake_vllm.FullAttentionSpec(4, 2, kv_quant_mode=1))], "quantised"),
    ):
        side.cache.transfer_groups = groups
        with pytest.raises(RegistrationFailed, match=names):
            HawkConnector(side.config, fake_vllm.Role.SCHEDULER, side.cache)
    side.cache.transfer_groups = [group]
    side.config.speculative_config = object()
    with pytest.raises(RegistrationFailed, match="speculative"):
        HawkConnector(side.config, fake_vllm.Role.SCHEDULER, side.cache)
    del side.config.speculative_config
    side.config.kv_transfer_config.kv_connector_extra_config = {"layer_wise": True}
    with pytest.raises(ConfigError, match="did you mean layerwise"):
        HawkConnector(side.config, fake_vllm.Role.SCHEDULER, side.cache)


def test_strides_that_the_layout_does_not_say_are_refused(vllm: None, short_path: Path) -> None:
    from hawk.integrations.vllm import HawkConnector

    side = engine(short_path, "kv_producer")
    name = side.names[1]
    side.tensors[name] = fake_vllm.Tensor(side.tensors[name].raw, side.tensors[name].shape, "BNHC")
    with contextlib.closing(side):
        with pytest.raises(RegistrationFailed, match=r"model\.layers\.1.*LBHNC"):
            side.start(HawkConnector)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_every_layout_of_vllm_is_read_where_it_lies(order: str, vllm: None) -> None:
    from hawk.integrations.vllm.caches import read_caches
    from hawk.plan.part import Part

    layers, shape = 3, (5, 2, 4, 16)
    sizes = dict(zip("LBHNC", (layers, *shape), strict=True))
    memory = np.arange(layers * int(np.prod(shape)), dtype=np.uint16)
    box = memory.reshape([sizes[axis] for axis in order]).transpose([order.index(axis) for axis in "LBHNC"])
    tensors = {}
    for layer in range(layers):
        view = box[layer]
        tensor = fake_vllm.Tensor(view, shape)
        tensor._strides = tuple(n // 2 for n in view.strides)
        tensors[f"layers.{layer}"] = tensor
    names = sorted(tensors)
    part = Part.of(2, layers)
    kv = read_caches(
        tensors, names, layout=order, page=f"vllm/{order.lower()}", codec="bf16", kvs=2, part=part
    )
    whole = np.concatenate([buffer.view(np.uint16) for buffer in kv.buffers])
    assert np.array_equal(np.sort(whole), memory)
    compiled = kv.spec.compile()
    for layer, at, block, head, slot, dim in ((0, 0, 0, 0, 0, 0), (2, 1, 4, 1, 3, 7), (1, 1, 2, 0, 1, 5)):
        buffer, _, page, inside = compiled.locate(layer, at, head, block, slot, dim)
        assert (
            kv.buffers[buffer].view(np.uint16)[page // 2 + inside]
            == box[layer, block, head, slot, 8 * at + dim]
        )


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0"])
def test_another_version_is_refused_with_the_range(version: str) -> None:
    with fake_vllm.installed(version):
        with pytest.raises(MissingDependency, match=r"0\.32 or later, before 0\.33"):
            __import__("hawk.integrations.vllm")


def test_without_vllm_the_import_says_so() -> None:
    with pytest.raises(MissingDependency, match="vLLM is not installed"):
        __import__("hawk.integrations.vllm")
