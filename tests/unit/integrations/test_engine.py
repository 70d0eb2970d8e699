"""The engine-free half of a connector: two of them in this process, with agents, and what becomes of their orders."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hawk
from hawk.errors import ConfigError, DeadlineExceeded, StillDraining
from hawk.integrations.books import Books, DropOrder, FetchOrder, OfferOrder
from hawk.integrations.engine import Engine
from hawk.integrations.orders import Ended, OfferEnd, _drained, release
from hawk.integrations.remote import Grid, Model, digest, read
from hawk.integrations.settings import read_settings

LIMIT = 30.0
MODEL = Model(heads=2, layers=3)
PROMPT = list(range(40))
SOURCE = hawk.CacheSpec(layers=3, heads=2, dim=8, block_size=4, blocks=32, layout="vllm/lbhnc")
TARGET = SOURCE.replace(layout="vllm/lbnhc", block_size=16, blocks=8)


def early(params: dict[str, object]) -> dict[str, object]:
    """What a proxy says of a transfer whose prefill is not over."""
    return {key: params[key] for key in ("transfer_id", "remote_engine_id", "remote_host", "remote_port")}


class Pair:
    """A prefill and a decode engine, their caches, and the books of both."""

    def __init__(self, folder: Path, **extra: object) -> None:
        tables = {
            "arena": {"size": "1MiB"},
            "jobs": {"chunk": "64KiB", "lease": "5s"},
            "staging": {"size": "1MiB"},
        }
        local = {"agent": {"local": f"ipc://{folder}/any.sock"}}
        settings = read_settings({"hawk": {**tables, **local}, "timeout": "20s", **extra})
        self.p = Engine(settings, name="p", role="prefill")
        self.d = Engine(settings, name="d", role="decode")
        self.books = Books("p", MODEL, Grid())
        self.wants = Books("d", MODEL, Grid())

    def start(self, source: hawk.KVCache, target: hawk.KVCache) -> None:
        self.source, self.target = source, target
        self.p.start()
        self.d.start()
        self.p.register(source)
        self.d.register(target)
        self.books.workers = [self.p.worker]

    def prefill(self, key: str, blocks: list[int]) -> tuple[OfferOrder, dict[str, object]]:
        """The order of a request that is prefilled in one step, and what is said to the other side."""
        self.books.prefill(key, {"do_remote_decode": True}, len(PROMPT), digest(PROMPT))
        self.books.scheduled(key, blocks, anew=True, end=len(PROMPT))
        (order,) = self.books.take().offers
        held, params = self.books.finished(key, [blocks], well=True)
        assert held
        assert params is not None
        return order, params

    def order(self, key: str, params: dict[str, object], blocks: list[int], first: int = 0) -> FetchOrder:
        prompt = digest(PROMPT)
        external = self.wants.matched(key, params, len(PROMPT), first, prompt)
        self.wants.allocated(key, params, blocks, len(PROMPT), external, prompt)
        (order,) = self.wants.take().fetches
        return order

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.fixture
def pair(short_path: Path) -> Iterator[Pair]:
    made = Pair(short_path)
    made.start(*caches())
    yield made
    made.close()


def caches() -> tuple[hawk.KVCache, hawk.KVCache]:
    dice = np.random.default_rng(5)
    source = [dice.integers(0, 256, n, np.uint8) for n in SOURCE.compile().buffer_bytes]
    target = [np.full(n, 0xEE, np.uint8) for n in TARGET.compile().buffer_bytes]
    return hawk.KVCache.from_numpy(source, SOURCE), hawk.KVCache.from_numpy(target, TARGET)


def rows(cache: hawk.KVCache, blocks: list[int]) -> np.ndarray:
    """What tokens of these blocks are, `[layer, token, head, kv and dim]`."""
    spec = cache.spec
    shape = {
        "vllm/lbhnc": (spec.blocks, 2, spec.block_size, 16),
        "vllm/lbnhc": (spec.blocks, spec.block_size, 2, 16),
    }[str(spec.layout)]
    found = np.stack([buffer.view(np.uint16).reshape(shape)[blocks] for buffer in cache.buffers])
    if str(spec.layout) == "vllm/lbhnc":
        found = found.transpose(0, 1, 3, 2, 4)
    return found.reshape(3, -1, 2, 16)


def until(engine: Engine, done: Callable[[Ended], bool], *finished: str) -> Ended:
    """Asks again and again, as an engine's steps do; what has ended is added up."""
    found, limit, ask = Ended(), time.monotonic() + LIMIT, set(finished)
    while not done(found):
        assert time.monotonic() < limit, found
        now = engine.ended(ask)
        ask = set()
        found.sent |= now.sent
        found.arrived |= now.arrived
        found.failed.update(now.failed)
        found.ready.update(now.ready)
        found.why.update(now.why)
        found.offers += now.offers
    return found


