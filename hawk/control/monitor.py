"""What happens to a connection below the messages: it broke, or the far side refused us.

For connecting sockets only.  ZeroMQ's I/O thread waits for whoever reads these events, which a stranger could use
against a listening socket by connecting again and again; a connecting socket's events are paced by its own
reconnect interval.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import zmq

from hawk.control.receive import ReceiveLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.control.sockets import Endpoint

_EVENT = struct.Struct("=HI")
_WATCHED = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.DISCONNECTED
)

BROKE = "the connection broke"
REFUSED = "the peer does not accept our key"


class Monitor:
    """Calls `on_up()` when a handshake succeeded and `on_down(why)` when a connection broke or was refused."""

    def __init__(self, endpoint: Endpoint, on_up: Callable[[], None], on_down: Callable[[str], None]) -> None:
        self._watched = endpoint.raw
        self._on_up = on_up
        self._on_down = on_down
        self._raw = endpoint.raw.get_monitor_socket(_WATCHED)
        self._raw.linger = 0
        self._loop = ReceiveLoop(self._raw, self._event, max_frames=2, max_bytes=4096)

    def start(self) -> None:
        """Begins to watch, on the running event loop."""
        self._loop.start()

    def close(self) -> None:
        """Stops watching.  Call it before the watched socket is closed.  Safe to call twice."""
        self._loop.stop()
        if not self._raw.closed:
            if not self._watched.closed:
                self._watched.disable_monitor()
            self._raw.close(linger=0)

    def _event(self, _: bytes, frames: list[bytes]) -> None:
        event, _value = _EVENT.unpack_from(frames[0])
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._on_up()
        elif event == zmq.Event.DISCONNECTED:
            self._on_down(BROKE)
        elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self._on_down(REFUSED)
        else:
            self._on_down("the handshake failed: the peer has another key, or does not speak CURVE as we do")
