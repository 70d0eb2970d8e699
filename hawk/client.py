"""The async client: register caches with the agent of this node, offer requests, fetch them.

    async with hawk.connect("ipc:///run/hawk/d0.sock") as hk:
        cache = await hk.allocate(spec, memory="npu0")
        async with hk.fetch(ticket, into=cache, blocks=[4, 7], timeout="5s") as job:
            ready = await job

A client belongs to the event loop and the process that connected it; used from anywhere else it raises
`WrongContext`.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from hawk.arguments import (
    block_table,
    consumer_names,
    count,
    duration,
    instance,
    rank,
    request_id,
    shown,
    small_note,
    source_names,
    text,
    ticket_texts,
)
from hawk.cache import CacheSpec, KVCache
from hawk.cache_gpu import drop, set_mark
from hawk.connection import CALL_TIMEOUT
from hawk.control import frames
from hawk.control.messages import (
    Allocate,
    Allocated,
    BufferRef,
    Forgo,
    Offer,
    Offered,
    Register,
    Registered,
    ReleaseCache,
)
from hawk.errors import InvalidArgument, RegistrationFailed
from hawk.handles import PARTS_SINCE, Cache, DeviceCache, Fetch, OfferHandle
from hawk.memory.mapping import find
from hawk.memory.received import map_received
from hawk.memory.windows import map_window
from hawk.operator import Operator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from hawk.agent import Agent
    from hawk.memory.shared import SharedBuffer

__all__ = ["CALL_TIMEOUT", "Client", "block_table", "connect"]

_HERE = bytes(16)


class Client(Operator):
    """A connection to the agent of this node.  Make it with `hawk.connect`, use it as an async context manager.

    name, role     of the agent
    memories       the agent's memories
    """

    # -- caches ------------------------------------------------------------------------------------------

    async def register(self, cache: KVCache) -> Cache:
        """Makes a cache of this process' memory known to the agent.

        Raises `RegistrationFailed` if a separate agent cannot reach the memory (naming the ways that would work),
        `LayoutError` or `InvalidArgument` for a description that does not fit.
        """
        self.check_context()
        instance(cache, KVCache, "cache", "a KVCache")
        assert self._link is not None
        refs = [BufferRef(_HERE, b.nbytes, b.address, b.nbytes, b.device) for b in cache.gpu_buffers]
        sent: dict[int, bytes] = {}
        here = _embedded_agent(self._generation)
        if refs and not here:
            raise RegistrationFailed(
                "the agent is another process, and retiles no memory of a GPU that is not its own",
                field="buffers[0]",
                got=f"memory of cuda:{refs[0].gpu}",
                hint="Ways that work: run the agent in this process (hawk.Agent), or keep the cache in shared memory "
                "(KVCache.alloc)",
            )
        for i, buffer in enumerate(cache.buffers):
            address = int(buffer.ctypes.data)
            found = find(address, buffer.nbytes)
            if found is None:
                if not here:
                    raise RegistrationFailed(
                        "the agent is another process and cannot reach this memory",
                        field=f"buffers[{i}]",
                        got=f"{buffer.nbytes} bytes of ordinary memory",
                        hint="Ways that work: allocate it with KVCache.alloc or hawk.alloc (shared memory), or run the "
                        "agent in this process (hawk.Agent)",
                    )
                refs.append(BufferRef(_HERE, buffer.nbytes, address, buffer.nbytes))
                continue
            owner, offset = found
            tag = sent.get(id(owner))
            if tag is None:
                tag = sent[id(owner)] = secrets.token_bytes(16)
                await self._link.send_fd(tag, owner.fd)
            refs.append(BufferRef(tag, owner.nbytes, offset, buffer.nbytes))
        answer = await self.call(Register(id=0, cache=cache.spec.descr(), buffers=refs), Registered)
        made = Cache(self, answer.cache, cache.spec.compile(), cache)
        made.part = cache.spec.part
        return made

    async def allocate(self, spec: CacheSpec, *, memory: str) -> DeviceCache:
        """A cache in one of the agent's memories; its channels are mapped into this process, too.

        Raises `OutOfMemory` naming the channel, `InvalidArgument` for an unknown memory.
        """
        self.check_context()
        instance(spec, CacheSpec, "spec", "a CacheSpec")
        text(memory, "memory", 128, shortest=1)
        assert self._link is not None
        answer = await self.call(Allocate(id=0, cache=spec.descr(), memory=memory), Allocated)
        buffers: list[SharedBuffer] = []
        try:
            for tag in answer.tags:
                name = f"{memory}/channel{len(buffers)}"
                buffers.append(
                    await map_received(
                        self._link,
                        tag,
                        answer.region_bytes,
                        name=name,
                        timeout=self._timeout,
                        mapper=map_window,
                    )
                )
        except BaseException:
            for buffer in buffers:
                buffer.close()
            self.post(ReleaseCache(0, answer.cache))
            raise
        bound = answer.descr
        compiled = spec.replace(channels=bound.channels or None, align=bound.align or None).compile()
        made = DeviceCache(self, answer.cache, compiled, buffers, answer.offsets)
        made.part = spec.part
        return made

    # -- offers and fetches ------------------------------------------------------------------------------

    async def offer(
        self,
        request: str,
        cache: Cache,
        blocks: ArrayLike,
        *,
        tokens: int,
        ttl: float | str = "30s",
        note: bytes = b"",
        layers_ready: int | None = None,
        after: object = None,
        consumer: str = "",
        consumers: int | Sequence[str] = 1,
        claim: str = "",
    ) -> OfferHandle:
        """Offers tokens `[0, tokens)` of a request, which lie in `blocks` (entry i: tokens from i * block_size).

        layers_ready    layers that are written already (all of them if None); the rest is announced with
                        `OfferHandle.layers_ready` while prefill runs
        after           of a cache on a GPU: the stream or the event behind which these layers are written, see
                        `OfferHandle.layers_ready`
        consumer        name of the only agent that may fetch it; needed for a fetch without the ticket
        consumers       where several fetch it (the workers of a decode group whose heads it holds): how many, or the
                        names of their agents, each as often as it fetches
        claim           32 hexadecimal digits that nobody can guess, for a ticket that was written before the offer
                        (`hawk.integrations.remote`); used once
        note            up to 4096 bytes that travel with the cache, such as the first token

        Each consumer claims once; the offer is consumed when all have released it.  Until the handle's `ended`
        returns, HAWK may read the blocks.  Raises `AlreadyOffered`, `Busy`,
        `UnknownCache` or `InvalidArgument` naming the block.
        """
        instance(cache, Cache, "cache", "a cache from register or allocate").check(self)
        names, claims = consumer_names(consumers)
        if names or claims > 1:
            self.needs_version(PARTS_SINCE, "an offer for several consumers")
        written = cache.layout.shape.layers if layers_ready is None else count(layers_ready, "layers_ready")
        mark = set_mark(cache.local, after) if written or after is not None else None
        try:
            answer = await self.call(
                Offer(
                    id=0,
                    request=request_id(request),
                    cache=cache.id,
                    blocks=block_table(blocks),
                    tokens=count(tokens, "tokens"),
                    ttl=duration(ttl, "ttl"),
                    note=small_note(note),
                    layers=written,
                    consumer=text(consumer, "consumer", 128),
                    consumers=names,
                    claims=claims,
                    mark=0 if mark is None else mark.number,
                    claim=text(claim, "claim", 32),
                ),
                Offered,
            )
        finally:
            if mark is not None:
                drop(mark)  # one that the agent took is its own
        return OfferHandle(self, request, answer.ticket, cache.local)

    async def forgo(self, request: str, claim: str, *, why: str = "") -> None:
        """Says that no offer of the request will be made with `claim`, 32 hexadecimal digits.

        Who waits for it, or comes later with a ticket that was written before the offer, gets `UnknownRequest` with
        `why` as its reason instead of waiting for its deadline.  An offer that was made with it stays as it is.
        """
        await self.done(Forgo(0, request_id(request), text(claim, "claim", 32, shortest=32), why[:1024]))

    def fetch(
        self,
        ticket: str | OfferHandle | Sequence[str | OfferHandle] | None = None,
        *,
        into: Cache | DeviceCache,
        blocks: ArrayLike,
        first: int = 0,
        tokens: int = 0,
        timeout: float | str = "60s",
        request: str = "",
        source: str | Sequence[str] = "",
        wait: bool = False,
        priority: int = 0,
        ttft: float | str | None = None,
        abort_timeout: float | str = "10s",
    ) -> Fetch:
        """A fetch of a request into `blocks` (entry i: tokens from i * block_size) of a cache.

        ticket            the offer's; or a list of tickets, where the request comes in parts from several caches:
                          those are read that together hold what `into` holds, and it is ready when all have arrived
        first, tokens     token positions to bring; all that are offered from `first` on if `tokens` is 0
        request, source   instead of a ticket: a request and the name of the agent that has it; the offer must
                          name this node's agent as its consumer.  For parts a list of agents, each named as often as
                          it has a part
        wait              wait for the offer if it is not made yet, until the timeout
        priority          -100 to 100: among the fetches of this client, the higher first
        ttft              the time within which it should be ready, such as "300ms"; of equal priority, who has least
                          of it left goes first.  Too late is not a failure: that is `timeout`
        abort_timeout     how long leaving the block may take until no byte can land any more

        Nothing happens until the returned object is awaited or entered.  Parts that do not make up what `into` holds
        end it with `PartsMismatch`, which names the heads and layers.
        """
        self.check_context()
        instance(into, Cache, "into", "a cache from register or allocate").check(self)
        instance(wait, bool, "wait", "True or False")
        tickets = ticket_texts(ticket)
        if tickets and (request or source):
            raise InvalidArgument(
                "a ticket says already what it is for, and where that is",
                field="request" if request else "source",
                got=request or source,
                expected="a ticket, or a request and its source",
            )
        return Fetch(
            self,
            tickets=tickets,
            request=request_id(request) if not tickets else "",
            sources=source_names(source),
            cache=into,
            blocks=block_table(blocks),
            first=count(first, "first"),
            tokens=count(tokens, "tokens"),
            timeout=duration(timeout, "timeout"),
            wait=wait,
            priority=rank(priority, "priority"),
            ttft=0.0 if ttft is None else duration(ttft, "ttft"),
            abort_timeout=duration(abort_timeout, "abort_timeout"),
        )


def connect(address: str | Agent | None = None, *, timeout: float | str = "10s") -> Client:
    """A client of the agent at `address` (`"ipc://PATH"` or the path alone, as `agent.local`), or of an embedded agent.

    On the event loop of an embedded agent the client talks with it directly, everywhere else over its socket.
    Without an address the environment variable HAWK_LOCAL names it.
    """
    if address is None:
        address = os.environ.get("HAWK_LOCAL", "")
        if not address:
            raise InvalidArgument(
                "no agent was named",
                field="address",
                expected='"ipc://PATH", or HAWK_LOCAL in the environment',
            )
    if not isinstance(address, str):
        local = getattr(getattr(getattr(address, "config", None), "agent", None), "local", None)
        if not isinstance(local, str):
            raise InvalidArgument(
                "no agent's address",
                field="address",
                got=shown(address),
                expected='"ipc://PATH" or a hawk.Agent',
            )
        return Client(local, timeout=duration(timeout, "timeout"), agent=address)
    if address.startswith("/"):
        address = f"ipc://{address}"
    return Client(address, timeout=duration(timeout, "timeout"))


def _embedded_agent(generation: str) -> bool:
    """Whether the agent of that generation lives in this process."""
    return f"{frames.generation():016x}" == generation
