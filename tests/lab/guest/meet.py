"""What two guests say to each other beside their tests: whole JSON values, over TCP."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from types import TracebackType
from typing import Any

from tests.lab.guest.rdma import address, node

PORT = 7099
LIMIT = 240.0


class Meeting:
    """A connection between the two guests' tests, which start at about the same time.

    `exchange(value)` gives the other's value, and is a barrier.
    """

    def __init__(self, port: int = PORT) -> None:
        self._socket = self._accept(port) if node() == 1 else self._connect(port)
        self._socket.settimeout(LIMIT)
        self._file = self._socket.makefile("r")

    def _accept(self, port: int) -> socket.socket:
        with socket.create_server((address(1), port)) as listener:
            listener.settimeout(LIMIT)
            return listener.accept()[0]

    def _connect(self, port: int) -> socket.socket:
        end = time.monotonic() + LIMIT
        while True:
            with contextlib.suppress(OSError):
                return socket.create_connection((address(1), port), timeout=LIMIT)
            assert time.monotonic() < end, "the other guest never listened"
            time.sleep(0.2)

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._socket.close()

    def tell(self, value: Any) -> None:
        """Sends a value."""
        self._socket.sendall(json.dumps(value).encode() + b"\n")

    def hear(self) -> Any:
        """The other's next value."""
        line = self._file.readline()
        assert line, "the other guest's test has ended"
        return json.loads(line)

    def exchange(self, value: Any = None) -> Any:
        """Sends a value and waits for the other's."""
        self.tell(value)
        return self.hear()
