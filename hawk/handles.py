"""What a client gets to hold: caches, offers, fetches."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hawk.arguments import count
from hawk.cache_gpu import Mark, drop, set_mark
from hawk.control.messages import (
    AbortFetch,
    AwaitOffer,
    FetchEnded,
    LayersReady,
    OfferEnded,
    Progress,
    ReleaseCache,
    StartFetch,
    Withdraw,
    decode_ticket,
    unpack_blocks,
)
from hawk.errors import Aborted, HawkError, InvalidArgument, PeerUnreachable, StillDraining, from_wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from hawk.cache import KVCache
    from hawk.client import Client
    from hawk.layouts import CompiledLayout
    from hawk.memory.shared import SharedBuffer
    from hawk.plan.part import Part

PARTS_SINCE = 2
"""The first protocol version whose agents know of parts and of several consumers."""


class Cache:
    """A cache of this process' memory that the agent knows; from `Client.register`.  `part`: what of its model."""

    part: Part | None = None

    def __init__(
        self, client: Client, cache_id: str, layout: CompiledLayout, local: KVCache | None = None
    ) -> None:
        self.id = cache_id
        self.layout = layout
        self.local = local
        """The arrays, where they are this process' own."""
        self._client = client
        self._released = False

    def __repr__(self) -> str:
        shape, state = self.layout.shape, ", released" if self._released else ""
        return (
            f"<{type(self).__name__} {self.id}: {self.layout.name} {self.layout.codec.name}, {shape.layers} layers, "
            f"{shape.blocks} blocks of {shape.block_size} tokens{state}>"
        )

    def check(self, client: Client) -> None:
        """Raises `InvalidArgument` unless this is a live cache of that client."""
        if client is not self._client:
            raise InvalidArgument("the cache belongs to another client", field="cache")
        if self._released:
            raise InvalidArgument("the cache was released", field="cache", got=self.id)

    async def release(self) -> None:
        """Gives the cache back; returns when HAWK touches none of its bytes any more."""
        if self._released:
            return
        self._released = True
        await self._client.done(ReleaseCache(0, self.id), timeout=None)


class DeviceCache(Cache):
    """A cache in one of the agent's memories; from `Client.allocate`.

    channels    the memory's channels as this process sees them, one `uint8[region bytes]` each; none of a GPU's memory
    offsets     byte offset of each buffer's base, the same in every channel
    """

    def __init__(
        self,
        client: Client,
        cache_id: str,
        layout: CompiledLayout,
        buffers: list[SharedBuffer],
        offsets: list[int],
    ) -> None:
        super().__init__(client, cache_id, layout)
        self._buffers = buffers
        self.offsets = offsets

    @property
    def channels(self) -> list[NDArray[np.uint8]]:
        """One array per channel."""
        return [buffer.array for buffer in self._buffers]

    @property
    def descriptors(self) -> list[int]:
        """One memfd (or dma-buf) per channel, for another process to map; they stay this cache's to close."""
        return [buffer.fd for buffer in self._buffers]

    def buffer(self, layer: int, kv: int) -> list[NDArray[np.uint8]]:
        """The bytes of the buffer that holds this layer and kv, per channel, from its base on."""
        base = self.offsets[self.layout.buffer(layer, kv)]
        channels = self.channels
        chosen = [channels[bank] for bank in self.layout.banks] if self.layout.banks else channels
        return [channel[base : base + self.layout.channel_bytes] for channel in chosen]

    async def release(self) -> None:
        """Gives the cache back to the agent's pool, and its channels' mappings to the system."""
        try:
            await super().release()
        finally:
            for buffer in self._buffers:
                buffer.close()


