"""The async client: register caches with the agent of this node, offer requests, fetch them.

    async with hawk.connect("ipc:///run/hawk/d0.sock") as hk:
        cache = await hk.allocate(spec, memory="npu0")
        async with hk.fetch(ticket, into=cache, blocks=[4, 7], timeout="5s") as job:
            ready = await job

A client belongs to the event loop and the process that connected it; used from anywhere else it raises
`WrongContext`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from hawk._version import __version__
from hawk.control.beat import Beat
from hawk.control.channel import Channel
from hawk.control.frames import Codec
from hawk.control.messages import (
    Allocate,
    Allocated,
    AskStatus,
    Attach,
    Attached,
    BufferRef,
    Done,
    Failed,
    FetchEnded,
    LocalMessage,
    MemoryInfo,
    Offer,
    Offered,
    Progress,
    Register,
    Registered,
    ReleaseCache,
    Status,
    pack_blocks,
)
from hawk.control.sidecar import connect_sidecar, sidecar_path
from hawk.control.sockets import Sockets
from hawk.errors import (
    HawkError,
    InternalError,
    InvalidArgument,
    PeerLost,
    PeerUnreachable,
    RegistrationFailed,
    WrongContext,
    from_wire,
)
from hawk.handles import Cache, DeviceCache, Fetch, OfferHandle
from hawk.memory import shared
from hawk.memory.received import map_received
from hawk.units import parse_duration

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import ArrayLike

    from hawk.agent import Agent
    from hawk.cache import CacheSpec, KVCache
    from hawk.control.descriptors import DescriptorLink
    from hawk.control.frames import Header

LOCAL_CODEC: Codec[LocalMessage] = Codec(msgspec.msgpack.Decoder(LocalMessage))

CALL_TIMEOUT = 30.0
"""Seconds within which an agent answers a call that has nothing to wait for."""

_HERE = bytes(16)

M = TypeVar("M", bound=msgspec.Struct)


def block_table(blocks: ArrayLike, field: str = "blocks") -> bytes:
    """A block table for the wire; raises `InvalidArgument` unless it is a flat list of block numbers."""
    table = np.asarray(blocks)
    if table.ndim != 1 or table.size == 0 or table.dtype.kind not in "iu":
        raise InvalidArgument(
            "a block table is a flat, non-empty list of integers",
            field=field,
            got=f"shape {table.shape}, {table.dtype}",
        )
    if int(table.min()) < 0 or int(table.max()) > 2**31 - 1:
        bad = int(np.flatnonzero((table < 0) | (table > 2**31 - 1))[0])
        raise InvalidArgument(
            "no block number", field=f"{field}[{bad}]", got=int(table[bad]), expected="0 or more"
        )
    return pack_blocks(table)


class Client:
    """A connection to the agent of this node.  Make it with `hawk.connect`, use it as an async context manager.

    name, role     of the agent
    memories       the agent's memories
    """

    def __init__(self, address: str, *, timeout: float = 10.0) -> None:
        self.address = address
        self.name = ""
        self.role = ""
        self.memories: list[MemoryInfo] = []
        self._timeout = timeout
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sockets: Sockets | None = None
        self._channel: Channel[LocalMessage] | None = None
        self._link: DescriptorLink | None = None
        self._calls: dict[int, asyncio.Future[LocalMessage]] = {}
        self._ids = itertools.count(1)
        self._fetches: dict[str, Fetch] = {}
        self._lost: HawkError | None = None

    # -- connecting --------------------------------------------------------------------------------------

    async def __aenter__(self) -> Client:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connects; raises `PeerUnreachable` if no agent answers at the address in time."""
        if self._loop is not None:
            raise WrongContext("the client is open already, or was closed", field="client")
        self._loop = asyncio.get_running_loop()
        try:
            token = secrets.token_bytes(16)
            path = sidecar_path(self.address)
            self._link = await connect_sidecar(path, token, timeout=self._timeout, on_closed=self._agent_gone)
            self._sockets = Sockets()
            self._channel = Channel(
                self._sockets.dealer(self.address),
                LOCAL_CODEC,
                self._take,
                on_lost=self._lose,
                on_restarted=lambda old, new: self._lose(
                    PeerLost("the agent restarted", address=self.address)
                ),
                peer="the local agent",
                # The descriptor socket tells of the agent's death at once; silence alone proves nothing.
                beat=Beat(interval=1.0, timeout=3600.0),
            )
            self._channel.start()
            await self._channel.up(self._timeout)
            attached = await self.call(
                Attach(0, token, os.getpid(), f"hawk/{__version__}"), Attached, timeout=self._timeout
            )
        except BaseException as error:
            await self.close()
            if isinstance(error, PeerUnreachable):
                error.hint = f"Is an agent running with agent.local = {self.address!r}?"
            raise
        self.name, self.role, self.memories = attached.name, attached.role, attached.memories
        self._generation = attached.generation

    async def close(self) -> None:
        """Ends fetches in flight, then the connection; the agent withdraws what this client offered."""
        for fetch in list(self._fetches.values()):
            with contextlib.suppress(HawkError):
                await fetch.abort()
        self._lose(PeerLost("the client was closed", address=self.address))
        if self._channel is not None:
            self._channel.close()
        if self._link is not None:
            self._link.close()
        if self._sockets is not None:
            self._sockets.close()

    def _agent_gone(self) -> None:
        self._lose(PeerLost("the agent's process is gone", address=self.address))

    def _lose(self, error: HawkError) -> None:
        if self._lost is None:
            self._lost = error
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._lost)
        for fetch in list(self._fetches.values()):
            fetch.ended(FetchEnded(job=fetch.job, error=self._lost.to_wire()))

    def check_context(self) -> None:
        """Raises `WrongContext` unless this is the process and the event loop that opened the client."""
        if os.getpid() != self._pid:
            raise WrongContext(
                "the client belongs to the parent process; connect anew in the child", field="client"
            )
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is None or loop is not self._loop:
            raise WrongContext(
                "the client belongs to the event loop that opened it"
                if self._loop is not None
                else "the client is not open",
                field="client",
                hint="Use `async with hawk.connect(...)`, or hawk.blocking from threads",
            )
        if self._lost is not None:
            raise self._lost

    # -- calls -------------------------------------------------------------------------------------------

    async def call(
        self, message: msgspec.Struct, answer: type[M], *, timeout: float | None = CALL_TIMEOUT
    ) -> M:
        """Sends a call (its `id` is filled in) and waits for an answer of that type; raises what the agent raised."""
        self.check_context()
        assert self._channel is not None
        assert self._loop is not None
        number = next(self._ids)
        future: asyncio.Future[LocalMessage] = self._loop.create_future()
        self._calls[number] = future
        try:
            self._channel.send(msgspec.structs.replace(message, id=number))
            async with asyncio.timeout(timeout):
                got = await future
        except TimeoutError as error:
            if isinstance(error, HawkError):
                raise
            raise PeerUnreachable(
                "the agent did not answer in time", call=type(message).__name__, seconds=timeout
            ) from None
        finally:
            del self._calls[number]
        if isinstance(got, Failed):
            raise from_wire(got.error)
        if not isinstance(got, answer):
            raise InternalError("the agent gave another answer than the call has", got=type(got).__name__)
        return got

    def _post(self, message: ReleaseCache) -> None:
        """Sends a call whose answer nobody waits for."""
        if self._channel is not None and self._lost is None:
            with contextlib.suppress(HawkError):
                self._channel.send(msgspec.structs.replace(message, id=next(self._ids)))

    def _take(self, header: Header, message: LocalMessage) -> None:
        del header
        if isinstance(message, Progress):
            fetch = self._fetches.get(message.job)
            if fetch is not None:
                fetch.progressed(message)
        elif isinstance(message, FetchEnded):
            fetch = self._fetches.get(message.job)
            if fetch is not None:
                fetch.ended(message)
        else:
            future = self._calls.get(getattr(message, "id", 0))
            if future is not None and not future.done():
                future.set_result(message)

    # -- caches ------------------------------------------------------------------------------------------

    async def register(self, cache: KVCache) -> Cache:
        """Makes a cache of this process' memory known to the agent.

        Raises `RegistrationFailed` if a separate agent cannot reach the memory (naming the ways that would work),
        `LayoutError` or `InvalidArgument` for a description that does not fit.
        """
        self.check_context()
        assert self._link is not None
        refs = []
        sent: dict[int, bytes] = {}
        here = _embedded_agent(self._generation)
        for i, buffer in enumerate(cache.buffers):
            address = int(buffer.ctypes.data)
            found = shared.find(address, buffer.nbytes)
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
        return Cache(self, answer.cache, cache.spec.compile(), cache)

    async def allocate(self, spec: CacheSpec, *, memory: str) -> DeviceCache:
        """A cache in one of the agent's memories; its channels are mapped into this process, too.

        Raises `OutOfMemory` naming the channel, `InvalidArgument` for an unknown memory.
        """
        self.check_context()
        assert self._link is not None
        answer = await self.call(Allocate(id=0, cache=spec.descr(), memory=memory), Allocated)
        buffers: list[shared.SharedBuffer] = []
        try:
            for tag in answer.tags:
                name = f"{memory}/channel{len(buffers)}"
                buffers.append(
                    await map_received(self._link, tag, answer.region_bytes, name=name, timeout=self._timeout)
                )
        except BaseException:
            for buffer in buffers:
                buffer.close()
            self._post(ReleaseCache(0, answer.cache))
            raise
        bound = answer.descr
        compiled = spec.replace(channels=bound.channels or None, align=bound.align or None).compile()
        return DeviceCache(self, answer.cache, compiled, buffers, answer.offsets)

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
        consumer: str = "",
    ) -> OfferHandle:
        """Offers tokens `[0, tokens)` of a request, which lie in `blocks` (entry i: tokens from i * block_size).

        layers_ready    layers that are written already (all of them if None); the rest is announced with
                        `OfferHandle.layers_ready` while prefill runs
        consumer        name of the only agent that may fetch it; needed for a fetch without the ticket
        note            up to 4096 bytes that travel with the cache, such as the first token

        Until the handle's `ended` returns, HAWK may read the blocks.  Raises `AlreadyOffered`, `Busy`,
        `UnknownCache` or `InvalidArgument` naming the block.
        """
        cache.check(self)
        answer = await self.call(
            Offer(
                id=0,
                request=_request(request),
                cache=cache.id,
                blocks=block_table(blocks),
                tokens=_count(tokens, "tokens"),
                ttl=parse_duration(ttl, field="ttl"),
                note=_note(note),
                layers=cache.layout.shape.layers
                if layers_ready is None
                else _count(layers_ready, "layers_ready"),
                consumer=consumer,
            ),
            Offered,
        )
        return OfferHandle(self, request, answer.ticket)

    def fetch(
        self,
        ticket: str | OfferHandle | None = None,
        *,
        into: Cache | DeviceCache,
        blocks: ArrayLike,
        first: int = 0,
        tokens: int = 0,
        timeout: float | str = "60s",
        request: str = "",
        source: str = "",
        wait: bool = False,
        abort_timeout: float | str = "10s",
    ) -> Fetch:
        """A fetch of a request into `blocks` (entry i: tokens from i * block_size) of a cache.

        first, tokens     token positions to bring; all that are offered from `first` on if `tokens` is 0
        request, source   instead of a ticket: a request and the name of the agent that has it; the offer must
                          name this node's agent as its consumer
        wait              wait for the offer if it is not made yet, until the timeout
        abort_timeout     how long leaving the block may take until no byte can land any more

        Nothing happens until the returned object is awaited or entered.
        """
        self.check_context()
        into.check(self)
        return Fetch(
            self,
            ticket=str(ticket) if ticket is not None else "",
            request=_request(request) if not ticket else "",
            source=source,
            cache=into,
            blocks=block_table(blocks),
            first=_count(first, "first"),
            tokens=_count(tokens, "tokens"),
            timeout=parse_duration(timeout, field="timeout"),
            wait=wait,
            abort_timeout=parse_duration(abort_timeout, field="abort_timeout"),
        )

    def track(self, fetch: Fetch) -> None:
        """Messages of this fetch go to it from now on."""
        self._fetches[fetch.job] = fetch

    def untrack(self, fetch: Fetch) -> None:
        """The fetch has ended."""
        self._fetches.pop(fetch.job, None)

    async def status(self) -> Status:
        """The agent's pools and counts."""
        return await self.call(AskStatus(0), Status)

    async def done(self, message: msgspec.Struct, *, timeout: float | None = CALL_TIMEOUT) -> None:
        """A call that is answered by `Done`."""
        await self.call(message, Done, timeout=timeout)


def connect(address: str | Agent | None = None, *, timeout: float | str = "10s") -> Client:
    """A client of the agent at `address` (`"ipc://PATH"`, as in its config's `agent.local`), or of an embedded agent.

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
        address = address.config.agent.local
    return Client(address, timeout=parse_duration(timeout, field="timeout"))


def _embedded_agent(generation: str) -> bool:
    """Whether the agent of that generation lives in this process."""
    from hawk.control import frames

    return f"{frames.generation():016x}" == generation


def _request(request: str) -> str:
    if not 1 <= len(request) <= 512:
        raise InvalidArgument(
            "a request id is a string",
            field="request",
            got=repr(request)[:80],
            expected="1 to 512 characters",
        )
    return request


def _count(value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= int(value) < 2**48:
        raise InvalidArgument(
            "not a count", field=field, got=repr(value)[:80], expected="an integer, 0 or more"
        )
    return int(value)


def _note(note: bytes) -> bytes:
    if len(note) > 4096:
        raise InvalidArgument(
            "a note is a few bytes", field="note", got=f"{len(note)} bytes", expected="bytes, at most 4096"
        )
    return note
