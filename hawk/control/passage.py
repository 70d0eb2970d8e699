"""Between a client and an agent that run on one event loop: messages are handed over, and no socket lies between.

What a `Channel` is to a client of another process, a `Passage` is to one of the agent's own: each message costs a
function call instead of two threads' turns.  It carries the same messages, and what comes out of it is nobody else's,
as it would be from a socket.
"""

from __future__ import annotations

import asyncio
import contextvars
import secrets
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from hawk.control.frames import PROTOCOL_VERSION, Codec, encode_body
from hawk.errors import PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Passage(Generic[T]):
    """Made by the agent for one client; `identity` is how the agent tells it from others.

    codec        of the messages
    to_agent     `to_agent(identity, message)` takes what the client says, and may answer before it returns
    to_client    `to_client(message)` takes what the agent says
    on_closed    `on_closed(identity)`, once
    context      the context variables that the agent's side runs with, whatever the client's are
    """

    version = PROTOCOL_VERSION
    """The version that is spoken: there is one program, and so no other."""

    def __init__(
        self,
        codec: Codec[T],
        to_agent: Callable[[bytes, T], None],
        to_client: Callable[[T], None],
        on_closed: Callable[[bytes], object],
        context: contextvars.Context,
    ) -> None:
        # Random like that of a socket, for the agent keeps both kinds in one table.
        self.identity = b"p" + secrets.token_bytes(16)
        self._codec = codec
        self._to_agent = to_agent
        self._to_client = to_client
        self._on_closed = on_closed
        self._context = context
        self._closed = False

    def send(self, message: T) -> None:
        """From the client to the agent, now; the message is the agent's from here on.  Raises `PeerLost` if closed."""
        if self._closed:
            raise PeerLost("the way to the agent is closed")
        # A copy, since one context cannot be entered twice, and the agent may call back, and be called again.
        self._context.copy().run(self._to_agent, self.identity, message)

    def answer(self, message: T) -> None:
        """From the agent to the client, now; once it is closed nobody hears it."""
        if not self._closed:
            self._to_client(self._codec.decode(encode_body(message)))

    async def round_trip(self, timeout: float) -> float:
        """Seconds until the loop has come round once: whoever hears and answers does it in the loop's turns."""
        began = time.perf_counter()
        async with asyncio.timeout(timeout):
            await asyncio.sleep(0)
        return time.perf_counter() - began

    def close(self) -> None:
        """Nothing passes any more.  Safe to call twice, and from either side."""
        if not self._closed:
            self._closed = True
            self._on_closed(self.identity)
