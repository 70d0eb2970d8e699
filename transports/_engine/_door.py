"""Where readers of an engine's transport come in."""

from __future__ import annotations

import errno
import socket
from typing import Protocol

from hawk.errors import TransportError
from hawk.transports._forks import ends_with_process


class Settings(Protocol):
    """What the server reads of its transport's settings."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def max_connections(self) -> int: ...
    @property
    def handshake_timeout(self) -> float: ...


def listen(transport: str, config: Settings) -> socket.socket:
    """A listener that does not block.  Raises `TransportError` naming the address and the setting."""
    host, port = config.host, config.port
    listener: socket.socket | None = None
    try:
        family, _, _, _, address = socket.getaddrinfo(
            None if host == "*" else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        ends_with_process(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
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
