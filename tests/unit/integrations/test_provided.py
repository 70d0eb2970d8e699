"""An engine whose cache is in an NPU's channels: a function provides it, and vLLM's tensors stay as they are."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hawk
from hawk.errors import ConfigError, HawkError, InvalidArgument, RegistrationFailed
from hawk.integrations.books import FetchOrder
from hawk.integrations.engine import Engine
from hawk.integrations.provided import Wanted, find, register
from hawk.integrations.settings import read_settings
from hawk.plan.part import Part
from tests import fake_vllm
from tests.reference import tenstorrent
from tests.unit.integrations.test_connector import PROMPT, extra, prefill, rows, steps
from tests.unit.integrations.test_engine import until

HERE = "tests.unit.integrations.test_provided"
NPU = {"kind": "emulated-npu", "capacity": "4MiB", "channels": 7}
WANTED = Wanted(
    names=("a", "b"), heads=2, dim=8, kvs=2, block_size=16, blocks=8, part=Part.of(2, 2), given={"a": 1}
)
MADE: list[tuple[hawk.Cache, Wanted]] = []


async def in_channels(client: hawk.Client, wanted: Wanted) -> hawk.Cache:
    """As a platform's: tiles in memory of the agent, in blocks as large as the options say."""
    spec = wanted.spec("tenstorrent/kv", codec="bf16", block_size=wanted.options.get("block", 0))
    made = await client.allocate(spec, memory="npu0")
    for channel in made.channels:
        channel[:] = 0xEE
    MADE.append((made, wanted))
    return made


async def two_blocks_short(client: hawk.Client, wanted: Wanted) -> hawk.Cache:
    return await client.allocate(wanted.spec("tenstorrent/kv", blocks=wanted.blocks - 2), memory="npu0")


async def with_other_dims(client: hawk.Client, wanted: Wanted) -> hawk.Cache:
    return await client.allocate(wanted.spec("tenstorrent/kv").replace(dim=16), memory="npu0")


async def in_blocks_that_do_not_divide(client: hawk.Client, wanted: Wanted) -> hawk.Cache:
    return await client.allocate(wanted.spec("tenstorrent/kv").replace(block_size=12), memory="npu0")


async def in_blocks_that_are_asked_for_and_do_not_divide(client: hawk.Client, wanted: Wanted) -> hawk.Cache:
    return await client.allocate(wanted.spec("tenstorrent/kv", block_size=32), memory="npu0")


async def of_another_part(client: hawk.Client, wanted: Wanted) -> hawk.Cache:
    spec = wanted.spec("tenstorrent/kv", part=Part.of(4, 2, tp_rank=1, tp_size=2))
    return await client.allocate(spec, memory="npu0")


async def of_another_client(client: hawk.Client, wanted: Wanted) -> hawk.Cache:
    async with hawk.connect(client.address) as other:
        return await other.allocate(wanted.spec("tenstorrent/kv"), memory="npu0")


async def in_memory_that_is_not_there(client: hawk.Client, wanted: Wanted) -> hawk.Cache:
    return await client.allocate(wanted.spec("tenstorrent/kv"), memory="npu7")


async def as_arrays(client: hawk.Client, wanted: Wanted) -> Any:
    return list(wanted.given.values())


async def with_a_bug(client: hawk.Client, wanted: Wanted) -> hawk.Cache:
    raise KeyError("no such chip")


@pytest.fixture
def vllm() -> Iterator[None]:
    with fake_vllm.installed():
        yield
    MADE.clear()


def decode(folder: Path, provider: str, **more: Any) -> fake_vllm.Engine:
    said = extra(folder, cache=f"{HERE}:{provider}", **more)
    said["hawk"]["memory"] = {"npu0": NPU}
    return fake_vllm.Engine("kv_consumer", engine_id="d", block=16, blocks=8, order="LBNHC", extra=said)


