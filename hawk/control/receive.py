"""The one way in which this program receives from a ZeroMQ socket: a loop that gives others their turn.

It works on the plain socket and its descriptor, on any asyncio loop.  The descriptor says that something
*changed*, not that a message is there, and anything done with the socket (a send too) may use that hint up.  So a
turn reads until the socket is empty or the turn is over, in which case the next turn is already scheduled; and
whoever sends calls `poke`.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import zmq

from hawk.errors import BadFrame, ControlError

if TYPE_CHECKING:
    from collections.abc import Callable

    Handler = Callable[[bytes, list[bytes]], None]
    OnBad = Callable[[bytes, BadFrame], None]

TURN_MESSAGES = 64
TURN_SECONDS = 0.001
PEER_MESSAGES = 32
"""Messages of one peer in one turn.  ZeroMQ already takes from its peers in rotation; this bound keeps a peer that
is alone in the queue from taking whole turns away from everything else that runs on the loop."""


# Plain integers: pyzmq's own are enumerations, and combining those costs more than asking the socket.
_EVENTS, _POLLIN, _RCVMORE, _NOW = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE), int(zmq.NOBLOCK)


class ReceiveLoop:
    """Reads one ROUTER, DEALER or PAIR socket and calls `handler(identity, frames)` for each message.

    handler     called on the event loop; `identity` is that of the peer on a ROUTER, else `b""`.  What it
                raises goes to the loop's exception handler, and the next message is read.
    on_bad      called with the identity and a `BadFrame` for a message that was refused here
    on_wake     called whenever the socket's state changed, after the messages were read; a connection that
                came up shows by nothing else
    with_user   read the user id that authentication gave the sender into `user`, for the handler to look at
    max_frames  most frames of a message, `max_bytes` its most bytes; the identity counts in neither

    `messages`, `refused` and `turns` count since the start.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        handler: Handler,
        *,
        on_bad: OnBad | None = None,
        on_wake: Callable[[], None] | None = None,
        with_user: bool = False,
        max_frames: int = 4,
        max_bytes: int = 16 << 20,
        turn_messages: int = TURN_MESSAGES,
        turn_seconds: float = TURN_SECONDS,
        peer_messages: int = PEER_MESSAGES,
    ) -> None:
        self._socket = socket
        self._handler = handler
        self._on_bad = on_bad
        self._on_wake = on_wake
        self._with_user = with_user
        self._has_identity = int(socket.getsockopt(zmq.TYPE)) == zmq.ROUTER
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._turn_messages = turn_messages
        self._turn_seconds = turn_seconds
        self._peer_messages = peer_messages
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1
        self._next: asyncio.Handle | None = None
        self._discarding = False
        self._in_turn = False
        self.user = ""
        self.messages = 0
        self.refused = 0
        self.turns = 0

    def start(self) -> None:
        """Begins to read, on the running event loop.  The first turn comes by itself."""
        if self._loop is not None:
            raise ControlError("this receive loop runs already")
        self._loop = asyncio.get_running_loop()
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._on_readable)
        # What arrived before may have used up the descriptor's hint.
        self._schedule()

    def stop(self) -> None:
        """Ends reading; the handler is not called again.  Safe to call twice, and from a handler."""
        if self._loop is None:
            return
        self._loop.remove_reader(self._fd)
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._loop = None

    def poke(self) -> None:
        """Says that the socket was used outside the loop (a send); a turn is scheduled if messages wait."""
        if self._loop is None or self._next is not None or self._in_turn:
            return
        if self._waiting():
            self._schedule()

    def behind(self) -> bool:
        """Whether messages have arrived that were not read yet; a turn is scheduled then.

        Who would judge others by their silence asks this first: what they have said may lie here.
        """
        if self._loop is None:
            return False
        if self._next is None and self._waiting():
            self._schedule()
        return self._next is not None

    def _waiting(self) -> bool:
        # pyzmq's typed `get` is not told apart by option; this one is an int.
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def _schedule(self) -> None:
        if self._loop is not None and self._next is None:
            self._next = self._loop.call_soon(self._turn)

    def _on_readable(self) -> None:
        # While a turn is scheduled the descriptor may stay readable; that turn will see to it.
        if self._next is None:
            self._turn()

    def _turn(self) -> None:
        self._next = None
        self._in_turn = True
        self.turns += 1
        try:
            empty = self._read_some()
            if self._on_wake is not None and self._loop is not None:
                self._call(self._on_wake)
        finally:
            self._in_turn = False
        if self._loop is None:
            return
        # `on_wake` and the handlers may have sent, and thereby used up the hint for what came meanwhile.
        if not empty or self._waiting():
            self._schedule()

    def _read_some(self) -> bool:
        """Reads messages until the socket is empty (True) or the turn is over (False)."""
        end = time.monotonic() + self._turn_seconds
        by_peer: dict[bytes, int] = {}
        for _ in range(self._turn_messages):
            if self._loop is None:
                return True  # stopped by a handler
            try:
                if not self._waiting():
                    return True  # found out by asking, which costs less than an error
                if self._discarding:
                    self._discard_one()
                    continue
                identity, frames, fault = self._read_one()
            except zmq.Again:
                return True
            except zmq.ZMQError as error:
                # The socket or its context was closed first: there is nothing to read, and never will be.
                self._report(error)
                self.stop()
                return True
            self.messages += 1
            if fault is not None:
                self.refused += 1
                if self._on_bad is not None:
                    self._call(self._on_bad, identity, fault)
            else:
                self._call(self._handler, identity, frames)
            count = by_peer.get(identity, 0) + 1
            if time.monotonic() >= end or (self._has_identity and count >= self._peer_messages):
                return False
            by_peer[identity] = count
        return False

    def _read_one(self) -> tuple[bytes, list[bytes], BadFrame | None]:
        # ZeroMQ hands out whole messages only: once the first frame is there, the others are.
        if self._with_user:
            frame = self._socket.recv(_NOW, copy=False, track=False)
            self.user, first, more = self._user(frame), frame.bytes, frame.more
        else:
            first = self._socket.recv(_NOW)
            more = bool(self._socket.getsockopt(_RCVMORE))
        identity = first if self._has_identity else b""
        frames = [] if self._has_identity else [first]
        nbytes = 0 if self._has_identity else len(first)
        count = len(frames)
        while more:
            if count >= self._max_frames or nbytes > self._max_bytes:
                break
            part = self._socket.recv(_NOW)
            more = bool(self._socket.getsockopt(_RCVMORE))
            frames.append(part)
            nbytes += len(part)
            count += 1
        if more or nbytes > self._max_bytes:
            # The rest is read and dropped a frame at a time, as part of the turns to come: it may be long.
            self._discarding = more
            got = (
                f"more than {self._max_frames} frames"
                if more and count >= self._max_frames
                else f"{nbytes} bytes"
            )
            fault = BadFrame(
                "the message is too large",
                got=got,
                expected=f"at most {self._max_frames} frames and {self._max_bytes} bytes",
            )
            return identity, [], fault
        return identity, frames, None

    def _discard_one(self) -> None:
        self._socket.recv(_NOW)
        self._discarding = bool(self._socket.getsockopt(_RCVMORE))

    @staticmethod
    def _user(frame: zmq.Frame) -> str:
        try:
            return str(frame.get("User-Id"))
        except zmq.ZMQError:
            return ""  # the connection was not authenticated

    def _call(self, function: Callable[..., None], *args: object) -> None:
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001
            # A fault in handling one message must not end the reading of all others.
            self._report(error)

    def _report(self, error: Exception) -> None:
        if self._loop is not None:
            self._loop.call_exception_handler({"message": f"receiving failed: {error!r}", "exception": error})