def test_a_request_goes_from_blocks_to_blocks_and_both_sides_are_told(pair: Pair) -> None:
    blocks, into = [7, 3, 21, 4, 9, 11, 30, 1, 2, 5], [6, 2, 3]
    order, params = pair.prefill("r", blocks)
    pair.p.offer(order, written=3)
    pair.d.fetch(pair.order("r'", params, into))
    got = until(pair.d, lambda e: "r'" in e.arrived)
    assert got.failed == got.why == {}
    assert got.ready["r'"].note == bytes.fromhex(digest(PROMPT))
    assert np.array_equal(rows(pair.target, into)[:, :40], rows(pair.source, blocks)[:, :40])
    assert not rows(pair.target, into)[:, 40:].any()
    assert (rows(pair.target, [0, 1, 4, 5, 7]) == 0xEEEE).all()
    assert until(pair.p, lambda e: bool(e.offers)).sent == set()  # not before the engine is through with it
    assert until(pair.p, lambda e: bool(e.sent), "r").sent == {"r"}
    assert pair.p.take_stats()["consumed"] == 1
    counted = pair.d.take_stats()
    assert (counted["fetched"], counted["fetch_failed"], len(counted["fetch_seconds"])) == (1, 0, 1)
    assert pair.d.take_stats()["fetched"] == 0


def test_a_fetch_before_the_offer_and_layers_that_come_one_by_one(pair: Pair) -> None:
    blocks, into = list(range(10)), [1, 2, 3]
    order, params = pair.prefill("r", blocks)
    pair.d.fetch(pair.order("r", early(params), into))
    pair.p.offer(order, written=0)
    for layer in range(3):
        assert pair.d.ended(set()).arrived == set()
        pair.p.written(["r"], layer + 1)
    assert until(pair.d, lambda e: bool(e.arrived)).failed == {}
    assert np.array_equal(rows(pair.target, into)[:, :40], rows(pair.source, blocks)[:, :40])


def test_what_the_target_has_already_is_left_alone(pair: Pair) -> None:
    order, params = pair.prefill("r", list(range(10)))
    pair.p.offer(order, written=3)
    pair.d.fetch(pair.order("r", params, [1, 2, 3], first=16))
    until(pair.d, lambda e: bool(e.arrived))
    assert (rows(pair.target, [1]) == 0xEEEE).all()
    assert np.array_equal(rows(pair.target, [2, 3])[:, :24], rows(pair.source, list(range(10)))[:, 16:40])


def test_an_offer_that_nobody_needs_is_given_back_unread(pair: Pair) -> None:
    order, params = pair.prefill("r", list(range(10)))
    pair.p.offer(order, written=3)
    tickets = read(params, model=MODEL, tokens=40).tickets
    pair.d.drop(DropOrder("r", tickets, 40))
    until(pair.p, lambda e: bool(e.sent), "r")
    assert (rows(pair.target, list(range(8))) == 0xEEEE).all()
    assert pair.p.take_stats()["consumed"] == 1
    assert pair.d.take_stats()["dropped"] == 1


def test_a_client_that_leaves_frees_both_sides(pair: Pair) -> None:
    order, params = pair.prefill("r", list(range(10)))
    pair.p.offer(order, written=1)  # and no more: the fetch is under way until it is ended
    pair.d.fetch(pair.order("r", params, [1, 2, 3]))
    assert pair.d.ended(set()).arrived == set()
    got = until(pair.d, lambda e: bool(e.arrived), "r")
    assert got.failed == {}  # its blocks are nobody's concern any more
    assert pair.d.take_stats()["fetch_aborted"] == 1
    pair.p.written(["r"], 3)
    until(pair.p, lambda e: bool(e.sent), "r")


def test_another_prompt_is_no_match(pair: Pair) -> None:
    order, params = pair.prefill("r", list(range(10)))
    pair.p.offer(order, written=3)
    other = digest([1, *PROMPT[1:]])
    pair.wants.allocated("r", early(params), [1, 2, 3], 40, 40, other)
    (wanted,) = pair.wants.take().fetches
    pair.d.fetch(wanted)
    assert until(pair.d, lambda e: bool(e.arrived)).failed == {"r": (1, 2, 3)}
    assert pair.wants.matched("s", params, 40, 0, other) == 0
    assert pair.wants.counts["other_prompt"] == 1


def test_blocks_that_the_engine_takes_back_are_read_no_more(pair: Pair) -> None:
    order, params = pair.prefill("r", list(range(10)))
    pair.p.offer(order, written=1)
    pair.d.fetch(pair.order("r", params, [1, 2, 3], first=16))
    pair.p.withdraw(["r"])
    assert until(pair.p, lambda e: bool(e.offers)).offers == [OfferEnd("r", 0, "withdrawn")]
    for buffer in pair.source.buffers:
        buffer[:] = 0
    got = until(pair.d, lambda e: bool(e.arrived))
    assert got.failed == {"r": (2, 3)}  # block 1 was there before
    assert pair.p.ended({"r"}).sent == set()  # the engine has its blocks already
    assert pair.p.take_stats()["withdrawn"] == 1


def test_a_request_that_ended_badly_keeps_its_blocks_until_they_are_read_no_more(pair: Pair) -> None:
    order, _ = pair.prefill("r", list(range(10)))
    pair.p.offer(order, written=0)
    pair.p.abandon(["r"])
    assert until(pair.p, lambda e: bool(e.sent), "r").sent == {"r"}
    assert pair.p.take_stats()["withdrawn"] == 1