class OfferHandle:
    """An open offer.  `str(offer)` is its ticket."""

    def __init__(self, client: Client, request: str, ticket: str, local: KVCache | None = None) -> None:
        self._local = local
        self.request = request
        self.ticket = ticket
        self._claim = decode_ticket(ticket).claim
        self._client = client

    def __str__(self) -> str:
        return self.ticket

    def __repr__(self) -> str:
        """Without the ticket: who reads one in a log could fetch."""
        return f"<{type(self).__name__} {self.request!r} of {self._client.name}>"

    def mark(self, after: object = None) -> Mark | None:
        """Marks where the GPU is now; from the thread that computes, for `layers_ready` in another."""
        return set_mark(self._local, after)

    async def layers_ready(self, layers: int, *, after: object = None) -> None:
        """Layers `[0, layers)` are written; the agent may retile and send them.

        after    of a cache on a GPU: the stream or the event behind which they are written (torch's or CuPy's, or
                 the number of a stream), or what `mark` returned; None: torch's current stream for tensors of torch,
                 else the default stream.  Nobody waits for it but the GPU
        """
        number = count(layers, "layers")
        mark = set_mark(self._local, after)
        try:
            told = LayersReady(0, self.request, self._claim, number, 0 if mark is None else mark.number)
            await self._client.done(told)
        finally:
            if mark is not None:
                drop(mark)  # one that the agent took is its own

    async def ended(self) -> str:
        """Waits until the offer has ended and HAWK reads its blocks no more.

        Returns `"consumed"`, `"expired"` or `"withdrawn"`.  Raises `UnknownRequest` if it ended so long ago, or so
        many offers ago, that the agent has forgotten it.
        """
        answer = await self._client.call(AwaitOffer(0, self.request, self._claim), OfferEnded, timeout=None)
        return answer.outcome

    async def withdraw(self) -> None:
        """Ends the offer, and a job that has claimed it; returns when HAWK reads its blocks no more.

        An offer that has ended stays as it ended.
        """
        await self._client.done(Withdraw(0, self.request, self._claim), timeout=None)


@dataclass(frozen=True, slots=True)
class Ready:
    """A request has arrived: every byte is in place, visible to the device, and was held until the last was read.

    first, tokens    token positions that are there now
    nbytes           bytes moved
    note             what the offer carried along; of several, the first that is not empty
    transport, mode  how: the transport's name, `"direct"` or `"staged"`; joined by `+` where parts differ
    phases           seconds by phase, chunks added up; they overlap; `"total"` is the whole job in the agent
    channels         bytes per memory channel
    parts            how many offers it came from
    """

    first: int
    tokens: int
    nbytes: int
    note: bytes
    transport: str
    mode: str
    phases: dict[str, float] = field(default_factory=dict)
    channels: tuple[int, ...] = ()
    parts: int = 1