@contextlib.contextmanager
def pair(folder: Path, **more: Any) -> Iterator[tuple[fake_vllm.Engine, fake_vllm.Engine]]:
    from hawk.integrations.vllm import HawkConnector

    p = fake_vllm.Engine(
        "kv_producer", engine_id="p", block=4, blocks=32, order="LBHNC", extra=extra(folder, ttl="5s")
    )
    d = decode(folder, "in_channels", **more)
    dice = np.random.default_rng(4)
    for tensor in p.tensors.values():
        tensor.raw.view(np.uint16)[:] = dice.integers(0, 0x7F00, tensor.raw.size // 2)
    with contextlib.closing(p), contextlib.closing(d):
        p.start(HawkConnector)
        d.start(HawkConnector)
        yield p, d


def in_tiles(blocks: list[int], block: int) -> np.ndarray:
    """What those of the cache's blocks hold, `[layer, token, head, K and V]`, by code that is none of HAWK's."""
    ((cache, wanted),) = MADE
    layers, shape = [], (cache.layout.shape.blocks, wanted.heads, block, wanted.dim)
    for layer in range(len(wanted.names)):
        both = []
        for kv in (0, 1):
            banks = cache.buffer(layer, kv)
            count = shape[0] * wanted.heads
            raw = tenstorrent.from_channels(banks, count, 2048, 2048)
            bits = tenstorrent.unpages(raw, "bf16", shape, interleaved=kv == 0)[blocks]
            both.append((bits >> 16).astype(np.uint16).transpose(0, 2, 1, 3).reshape(-1, wanted.heads, 8))
        layers.append(np.concatenate(both, axis=-1))
    return np.stack(layers)


@pytest.mark.parametrize("block", [16, 8])
def test_a_request_goes_into_the_channels(block: int, vllm: None, short_path: Path) -> None:
    """Also where one block of the engine is two of the cache's."""
    with pair(short_path, cache_options={"block": block}) as (p, d):
        ((cache, wanted),) = MADE
        assert wanted.names == tuple(d.names)
        assert dict(wanted.given) == d.tensors
        assert (wanted.blocks, wanted.block_size) == (8, 16)
        assert cache.layout.channels == 7
        blocks = [3, 1, 4, 15, 9, 2, 6, 5, 30, 8]
        request = d.request("d", list(PROMPT), prefill(p, "p", blocks))
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (40, True)
        d.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([5, 2, 7],)), 40)
        assert steps(d, lambda r: r.finished_recving).finished_recving == {"d"}
        assert d.invalid == set()
        own = [5, 2, 7] if block == 16 else [10, 11, 4, 5, 14, 15]
        assert np.array_equal(in_tiles(own, block)[:, :40], rows(p, blocks)[:, :40])
        assert not any(tensor.raw.any() for tensor in d.tensors.values())
        assert steps(p, lambda r: r.finished_sending).finished_sending == {"p"}


@pytest.mark.parametrize("given", [{}, {"npu0": object()}])
def test_a_platform_registers_whatever_it_has(given: dict[str, Any], vllm: None, short_path: Path) -> None:
    from hawk.integrations.vllm import HawkConnector

    with contextlib.closing(decode(short_path, "in_channels")) as d:
        d.tensors = given
        d.start(HawkConnector)
        ((_, wanted),) = MADE
        assert wanted.names == tuple(d.names)
        assert dict(wanted.given) == given


def test_caches_of_strange_names_are_refused_where_nothing_else_provides_them(
    vllm: None, short_path: Path
) -> None:
    from hawk.integrations.vllm import HawkConnector

    made = fake_vllm.Engine(
        "kv_consumer", engine_id="d", block=16, blocks=8, order="LBNHC", extra=extra(short_path)
    )
    with contextlib.closing(made) as d:
        d.tensors = {}
        with pytest.raises(RegistrationFailed, match=r"kv_caches.*model\.layers\.0\.attn"):
            d.start(HawkConnector)


def test_what_is_not_needed_is_given_back_and_what_fails_is_named(vllm: None, short_path: Path) -> None:
    with pair(short_path, cache_options={"block": 8}) as (p, d):
        unneeded = d.request("a", list(PROMPT), prefill(p, "a", list(range(10))))
        assert d.finish(unneeded.request_id, [], "FINISHED_ABORTED") == (False, None)
        d.step()
        assert steps(p, lambda r: r.finished_sending).finished_sending == {"a"}
        answer = prefill(p, "b", list(range(10)))
        p.worker._engine.abandon(["b"])
        steps(p, lambda r: r.finished_sending)
        failing = d.request("b", list(PROMPT), answer)
        d.scheduler.get_num_new_matched_tokens(failing, 16)
        d.scheduler.update_state_after_alloc(failing, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 24)
        assert steps(d, lambda r: r.finished_recving).finished_recving == {"b"}
        assert d.invalid == {2, 3}


