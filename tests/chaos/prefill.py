"""The prefill engine of the chaos run: fills blocks layer by layer, offers them, and takes them back at once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hawk.cache import KVCache
from hawk.client import Client
from hawk.errors import HawkError
from hawk.handles import Cache, OfferHandle
from tests.chaos import content as c
from tests.chaos.worker import Command, Lost, Worker


@dataclass(eq=False)
class _Session:
    client: Client
    source: KVCache
    cache: Cache
    free: list[int]
    open: set[OfferHandle] = field(default_factory=set)

    def write(self, layer: int, blocks: list[int], request: int, tokens: int) -> None:
        """What prefill computes: one layer of a request, in its blocks."""
        size = c.SOURCE.block_size
        shape = (2, c.SOURCE.blocks, size, c.HEADS, c.DIM)
        buffer = self.source.buffers[layer].view(np.uint16).reshape(shape)
        for kv in range(2):
            rows = np.full((len(blocks) * size, c.HEADS, c.DIM), c.POISON, np.uint16)
            rows[:tokens] = c.bits(request, layer, kv, 0, tokens)
            buffer[kv][blocks] = rows.reshape(len(blocks), size, c.HEADS, c.DIM)

    def poison(self, blocks: list[int]) -> None:
        """The engine reuses them."""
        shape = (2, c.SOURCE.blocks, c.SOURCE.block_size, c.HEADS, c.DIM)
        for buffer in self.source.buffers:
            buffer.view(np.uint16).reshape(shape)[:, blocks] = c.POISON


class Prefiller(Worker):
    """Commands: `offer`, and `finish`, which withdraws whatever is open."""

    _session: _Session | None = None

    async def attach(self, client: Client) -> None:
        """Registers the cache."""
        source = KVCache.alloc(c.SOURCE)
        cache = await client.register(source)
        self._session = _Session(client, source, cache, list(range(c.SOURCE.blocks)))
        self._session.poison(self._session.free)

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
        need = -(-tokens // c.SOURCE.block_size)
        if len(session.free) < need:
            self.say(number, "over", code="no-blocks")
            return
        blocks = dice.sample(session.free, need)
        session.free = [b for b in session.free if b not in blocks]
        written = command["written"]
        for layer in range(written):
            session.write(layer, blocks, command["content"], tokens)
        working: list[asyncio.Task[None]] = []
        try:
            handle = await session.client.offer(
                command["request"],
                session.cache,
                blocks,
                tokens=tokens,
                ttl=command["ttl"],
                layers_ready=written,
                consumer=command["consumer"],
            )
            self.say(number, "offered", ticket=handle.ticket)
            session.open.add(handle)
            try:
                loop = asyncio.get_running_loop()
                working.append(loop.create_task(self._prefill(session, handle, blocks, command)))
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
        session.poison(blocks)
        session.free += blocks
        self.say(number, "over", outcome=outcome, code=code)

    async def _prefill(
        self, session: _Session, handle: OfferHandle, blocks: list[int], command: Command
    ) -> None:
        for layer in range(command["written"], command["layers"]):
            await asyncio.sleep(command["pause"])
            session.write(layer, blocks, command["content"], command["tokens"])
            await handle.layers_ready(layer + 1)

    async def _withdraw(self, handle: OfferHandle, after: float) -> None:
        await asyncio.sleep(after)
        await handle.withdraw()


async def _over(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, HawkError):
            await task