def test_an_offer_that_nobody_comes_for_ends_by_itself(short_path: Path) -> None:
    with contextlib.closing(Pair(short_path, ttl="50ms")) as pair:
        pair.start(*caches())
        order, params = pair.prefill("r", list(range(10)))
        pair.p.offer(order, written=3)
        until(pair.p, lambda e: bool(e.sent), "r")
        assert pair.p.take_stats()["expired"] == 1
        pair.d.fetch(pair.order("r", params, [1, 2, 3]))
        assert until(pair.d, lambda e: bool(e.arrived)).failed == {"r": (1, 2, 3)}


def test_hooks_never_wait_and_what_has_no_room_fails_at_once(short_path: Path) -> None:
    with contextlib.closing(Pair(short_path, queue=2, timeout="300ms")) as pair:
        pair.start(*caches())
        orders = [pair.prefill(f"r{i}", [3 * i, 3 * i + 1, 3 * i + 2] * 4) for i in range(4)]
        wants = [pair.order(f"r{i}", params, [1, 2, 3]) for i, (_, params) in enumerate(orders)]
        stands, go = threading.Event(), threading.Event()

        async def stand_still() -> None:
            stands.set()
            go.wait(LIMIT)

        for engine in (pair.p, pair.d):
            assert engine._line.loop is not None
            asyncio.run_coroutine_threadsafe(stand_still(), engine._line.loop)
            assert stands.wait(LIMIT)
            stands.clear()
        for order, _ in orders:
            pair.p.offer(order, written=0)
            pair.p.written([order.key], 3)
        for want in wants:
            pair.d.fetch(want)
        assert pair.p.ended({f"r{i}" for i in range(4)}).sent == {"r1", "r2", "r3"}
        assert pair.d.ended(set()).failed.keys() == {"r2", "r3"}
        go.set()
        until(pair.d, lambda e: {"r0", "r1"} <= e.arrived)


def test_what_cannot_be_understood_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({"ttl": "soon", "timeuot": "5s", "queue": 0})
    assert len(caught.value.problems) == 3
    assert "did you mean timeout?" in str(caught.value)


def test_an_agent_that_cannot_start_says_why(short_path: Path) -> None:
    settings = read_settings(
        {"control": "tcp://127.0.0.1:0", "hawk": {"agent": {"local": f"ipc://{short_path}/a"}}}
    )
    with pytest.raises(ConfigError, match="tcp needs security"):
        Engine(settings, name="p", role="prefill").start()


def test_an_offer_is_given_back_whatever_the_layout(short_path: Path) -> None:
    with contextlib.closing(Pair(short_path)) as pair:
        spec = SOURCE.replace(dim=32, block_size=32, blocks=2, layout="vllm/cpu-amx")
        pair.start(*(hawk.KVCache.alloc(spec) for _ in range(2)))
        order, params = pair.prefill("r", [0, 1])
        pair.p.offer(order, written=3)
        pair.d.drop(DropOrder("r", read(params, model=MODEL, tokens=40).tickets, 40))
        until(pair.p, lambda e: bool(e.sent), "r")
        assert pair.p.take_stats()["consumed"] == 1


async def test_offers_that_wait_to_be_given_back_wait_no_longer_than_a_fetch() -> None:
    scratch: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    scratch.set_result((None, asyncio.Queue()))
    full = SimpleNamespace(client=1, cache=1, scratch=scratch, settings=SimpleNamespace(timeout=0.01))
    async with asyncio.timeout(LIMIT):
        with pytest.raises(DeadlineExceeded, match="too many"):
            await release(full, ("hawk1.x",), 40)  # type: ignore[arg-type]


def test_what_stands_in_line_when_the_thread_ends_has_failed(short_path: Path) -> None:
    with contextlib.closing(Pair(short_path)) as pair:
        pair.start(*caches())
        order, params = pair.prefill("r", list(range(10)))
        wants = [pair.order(key, params, [1, 2, 3]) for key in "abc"]
        pair.d.fetch(wants[0])  # waits for the offer
        pair.p.close()
        pair.d.close()
        for want in wants[1:]:
            pair.d.fetch(want)
        pair.p.offer(order, written=3)
        assert pair.d.ended(set()).failed.keys() == {"a", "b", "c"}
        assert pair.p.ended({"r"}).sent == {"r"}


async def test_a_fetch_that_its_agent_has_not_answered_is_over_when_the_agent_says_so() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    class Job:
        job = "ab" * 16

        async def start(self) -> None:
            raise StillDraining("no answer in time")

    async def done(message: object, *, timeout: float | None) -> None:
        assert timeout is None
        asked.set()
        await answer.wait()

    async with asyncio.timeout(LIMIT):
        task = asyncio.ensure_future(_drained(SimpleNamespace(done=done), Job()))  # type: ignore[arg-type]
        await asked.wait()
        task.cancel()  # the engine ends the request meanwhile
        await asyncio.wait({task}, timeout=0.01)
        assert not task.done()
        answer.set()
        with pytest.raises(StillDraining):
            await task