REFUSED: list[tuple[str, type[HawkError], str]] = [
    ("two_blocks_short", RegistrationFailed, r"cache\.blocks.*got.*6.*8 or more"),
    ("with_other_dims", RegistrationFailed, r"cache\.dim.*16.*8"),
    ("in_blocks_that_do_not_divide", RegistrationFailed, r"cache\.block_size.*12.*16, or a divisor"),
    (
        "in_blocks_that_are_asked_for_and_do_not_divide",
        InvalidArgument,
        r"block_size.*32.*16, or a divisor",
    ),
    ("of_another_part", RegistrationFailed, r"cache\.part"),
    ("as_arrays", RegistrationFailed, r"no cache was provided.*list"),
    ("with_a_bug", RegistrationFailed, r"failed.*no such chip"),
    ("of_another_client", InvalidArgument, r"another client"),
    ("in_memory_that_is_not_there", HawkError, r"npu7"),
    ("forgotten", ConfigError, r"extra_config\.cache.*forgotten"),
]


def test_what_is_no_cache_for_the_engine_is_refused(short_path: Path) -> None:
    said = extra(short_path)
    said["hawk"]["memory"] = {"npu0": NPU}
    with contextlib.closing(Engine(read_settings(said), name="d", role="decode")) as engine:
        engine.start()
        for provider, error, says in REFUSED:
            with pytest.raises(error, match=f"(?s){says}"):
                register(engine, find(f"{HERE}:{provider}"), WANTED, consumers=1)


def test_values_of_another_width_are_refused(vllm: None, short_path: Path) -> None:
    from hawk.integrations.vllm import HawkConnector

    with contextlib.closing(decode(short_path, "in_channels")) as d:
        d.cache.transfer_groups[0].kv_cache_spec.head_size_v = 4
        with pytest.raises(RegistrationFailed, match="another width"):
            d.start(HawkConnector)


@pytest.mark.parametrize("name", ["no.such.module:f", "hawk", "hawk:", ":f", "a b:c", "hawk:version.x"])
def test_names_that_name_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.cache"):
        find(name)


def test_options_that_nobody_reads_are_a_mistake() -> None:
    for said in ({"cache_options": {"memory": "npu0"}}, {"cache": "a:b", "cache_options": "npu0"}):
        with pytest.raises(ConfigError) as failed:
            read_settings(said)
        assert "cache_options" in str(failed.value)
    assert read_settings({"cache": "a:b", "cache_options": {"x": {"y": 1}}}).cache_options == {"x": {"y": 1}}


def test_a_cache_that_went_with_its_agent_is_not_taken_for_a_new_one(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new agent's memory is empty, and the engine's requests would decode from that."""
    monkeypatch.setattr("hawk.integrations.keeping.AGAIN", 0.02)
    said = extra(short_path)
    said["hawk"]["memory"] = {"npu0": NPU}

    async def provide(client: hawk.Client, wanted: Wanted) -> hawk.Cache:
        return await client.allocate(wanted.spec("tenstorrent/kv"), memory="npu0")

    def agent() -> Engine:
        """One with nothing to do: its agent is what the other engine is beside."""
        made = Engine(read_settings(said), name="d", role="decode")
        made.start()
        return made

    beside = Engine(read_settings({"agent": f"ipc://{short_path}/d.sock"}), name="d", role="decode")
    with contextlib.closing(agent()) as first, contextlib.closing(beside):
        beside.start()
        register(beside, provide, WANTED, consumers=1)
        (keeper,) = beside._line._tasks
        over = threading.Event()
        beside._line.loop.call_soon_threadsafe(keeper.add_done_callback, lambda _: over.set())
        first.close()
        with contextlib.closing(agent()):
            assert over.wait(30)
            assert beside.client is not None
            order = FetchOrder("r", ("t",), (1,), 0, 4, "")
            beside.fetch(order)
            assert until(beside, lambda e: bool(e.arrived)).failed == {"r": (1,)}
