"""The prefill engine of the chaos run: fills blocks layer by layer, offers them, and takes them back at once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hawk.cache import CacheSpec, KVCache
from hawk.client import Client
from hawk.errors import HawkError
from hawk.handles import Cache, OfferHandle
from tests.chaos import content as c
from tests.chaos.worker import Command, Lost, Worker


@dataclass(eq=False)
class _Source:
    """A cache of this engine: the whole model's heads, or one rank's."""

    memory: KVCache
    cache: Cache
    heads: slice
    free: list[int] = field(default_factory=lambda: list(range(c.SOURCE.blocks)))

    def _layer(self, layer: int) -> np.ndarray:
        shape = (2, c.SOURCE.blocks, c.SOURCE.block_size, len(range(c.HEADS)[self.heads]), c.DIM)
        return self.memory.buffers[layer].view(np.uint16).reshape(shape)

    def write(self, layer: int, blocks: list[int], request: int, tokens: int) -> None:
        """What prefill computes: one layer of a request, in its blocks."""
        into = self._layer(layer)
        for kv in range(2):
            rows = np.full((len(blocks) * c.SOURCE.block_size, *into.shape[3:]), c.POISON, np.uint16)
            rows[:tokens] = c.bits(request, layer, kv, 0, tokens)[:, self.heads]
            into[kv][blocks] = rows.reshape(len(blocks), *into.shape[2:])

    def take(self, count: int, dice: random.Random) -> list[int]:
        """So many free blocks, at random."""
        blocks = dice.sample(self.free, count)
        self.free = [b for b in self.free if b not in blocks]
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        """The engine reuses them at once."""
        for layer in range(c.LAYERS):
            self._layer(layer)[:, blocks] = c.POISON
        self.free += blocks


@dataclass(eq=False)
class _Session:
    client: Client
    whole: _Source
    part: _Source
    open: set[OfferHandle] = field(default_factory=set)


class Prefiller(Worker):
    """Commands: `offer`, and `finish`, which withdraws whatever is open."""

    _session: _Session | None = None

    async def attach(self, client: Client) -> None:
        """Registers the caches."""
        rank = c.RANK[self.folder.name]
        whole = await self._registered(client, c.SOURCE, slice(0, c.HEADS))
        part = await self._registered(client, c.PARTS[rank], slice(rank, rank + 1))
        self._session = _Session(client, whole, part)

    async def _registered(self, client: Client, spec: CacheSpec, heads: slice) -> _Source:
        memory = KVCache.alloc(spec)
        source = _Source(memory, await client.register(memory), heads, [])
        source.give_back(list(range(c.SOURCE.blocks)))
        return source

    async def detach(self) -> None:
        """The cache went with the agent."""
        self._session = None

    async def obey(self, number: int, command: Command) -> None:
        """See the class."""
        session = self._session
        if session is None:
            raise Lost
        if command["op"] == "finish":
            await asyncio.gather(*(handle.withdraw() for handle in session.open), return_exceptions=True)
            self.say(number, "over")
        else:
            await self._offer(number, session, command)

    async def _offer(self, number: int, session: _Session, command: Command) -> None:
        tokens, dice = command["tokens"], random.Random(command["seed"])
        source = session.part if command["part"] else session.whole
        need = -(-tokens // c.SOURCE.block_size)
        if len(source.free) < need:
            self.say(number, "over", code="no-blocks")
            return
        blocks = source.take(need, dice)
        written = command["written"]
        for layer in range(written):
            source.write(layer, blocks, command["content"], tokens)
        working: list[asyncio.Task[None]] = []
        try:
            handle = await session.client.offer(
                command["request"],
                source.cache,
                blocks,
                tokens=tokens,
                ttl=command["ttl"],
                layers_ready=written,
                consumer=command["consumer"],
                consumers=command["consumers"],
            )
            self.say(number, "offered", ticket=handle.ticket)
            session.open.add(handle)
            try:
                loop = asyncio.get_running_loop()
                working.append(loop.create_task(self._prefill(source, handle, blocks, command)))
                if command["withdraw"] is not None:
                    working.append(loop.create_task(self._withdraw(handle, command["withdraw"])))
                outcome = await handle.ended()
            finally:
                session.open.discard(handle)
                await _over(working)
            code = ""
        except HawkError as error:
            outcome, code = "", error.code
        # The agent has said that it reads them no more, or it is gone.
        source.give_back(blocks)
        self.say(number, "over", outcome=outcome, code=code)

    async def _prefill(
        self, source: _Source, handle: OfferHandle, blocks: list[int], command: Command
    ) -> None:
        for layer in range(command["written"], command["layers"]):
            await asyncio.sleep(command["pause"])
            source.write(layer, blocks, command["content"], command["tokens"])
            await handle.layers_ready(layer + 1)

    async def _withdraw(self, handle: OfferHandle, after: float) -> None:
        await asyncio.sleep(after)
        await handle.withdraw()


async def _over(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, HawkError):
            await task