class Fetch:
    """A fetch.  `await` it for its `Ready`, or enter it: leaving the block ends it and waits until no byte lands."""

    def __init__(
        self,
        client: Client,
        *,
        tickets: Sequence[str],
        request: str,
        sources: Sequence[str],
        cache: Cache,
        blocks: bytes,
        first: int,
        tokens: int,
        timeout: float,
        wait: bool,
        priority: int,
        ttft: float,
        abort_timeout: float,
    ) -> None:
        self.job = secrets.token_hex(16)
        self._client = client
        self._abort_timeout = abort_timeout
        self._message = StartFetch(
            id=0,
            job=self.job,
            ticket=tickets[0] if tickets else "",
            request=request,
            source=sources[0] if sources else "",
            cache=cache.id,
            blocks=blocks,
            first=first,
            tokens=tokens,
            timeout=timeout,
            wait=wait,
            priority=priority,
            ttft=ttft,
            tickets=list(tickets[1:]),
            sources=list(sources[1:]),
        )
        self._start: asyncio.Task[None] | None = None
        self._latest: Progress | None = None
        self._changed = asyncio.Event()
        self._result: asyncio.Future[Ready] | None = None

    def __repr__(self) -> str:
        state, result = "not started", self._result
        if result is not None:
            state = "under way" if not result.done() else "failed" if result.exception() else "ready"
        return f"<{type(self).__name__} {self.job}: {state}>"

    # -- from the client ---------------------------------------------------------------------------------

    def progressed(self, message: Progress) -> None:
        """The agent told of progress."""
        self._latest = message
        self._wake()

    def ended(self, message: FetchEnded) -> None:
        """The agent told of the end."""
        self._client.untrack(self)
        if self._result is not None and not self._result.done():
            # The end says its state, too: the agent sends no progress for it.
            done = message.nbytes or (self._latest.nbytes if self._latest is not None else 0)
            total = max(done, self._latest.total if self._latest is not None else 0)
            self._latest = Progress(self.job, "failed" if message.error else "ready", done, total)
            if message.error:
                self._result.set_exception(from_wire(message.error))
                self._result.exception()  # an unread ending is not worth a warning at exit
            else:
                self._result.set_result(
                    Ready(
                        first=message.first,
                        tokens=message.tokens,
                        nbytes=message.nbytes,
                        note=message.note,
                        transport=message.transport,
                        mode=message.mode,
                        phases=message.phases,
                        channels=tuple(message.channels),
                        parts=message.parts,
                    )
                )
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # -- for the user ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Hands the job to the agent; raises `Busy`, `Draining` or what is wrong with the arguments."""
        if self._result is not None:
            return
        self._client.check_context()
        if self._message.tickets or self._message.sources:
            self._client.needs_version(PARTS_SINCE, "a fetch of several parts")
        self._result = asyncio.get_running_loop().create_future()
        self._client.track(self)
        try:
            await self._client.done(self._message)
        except PeerUnreachable as error:
            # No answer in time says nothing: the agent may begin any moment.  It is told to end whatever it began.
            self._client.post(AbortFetch(0, self.job))
            self.ended(FetchEnded(job=self.job, error=error.to_wire()))
            raise self._draining(error.message) from error
        except HawkError as error:
            self.ended(FetchEnded(job=self.job, error=error.to_wire()))
            raise
        except asyncio.CancelledError as error:
            # The agent may have begun: what it began ends here, in the caller's place.
            await self._finish_abort(error)
            raise

    async def result(self) -> Ready:
        """Waits for the end; raises the error it ended with.  Being cancelled here does not end the job."""
        await self.start()
        assert self._result is not None
        return await asyncio.shield(self._result)

    def __await__(self) -> Generator[Any, None, Ready]:
        return self._run().__await__()

    async def _run(self) -> Ready:
        try:
            return await self.result()
        except asyncio.CancelledError as error:
            await self._finish_abort(error)
            raise

    async def progress(self) -> AsyncIterator[Progress]:
        """The latest state whenever it has changed, until the end.  Slow readers miss what lies between."""
        await self.start()
        assert self._result is not None
        seen: Progress | None = None
        while not self._result.done() or self._latest is not seen:
            changed = self._changed
            if self._latest is not seen and self._latest is not None:
                seen = self._latest
                yield seen
            elif not self._result.done():
                await changed.wait()

    async def abort(self) -> None:
        """Ends the job unless it has ended; returns when no byte of it can land any more.

        Raises `StillDraining` if that takes longer than `abort_timeout`: the blocks then stay with the agent, and
        must not be reused.
        """
        if self._result is None or self._result.done():
            return
        try:
            await self._client.done(AbortFetch(0, self.job), timeout=self._abort_timeout)
        except HawkError as error:
            if self._result.done():
                return
            raise self._draining(error.message) from error
        if not self._result.done():
            # The agent answers in order, so it would have told of the end before: it never knew the job.
            self.ended(
                FetchEnded(job=self.job, error=Aborted("the fetch was ended before it began").to_wire())
            )

    def _draining(self, reason: str) -> StillDraining:
        table = unpack_blocks(self._message.blocks).tolist()
        shown = ", ".join(map(str, table[:32])) + (f" and {len(table) - 32} more" if len(table) > 32 else "")
        return StillDraining(
            "the fetch did not end in time; its blocks stay quarantined",
            field="blocks",
            got=shown,
            job=self.job,
            seconds=self._abort_timeout,
            reason=reason,
        )

    async def _finish_abort(self, cancelled: asyncio.CancelledError) -> None:
        """`abort`, carried through although the caller is being cancelled; what went wrong becomes a note on that."""
        task = asyncio.get_running_loop().create_task(self.abort())
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                continue  # the caller raises its own; this one says the same
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            cancelled.add_note(str(fault))

    async def __aenter__(self) -> Fetch:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.abort()
