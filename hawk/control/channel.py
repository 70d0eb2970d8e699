"""The connecting end of a link: see `hawk.control.link` for what both ends promise each other."""

from __future__ import annotations

import asyncio
import enum
import time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hawk.control.beat import BEAT, PING, PONG, Beat
from hawk.control.frames import (
    PROTOCOL_VERSION,
    Codec,
    Header,
    Kind,
    Ping,
    Pong,
    decode_header,
    encode_body,
    encode_header,
    generation,
    refused_version,
)
from hawk.control.line import SILENT, Line
from hawk.control.monitor import REFUSED
from hawk.control.receive import ReceiveLoop
from hawk.errors import BadFrame, Busy, ControlError, HawkError, PeerLost, PeerUnreachable, VersionMismatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.control.sockets import Endpoint

T = TypeVar("T")


__all__ = ["SILENT", "Channel", "State"]


class State(enum.Enum):
    """Where a channel stands with the far end."""

    CONNECTING = "connecting"
    """It was never heard."""
    UP = "up"
    LOST = "lost"
    """It was heard, or waited for, and is silent; ZeroMQ goes on trying to connect."""
    CLOSED = "closed"


class Channel(Generic[T]):
    """A DEALER that talks with one server, and finds out when it is gone, back, or another process.

    endpoint      from `Sockets.dealer`; closed with the channel
    codec         decodes what comes in
    handler       `handler(header, message)`, called on the event loop
    on_up         `on_up()` when the server is heard for the first time, or again after it was lost
    on_lost       `on_lost(error)`, once per loss: `PeerLost`, before the first contact `PeerUnreachable`, or
                  `VersionMismatch` if the server refused our version
    on_restarted  `on_restarted(old, new)` when frames come from another generation than before.  It comes ahead
                  of `on_up` and of the first message of the new generation
    on_bad        `on_bad(error)` for each frame that was refused
    peer          name of the server for error texts

    After a connection broke the server has one beat to come back before it counts as lost.
    Use `start` on the event loop, `await up(timeout)`, and `close` at the end.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        codec: Codec[T],
        handler: Callable[[Header, T], None],
        *,
        on_lost: Callable[[HawkError], None],
        on_restarted: Callable[[int, int], None],
        on_up: Callable[[], None] | None = None,
        on_bad: Callable[[HawkError], None] | None = None,
        peer: str = "",
        beat: Beat = BEAT,
        own_generation: int | None = None,
        version: int = PROTOCOL_VERSION,
    ) -> None:
        self.endpoint = endpoint
        self.peer = peer
        self.state = State.CONNECTING
        self.generation = generation() if own_generation is None else own_generation
        self.peer_generation = 0
        """The server's generation, 0 until it was heard."""
        self.version = version
        """The version that is spoken with this server."""
        self._newest = version
        self._codec = codec
        self._handler = handler
        self._on_lost = on_lost
        self._on_restarted = on_restarted
        self._on_up = on_up
        self._on_bad = on_bad
        self._beat = beat
        self._missed = 0
        self._broken = False
        self._refused: VersionMismatch | None = None
        self._seq = 0
        self._seq_at_break = 0
        self._asked = False
        self._timer: asyncio.TimerHandle | None = None
        self._trips: dict[int, asyncio.Future[float]] = {}
        self._waiters: dict[asyncio.Future[None], bool] = {}
        self._receive = ReceiveLoop(
            endpoint.raw,
            self._take,
            on_bad=lambda _, error: self._bad(error),
            on_wake=self._woken,
            max_frames=2,
            max_bytes=endpoint.limits.frame_bytes,
        )
        self._line = Line(endpoint, self._connected, self._disconnected, self._receive.poke)

    @property
    def address(self) -> str:
        """Where the server is."""
        return self.endpoint.address

    @property
    def trouble(self) -> str:
        """What keeps the server from being heard, as far as that is known; else empty."""
        return self._line.trouble if self._refused is None else str(self._refused)

    @property
    def reason(self) -> str:
        """Why a question has no answer, as far as that is known; else empty."""
        return self._line.reason

    def story(self) -> str:
        """What has happened to the connection lately, in words, for a log."""
        return f"{self._line.story()}; asked {self._seq} times"

    def start(self) -> None:
        """Begins to talk, on the running event loop."""
        self._line.start()
        self._receive.start()
        self._timer = asyncio.get_running_loop().call_later(self._beat.interval, self._tick)

    def close(self) -> None:
        """Stops, and closes the endpoint; no callback comes any more.  Safe to call twice."""
        if self.state is State.CLOSED:
            return
        self.state = State.CLOSED
        self._receive.stop()
        self._line.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.endpoint.close()
        self._end_waits(ControlError("the channel was closed", peer=self.peer or None))

    async def up(self, timeout: float, *, patient: bool = True) -> None:
        """Waits until the server is heard, at most `timeout` seconds.

        Raises `PeerUnreachable` at the deadline, with what is known of the reason, `VersionMismatch` as soon as
        the server refuses every version of ours, and `ControlError` if the channel is closed.  Unless it is
        `patient`, it raises `PeerUnreachable` as soon as the server refuses our key, too.
        """
        if self.state is State.CLOSED:
            raise ControlError("the channel is closed", peer=self.peer or None)
        if self.state is State.UP and not self._broken:
            return
        if self._refused is not None:
            raise self._refused
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters[waiter] = patient
        until = loop.time() + timeout
        try:
            await asyncio.wait({waiter}, timeout=timeout)
            if not waiter.done() and loop.time() - until > self._beat.interval:
                # This loop stood still, and the deadline comes before what was said meanwhile is read.
                await asyncio.wait({waiter}, timeout=self._beat.interval)
            if not waiter.done():
                raise self._unreachable(timeout)
            waiter.result()
        finally:
            del self._waiters[waiter]
            if not waiter.cancel() and not waiter.cancelled():
                waiter.exception()  # asked for, whoever was cancelled meanwhile

    def send(self, message: object) -> None:
        """Sends to the server, without waiting.

        Raises `Busy` if the queue is full, `PeerUnreachable` or `PeerLost` if the server was not heard yet or is
        lost, `InvalidArgument` if the message cannot be encoded.
        """
        if self.state is State.CLOSED:
            raise ControlError("the channel is closed", peer=self.peer or None)
        if self.state is not State.UP:
            raise self._refused or self._silent()
        if self._broken:
            raise PeerUnreachable("the connection broke and is being made again", **self._facts())
        self._send(Kind.MESSAGE, encode_body(message))

    def _send(self, kind: Kind, body: bytes) -> None:
        header = encode_header(Header(self.version, kind, self.generation, self.peer_generation))
        try:
            self.endpoint.send([header, body])
        finally:
            self._receive.poke()

    def _facts(self) -> dict[str, Any]:
        return {"peer": self.peer or None, "address": self.address, "reason": self.reason or None}

    def _unreachable(self, seconds: float) -> PeerUnreachable:
        if self._line.trouble == REFUSED:
            return self._unaccepted()
        return PeerUnreachable("the peer did not answer in time", **self._facts(), seconds=seconds)

    def _unaccepted(self) -> PeerUnreachable:
        whose = self.peer or "that agent"
        hint = f"Put this agent's public key into the security.peers_file of {whose}, and send it SIGHUP"
        return PeerUnreachable(REFUSED, peer=self.peer or None, address=self.address, hint=hint)

    def _silent(self) -> HawkError:
        if self.peer_generation == 0:
            return self._unreachable(self._beat.timeout)
        return PeerLost("the peer fell silent", **self._facts())

    async def round_trip(self, timeout: float) -> float:
        """Seconds that one PING and its PONG take on this connection; raises `PeerUnreachable` at the deadline."""
        loop = asyncio.get_running_loop()
        self._ask()
        wanted = self._seq
        waiter = self._trips[wanted] = loop.create_future()
        began = time.perf_counter()
        try:
            async with asyncio.timeout(timeout):
                return float(await waiter - began)
        except TimeoutError:
            raise self._unreachable(timeout) from None
        finally:
            del self._trips[wanted]

    # -- what comes in -----------------------------------------------------------------------------------

    def _take(self, _: bytes, frames: list[bytes]) -> None:
        try:
            self._accept(frames)
        except (BadFrame, VersionMismatch, PeerLost) as error:
            self._bad(error)

    def _accept(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            raise BadFrame("a message has two frames", got=len(frames), expected=2)
        spoken = refused_version(frames[0])
        if spoken is not None:
            self._step_down(spoken)
            return
        header = decode_header(frames[0], self._newest)
        if header.to_generation not in (0, self.generation):
            raise PeerLost(
                "the message was meant for an earlier generation of this process",
                field="to_generation",
                got=header.to_generation,
                expected=self.generation,
            )
        self._heard(header)
        if self.state is State.CLOSED:
            return  # closed by a callback
        if header.kind is Kind.PING:
            self._try(Kind.PONG, PONG.encode(Pong(PING.decode(frames[1]).seq)))
        elif header.kind is Kind.PONG:
            # Frames of the old connection may still come after it broke; an answer to a later question cannot.
            seq = PONG.decode(frames[1]).seq
            trip = self._trips.get(seq)
            if trip is not None and not trip.done():
                trip.set_result(time.perf_counter())
            if seq > self._seq_at_break:
                self._broken = False
                self._end_waits()
        elif header.kind is Kind.MESSAGE:
            self._handler(header, self._codec.decode(frames[1]))

    def _heard(self, header: Header) -> None:
        self._missed = 0
        self._line.heard()
        self._refused = None
        self.version = min(header.version, self._newest)
        old, self.peer_generation = self.peer_generation, header.from_generation
        if old not in (0, self.peer_generation):
            self._on_restarted(old, self.peer_generation)
        if self.state in (State.CONNECTING, State.LOST):
            self.state = State.UP
            self._line.note("heard")
            self._broken = False
            self._end_waits()
            if self._on_up is not None:
                self._on_up()

    def _end_waits(self, error: HawkError | None = None) -> None:
        """Ends every `up`, well or with an error."""
        for waiter in self._waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    def _step_down(self, spoken: int) -> None:
        """The server refused our version and says that `spoken` is its newest."""
        if spoken == self.version:
            return  # an answer to an earlier frame, from before we stepped down
        if 1 <= spoken == self._newest - 1:
            self.version = spoken
            self._ask()
            return
        error = VersionMismatch(
            "the peer refuses our protocol version",
            got=spoken,
            expected=self._newest if self._newest <= 1 else f"{self._newest - 1} or {self._newest}",
            hint="Update the older of the two agents; neighbouring versions understand each other",
            **self._facts(),
        )
        first = self._refused is None
        self._refused = error
        if first:
            self._end_waits(error)
            self._lose(error)

    def _bad(self, error: HawkError) -> None:
        if self._on_bad is not None:
            self._on_bad(error)

    # -- whether it is there -----------------------------------------------------------------------------

    def _woken(self) -> None:
        # A connection that came up shows by nothing but the socket's being writable: ask at once.
        if (self.state is not State.UP or self._broken) and not self._asked:
            self._ask()

    def _ask(self) -> None:
        self._seq += 1
        self._asked = self._try(Kind.PING, PING.encode(Ping(self._seq)))

    def _try(self, kind: Kind, body: bytes) -> bool:
        try:
            self._send(kind, body)
        except (Busy, ControlError):
            return False
        return True

    def _connected(self) -> None:
        self._asked = False
        self._woken()

    def _disconnected(self, refused: bool) -> None:
        if refused:
            for waiter, patient in self._waiters.items():
                if not patient and not waiter.done():
                    waiter.set_exception(self._unaccepted())
        self._asked = False
        # A break gets a beat; see the class.
        if self.state is State.UP and not self._broken:
            self._broken = True
            self._seq_at_break = self._seq
            self._missed = 0

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._beat.interval, self._tick)
        # What lies unread was said by the server, and by nobody else.
        self._missed += not self._receive.behind()
        most = 1 if self._broken else self._beat.most_missed
        if self._missed > most:
            self._lose(self._silent())
        if self.state is not State.CLOSED:
            self._ask()

    def _lose(self, error: HawkError) -> None:
        if self.state not in (State.CONNECTING, State.UP):
            return
        self.state = State.LOST
        self._line.note("lost")
        # Whoever comes back may be a newer program than the one that we stepped down for.
        self.version = self._newest
        self._on_lost(error)
