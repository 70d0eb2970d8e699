"""Engines of several workers: each worker's agent has its part, and the other side takes what it needs of each."""

import contextlib
from pathlib import Path

import numpy as np
import pytest

import hawk
from hawk.errors import Busy, InvalidArgument
from hawk.integrations import remote
from hawk.integrations.books import Books
from hawk.integrations.engine import Engine
from hawk.integrations.remote import Grid, Model, Worker, digest
from hawk.integrations.settings import engine_name, reachable, read_settings
from tests.unit.integrations.test_engine import until

MODEL = Model(heads=4, layers=4)
PROMPT = list(range(24))
BLOCK, BLOCKS, DIM = 8, 12, 8


class Side:
    """All workers of one engine, with the whole cache's rows dealt among them."""

    def __init__(self, folder: Path, role: str, grid: Grid, other: Grid, x: np.ndarray) -> None:
        tables = {
            "agent": {"local": f"ipc://{folder}/any.sock"},
            "arena": {"size": "1MiB"},
            "staging": {"size": "1MiB"},
            "jobs": {"chunk": "64KiB"},
        }
        name = {"prefill": "p", "decode": "d"}[role]
        settings = read_settings({"hawk": tables, "timeout": "20s"})
        self.grid, self.books = grid, Books(name, MODEL, grid)
        self.engines, self.parts, self.arrays = [], [], []
        for number in range(grid.size):
            part = grid.part(MODEL, number)
            spec = hawk.CacheSpec(
                layers=len(part.layers), heads=len(part.heads), dim=DIM, block_size=BLOCK, blocks=BLOCKS,
                layout="vllm/lbnhc", codec="bf16", part=part,
            )  # fmt: skip
            held = x[part.layers.start : part.layers.stop, :, :, part.heads.start : part.heads.stop]
            arrays = [np.ascontiguousarray(layer) for layer in held]
            engine = Engine(settings, name=name, role=role, number=number, size=grid.size)
            engine.start()
            engine.register(hawk.KVCache.from_numpy(arrays, spec), consumers=part.readers(other.tp, other.pp))
            self.engines.append(engine)
            self.parts.append(part)
            self.arrays.append(arrays)
        self.books.workers = [engine.worker for engine in self.engines]

    def rows(self) -> np.ndarray:
        """The whole cache again, `[layer, block, slot, head, K and V]`."""
        x = np.zeros((MODEL.layers, BLOCKS, BLOCK, MODEL.heads, 2 * DIM), np.uint16)
        for part, arrays in zip(self.parts, self.arrays, strict=True):
            x[part.layers.start : part.layers.stop, :, :, part.heads.start : part.heads.stop] = np.stack(
                arrays
            )
        return x

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Grid(2, 1), Grid(1, 1)),
        (Grid(1, 1), Grid(2, 1)),
        (Grid(4, 1), Grid(2, 1)),
        (Grid(2, 2), Grid(1, 2)),
        (Grid(8, 1), Grid(2, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("early", [False, True])
def test_heads_and_layers_find_their_workers(
    source: Grid, target: Grid, early: bool, short_path: Path
) -> None:
    x = np.random.default_rng(1).integers(
        0, 2**16, (MODEL.layers, BLOCKS, BLOCK, MODEL.heads, 2 * DIM), np.uint16
    )
    with contextlib.ExitStack() as stack:
        p = stack.enter_context(contextlib.closing(Side(short_path, "prefill", source, target, x)))
        d = stack.enter_context(
            contextlib.closing(Side(short_path, "decode", target, source, np.zeros_like(x)))
        )
        blocks, into = [5, 0, 7], [1, 2, 3]
        p.books.prefill("r", {}, len(PROMPT), digest(PROMPT))
        p.books.scheduled("r", blocks, anew=True, end=len(PROMPT))
        (order,) = p.books.take().offers
        _, params = p.books.finished("r", [blocks], well=True)
        assert params is not None
        if not early:
            for engine in p.engines:
                engine.offer(order, written=len(engine.cache.local.buffers))
        assert d.books.matched("r", params, len(PROMPT), 0, digest(PROMPT)) == len(PROMPT)
        d.books.allocated("r", params, into, len(PROMPT), len(PROMPT), digest(PROMPT))
        (wanted,) = d.books.take().fetches
        for engine in d.engines:
            engine.fetch(wanted)
        if early:
            for engine in p.engines:
                engine.offer(order, written=len(engine.cache.local.buffers))
        for engine in d.engines:
            assert until(engine, lambda e: bool(e.arrived)).failed == {}
        for engine in p.engines:
            assert until(engine, lambda e: bool(e.sent), "r").sent == {"r"}
        assert np.array_equal(d.rows()[:, into], x[:, blocks])


def test_a_proxy_needs_to_know_but_where_the_first_worker_is() -> None:
    grid, workers = Grid(2, 2), [Worker(f"p0-{n}", f"tcp://10.0.0.7:{7400 + n}") for n in range(4)]
    told = remote.write(
        "t", workers, engine="p0", model=MODEL, grid=grid, attempt=0, tokens=24, digest="", blocks=[[1]]
    )
    place = {
        key: told[key] for key in ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")
    }
    early = remote.read({"transfer_id": "t", **place}, model=MODEL, tokens=24)
    assert early.tickets == remote.read(told, model=MODEL, tokens=24).tickets
    with pytest.raises(InvalidArgument, match="behind one path"):
        remote.read({"transfer_id": "t", **place, "remote_host": "ipc:///x"}, model=MODEL, tokens=24)


def test_names_and_addresses() -> None:
    assert remote.worker_address("tcp://h:7400", 3) == "tcp://h:7403"
    assert remote.worker_address("tcp://h:0", 3) == "tcp://h:0"
    assert remote.worker_address("ipc:///x", 3) == "ipc:///x"
    assert engine_name(read_settings({}), "a b/c") == "a-b-c"
    assert reachable("tcp://0.0.0.0:7400", "10.0.0.7") == "tcp://10.0.0.7:7400"
    assert reachable("tcp://[::]:7400", "fe80::1") == "tcp://[fe80::1]:7400"
    with pytest.raises(hawk.ConfigError, match="host"):
        reachable("tcp://0.0.0.0:7400", "")


@pytest.mark.parametrize("early", [False, True])
def test_an_offer_that_one_worker_cannot_make_is_held_by_none(
    early: bool, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.zeros((MODEL.layers, BLOCKS, BLOCK, MODEL.heads, 2 * DIM), np.uint16)
    with contextlib.ExitStack() as stack:
        p = stack.enter_context(contextlib.closing(Side(short_path, "prefill", Grid(2), Grid(1), x)))
        d = stack.enter_context(contextlib.closing(Side(short_path, "decode", Grid(1), Grid(2), x.copy())))
        p.books.prefill("r", {}, len(PROMPT), digest(PROMPT))
        p.books.scheduled("r", [5, 0, 7], anew=True, end=len(PROMPT))
        (order,) = p.books.take().offers
        _, params = p.books.finished("r", [[5, 0, 7]], well=True)
        assert params is not None
        if early:
            del params["hawk_tickets"]
            params |= {"remote_host": "127.0.0.1", "remote_port": 1}
            made = [worker.address for worker in p.books.workers]
            workers = [Worker(f"p-{n}", address) for n, address in enumerate(made)]
            monkeypatch.setattr(remote, "_workers", lambda *_: workers)
        d.books.matched("r", params, len(PROMPT), 0, digest(PROMPT))
        d.books.allocated("r", params, [1, 2, 3], len(PROMPT), len(PROMPT), digest(PROMPT))
        (wanted,) = d.books.take().fetches

        async def full(*args: object, **more: object) -> None:
            raise Busy("no room", retry_after=0.5)

        monkeypatch.setattr(p.engines[0].client, "offer", full)
        for engine in p.engines:
            engine.offer(order, written=2)
        (end,) = until(p.engines[0], lambda e: bool(e.offers), "r").offers
        p.books.failed(end.key, end.attempt)
        abandon = p.books.take().abandon
        for engine in p.engines:
            engine.abandon(abandon)
        assert until(p.engines[1], lambda e: bool(e.sent), "r").sent == {"r"}
        d.engines[0].fetch(wanted)
        said = until(d.engines[0], lambda e: bool(e.arrived)).why["r"]
        assert "nothing to fetch" in said  # and not that its time is over


def test_an_offer_that_a_worker_could_not_make_is_not_handed_over() -> None:
    books = Books("p", MODEL, Grid(2))
    books.workers = [Worker("p-0", "tcp://h:1"), Worker("p-1", "tcp://h:2")]
    books.prefill("r", {"transfer_id": "t"}, len(PROMPT), "")
    for attempt, blocks in enumerate(([1, 2, 3], [4, 5, 6])):
        books.scheduled("r", blocks, anew=True, end=len(PROMPT))
        assert books.take().offers[0].attempt == attempt
        if not attempt:
            books.preempted("r")
    books.failed("r", 0)  # of the one that was taken back
    books.failed("r", 1)
    assert books.finished("r", [[4, 5, 6]], well=True) == (True, None)
    orders = books.take()
    assert (orders.abandon, orders.forgone[0].attempt) == (["r"], 2)
