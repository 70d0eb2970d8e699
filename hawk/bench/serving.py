"""The other end of a benchmark: a process that serves one shared buffer over transports and plain sockets.

    python -m hawk.bench.serving FD NBYTES WAYS

WAYS is a JSON object: by the name of each way its transport's settings.  A way is called as its transport, or
TRANSPORT+WORD where there are several of one.  It prints one JSON line, `Service` by its fields, and ends with its
standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import uvloop

from hawk.errors import InternalError
from hawk.memory import shared
from hawk.transports import registry

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from hawk.memory.region import U8
    from hawk.memory.shared import SharedBuffer
    from hawk.transports.base import Link, Transport

Ways = dict[str, dict[str, str]]

CHUNK = 1 << 20
"""Bytes of one send or receive call of the plain sockets; 1 MiB with these buffers was the quickest."""

SOCKET_BUFFER = 4 << 20
_TIMEOUT = 30.0


@dataclass(frozen=True)
class Service:
    """Where the bytes can be had: the plain socket's address, each transport's endpoint, and its key in hex."""

    plain: tuple[str, int]
    endpoints: dict[str, dict[str, str]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


# -- in the other process ------------------------------------------------------------------------------------


def _plain(listener: socket.socket, array: U8) -> None:
    """Sends the whole buffer for each byte that comes, to one peer after the other."""
    view = memoryview(array.data)
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(ConnectionError):
            while connection.recv(1):
                for at in range(0, len(view), CHUNK):
                    connection.sendall(view[at : at + CHUNK])


def _make(way: str, settings: Mapping[str, str]) -> Transport:
    name = way.partition("+")[0]
    return registry.make(name, registry.configure(name, settings) if settings else None)


async def _serve(buffer: SharedBuffer, ways: Ways) -> None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    threading.Thread(target=_plain, args=(listener, buffer.array), daemon=True).start()
    transports: dict[str, Transport] = {}
    service = Service(listener.getsockname()[:2])
    try:
        for name, settings in ways.items():
            made = transports[name] = _make(name, settings)
            await made.start()
            made.serve(buffer.region())
            service.endpoints[name] = made.endpoint
            service.keys[name] = made.grant(0, buffer.nbytes).key.hex()
        print(json.dumps(dataclasses.asdict(service)), flush=True)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
        await ended.wait()
    finally:
        for transport in transports.values():
            await transport.close()


# -- in the benchmark ----------------------------------------------------------------------------------------


class Served:
    """`buffer` served by a process of its own, and links to it: `async with Served(buffer, ways) as served`.

    ways           names, or each one's settings by name; see the module
    links, keys    by way
    plain          a connected blocking socket; `receive` fills an array from it
    """

    def __init__(self, buffer: SharedBuffer, ways: tuple[str, ...] | Ways) -> None:
        self._buffer = buffer
        self._ways: Ways = ways if isinstance(ways, dict) else {name: {} for name in ways}
        self._stack = contextlib.AsyncExitStack()
        self.links: dict[str, Link] = {}
        self.keys: dict[str, bytes] = {}

    async def __aenter__(self) -> Served:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        process = self._stack.enter_context(_process(self._buffer, self._ways))
        assert process.stdin is not None
        assert process.stdout is not None
        self._stack.callback(process.stdin.close)
        line = await asyncio.to_thread(process.stdout.readline)
        if not line:
            raise InternalError("the serving process did not start", got=f"status {process.wait()}")
        service = Service(**json.loads(line))
        for name, settings in self._ways.items():
            transport = _make(name, settings)
            await transport.start()
            self._stack.push_async_callback(transport.close)
            link = await transport.connect(service.endpoints[name], timeout=_TIMEOUT)
            self._stack.push_async_callback(link.close)
            self.links[name], self.keys[name] = link, bytes.fromhex(service.keys[name])
        self.plain = self._stack.enter_context(socket.socket())
        self.plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
        self.plain.connect(tuple(service.plain))

    def receive(self, target: U8) -> None:
        """The whole buffer over the plain socket into `target`, in this thread."""
        self.plain.send(b"x")
        view, at = memoryview(target.data), 0
        while at < len(view):
            got = self.plain.recv_into(view[at : at + CHUNK])
            if not got:
                raise InternalError("the serving process is gone")
            at += got


def _process(buffer: SharedBuffer, ways: Ways) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "hawk.bench.serving", str(buffer.fd), str(buffer.nbytes), json.dumps(ways)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[buffer.fd],
        process_group=0,  # Ctrl-C on a terminal is for us alone
    )


def main() -> None:
    """The process."""
    fd, nbytes, ways = sys.argv[1:]
    with shared.map_fd(int(fd), int(nbytes), name="bench") as buffer:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(buffer, json.loads(ways)))


if __name__ == "__main__":
    main()
