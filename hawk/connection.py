"""A client's connection to the agent of its node: calls and their answers, and what ends them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from hawk._version import __version__
from hawk.arguments import refused_by_encoder, refused_by_schema
from hawk.control.beat import Beat
from hawk.control.channel import Channel
from hawk.control.frames import Codec, encode_body
from hawk.control.messages import (
    QUIET,
    AbortFetch,
    Attach,
    Attached,
    Done,
    Failed,
    FetchEnded,
    LocalMessage,
    MemoryInfo,
    Progress,
    ReleaseCache,
)
from hawk.control.sidecar import connect_sidecar, sidecar_path
from hawk.control.sockets import Sockets
from hawk.errors import (
    BadFrame,
    Busy,
    HawkError,
    InternalError,
    InvalidArgument,
    PeerLost,
    PeerUnreachable,
    VersionMismatch,
    WrongContext,
    from_wire,
)

if TYPE_CHECKING:
    from types import TracebackType

    from hawk.agent import Agent
    from hawk.control.descriptors import DescriptorLink
    from hawk.control.passage import Passage
    from hawk.handles import Fetch

LOCAL_CODEC: Codec[LocalMessage] = Codec(msgspec.msgpack.Decoder(LocalMessage))

CALL_TIMEOUT = 30.0
"""Seconds within which an agent answers a call that has nothing to wait for."""

M = TypeVar("M", bound=msgspec.Struct)


_WITHOUT_TURN = 0.001
"""Seconds for which calls that are answered at once keep the event loop to themselves."""


class Connection:
    """Connects to one agent; belongs to the event loop and the process that opened it.

    quiet   the agent does not log that we came and went; for tools that come often and leave nothing
    agent   the agent itself, where it lives in this process: on one event loop no socket is needed
    """

    def __init__(
        self, address: str, *, timeout: float = 10.0, quiet: bool = False, agent: Agent | None = None
    ) -> None:
        self.address = address
        self._agent = agent
        self.name = ""
        self.role = ""
        self.memories: list[MemoryInfo] = []
        self._timeout = timeout
        self._software = f"hawk/{__version__}{QUIET if quiet else ''}"
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sockets: Sockets | None = None
        self._channel: Channel[LocalMessage] | Passage[LocalMessage] | None = None
        self._link: DescriptorLink | None = None
        self._calls: dict[int, asyncio.Future[LocalMessage]] = {}
        self._ids = itertools.count(1)
        self._turn = 0.0
        self._fetches: dict[str, Fetch] = {}
        self._lost: HawkError | None = None

    # -- connecting --------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
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
            self._channel = None if self._agent is None else self._agent.passage(self._hear)
            if self._channel is None:
                self._channel = await self._connect()
            attached = await self.call(
                Attach(0, token, os.getpid(), self._software), Attached, timeout=self._timeout
            )
        except BaseException as error:
            await self.close()
            if isinstance(error, PeerUnreachable):
                error.hint = f"Is an agent running with agent.local = {self.address!r}?"
                if isinstance(error.__cause__, PermissionError):
                    error.hint = "The folder or the socket is another user's: clients run as the agent's user"
            raise
        self.name, self.role, self.memories = attached.name, attached.role, attached.memories
        self._generation = attached.generation

    async def _connect(self) -> Channel[LocalMessage]:
        self._sockets = Sockets()
        channel = self._channel = Channel(
            self._sockets.dealer(self.address),
            LOCAL_CODEC,
            lambda _, message: self._hear(message),
            on_lost=self._lose,
            on_restarted=lambda old, new: self._lose(PeerLost("the agent restarted", address=self.address)),
            peer="the local agent",
            # The descriptor socket tells of the agent's death at once; silence alone proves nothing.
            beat=Beat(interval=1.0, timeout=3600.0),
        )
        channel.start()
        await channel.up(self._timeout)
        return channel

    async def close(self) -> None:
        """Ends fetches in flight, then the connection; the agent withdraws what this client offered.

        Safe to call twice.  Raises `WrongContext` from another process or event loop than opened the client.
        """
        if self._loop is None:
            return
        self._check_place()
        try:
            ends = [fetch.abort() for fetch in self._fetches.values()]
            await asyncio.gather(*ends, return_exceptions=True)
        finally:
            self._lose(PeerLost("the client was closed", address=self.address))
            if self._channel is not None:
                self._channel.close()
            if self._link is not None:
                self._link.close()
            if self._sockets is not None:
                self._sockets.close()

    @property
    def version(self) -> int:
        """The protocol version that is spoken with the agent; 0 before the connection is open."""
        return 0 if self._channel is None else self._channel.version

    def _agent_gone(self) -> None:
        self._lose(PeerLost("the agent's process is gone", address=self.address))

    def _lose(self, error: HawkError) -> None:
        if self._lost is None:
            self._lost = error
        for future in self._calls.values():
            if not future.done():
                future.set_exception(from_wire(self._lost.to_wire()))
        for fetch in list(self._fetches.values()):
            fetch.ended(FetchEnded(job=fetch.job, error=self._lost.to_wire()))

    def check_context(self) -> None:
        """Raises `WrongContext` unless this is the process and the event loop that opened the client.

        Raises `PeerLost` if the connection has ended.
        """
        self._check_place()
        if self._lost is not None:
            raise from_wire(self._lost.to_wire())

    def _check_place(self) -> None:
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

    def needs_version(self, version: int, what: str) -> None:
        """Raises `VersionMismatch` where the agent is of a version that would not understand."""
        if self._channel is not None and self._channel.version < version:
            raise VersionMismatch(
                f"the agent is too old for {what}",
                field="agent",
                got=f"protocol version {self._channel.version}",
                expected=f"{version} or later",
                hint="Upgrade the agent of this node",
            )

    # -- calls -------------------------------------------------------------------------------------------

    async def call(
        self, message: msgspec.Struct, answer: type[M], *, timeout: float | None = CALL_TIMEOUT
    ) -> M:
        """Sends a call (its `id` is filled in) and waits for an answer of that type; raises what the agent raised."""
        self.check_context()
        assert self._channel is not None
        assert self._loop is not None
        number = next(self._ids)
        checked = _checked(msgspec.structs.replace(message, id=number))
        future: asyncio.Future[LocalMessage] = self._loop.create_future()
        self._calls[number] = future
        try:
            async with asyncio.timeout(timeout):
                await self._send(checked)
                # On one event loop most answers are there already.  Who asks in a loop gives the others their turns.
                if future.done() and self._loop.time() >= self._turn:
                    await asyncio.sleep(0)
                    self._turn = self._loop.time() + _WITHOUT_TURN
                got = await future
        except TimeoutError as error:
            if isinstance(error, HawkError):
                raise
            raise PeerUnreachable(
                "the agent did not answer in time", call=type(message).__name__, seconds=timeout
            ) from None
        finally:
            del self._calls[number]
            if future.done() and not future.cancelled():
                future.exception()  # where the call ended otherwise, nobody asks for it any more
        if isinstance(got, Failed):
            raise from_wire(got.error)
        if not isinstance(got, answer):
            raise InternalError("the agent gave another answer than the call has", got=type(got).__name__)
        return got

    async def _send(self, message: LocalMessage) -> None:
        """Sends, as soon as the queue has room: a thousand calls at once are more than it holds."""
        assert self._channel is not None
        while True:
            try:
                self._channel.send(message)
            except Busy as busy:
                await asyncio.sleep(busy.retry_after)
            else:
                return

    async def round_trip(self, timeout: float = CALL_TIMEOUT) -> float:
        """Seconds that the shortest word to the agent and its answer take."""
        self.check_context()
        assert self._channel is not None
        return await self._channel.round_trip(timeout)

    def post(self, message: ReleaseCache | AbortFetch) -> None:
        """Sends a call whose answer nobody waits for."""
        if self._channel is not None and self._lost is None:
            with contextlib.suppress(HawkError):
                self._channel.send(msgspec.structs.replace(message, id=next(self._ids)))

    def _hear(self, message: LocalMessage) -> None:
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

    def track(self, fetch: Fetch) -> None:
        """Messages of this fetch go to it from now on."""
        self._fetches[fetch.job] = fetch

    def untrack(self, fetch: Fetch) -> None:
        """The fetch has ended."""
        self._fetches.pop(fetch.job, None)

    async def done(self, message: msgspec.Struct, *, timeout: float | None = CALL_TIMEOUT) -> None:
        """A call that is answered by `Done`."""
        await self.call(message, Done, timeout=timeout)


def _checked(message: msgspec.Struct) -> LocalMessage:
    """The message as the agent reads it; raises `InvalidArgument` for what it would refuse, and could not answer."""
    try:
        body = encode_body(message)
    except InvalidArgument as error:
        raise refused_by_encoder(message, error) from error
    try:
        return LOCAL_CODEC.decode(body)
    except BadFrame as error:
        raise refused_by_schema(message, error.message) from error
