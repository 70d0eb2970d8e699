"""A TCP listener, and what is said where there can be none."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from hawk.errors import TransportError
from hawk.transports._forks import ends_with_process

if TYPE_CHECKING:
    from collections.abc import Callable


def listen(
    transport: str,
    host: str,
    port: int,
    *,
    backlog: int = 128,
    tune: Callable[[socket.socket], None] = lambda listener: None,
) -> socket.socket:
    """A listener that does not block; `tune` sets what accepted connections are to inherit.

    Raises `TransportError` naming the address and the transport's setting.
    """
    listener: socket.socket | None = None
    try:
        family, _, _, _, address = socket.getaddrinfo(
            None if host == "*" else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        ends_with_process(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tune(listener)
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        if listener is not None:
            listener.close()
        in_use = error.errno == errno.EADDRINUSE
        raise TransportError(
            "the port is in use" if in_use else "cannot listen",
            field=f"transport.{transport}.{'port' if in_use else 'host'}",
            got=f"{host}:{port}" if in_use else error,
            address=f"{host}:{port}",
        ) from error
    return listener
