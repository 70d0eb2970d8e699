"""What happens to a connection below the messages: it came about, it broke, or the far side refused us.

For connecting sockets only.  ZeroMQ's I/O thread waits for whoever reads these events, which a stranger could use
against a listening socket by connecting again and again; a connecting socket's events are paced by its own
reconnect interval.
"""

from __future__ import annotations

import errno
import struct
from typing import TYPE_CHECKING

import zmq

from hawk.control.receive import ReceiveLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.control.sockets import Endpoint

_EVENT = struct.Struct("=HI")
WATCHED = int(
    zmq.Event.CONNECTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.DISCONNECTED
)
"""What a connecting socket is asked to tell."""

BROKE = "the connection broke"
REFUSED = "the peer does not accept our key"
LATE = "the handshake took too long"
UNLIKE = "the handshake failed: the peer has another key, or does not speak CURVE as we do"


class Monitor:
    """Reads the events of one DEALER.

    on_connected    the far side's kernel has taken the connection; its program may not have
    on_up           a handshake succeeded
    on_down         `on_down(why)`: a handshake failed (`LATE`, `REFUSED`, `UNLIKE`), or the connection ended (`BROKE`),
                    which it also does after each of the others
    """

    def __init__(
        self,
        endpoint: Endpoint,
        on_connected: Callable[[], None],
        on_up: Callable[[], None],
        on_down: Callable[[str], None],
    ) -> None:
        assert endpoint.events is not None
        self._on_connected = on_connected
        self._on_up = on_up
        self._on_down = on_down
        self._loop = ReceiveLoop(endpoint.events, self._event, max_frames=2, max_bytes=4096)

    def start(self) -> None:
        """Begins to read, on the running event loop; what has happened since the socket was made comes first."""
        self._loop.start()

    def close(self) -> None:
        """Stops reading; then the endpoint is to be closed.  Safe to call twice."""
        self._loop.stop()

    def _event(self, _: bytes, frames: list[bytes]) -> None:
        event, value = _EVENT.unpack_from(frames[0])
        if event == zmq.Event.CONNECTED:
            self._on_connected()
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._on_up()
        elif event == zmq.Event.DISCONNECTED:
            self._on_down(BROKE)
        elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self._on_down(REFUSED)
        elif event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL and value == errno.EAGAIN:
            self._on_down(LATE)  # nothing was wrong with what was read: our own timer ended it
        else:
            self._on_down(UNLIKE)
