"""A very small HTTP server for `/metrics`, `/livez` and `/readyz`: one request a connection, bounded in all ways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING

from hawk.endings import gone
from hawk.errors import ControlError, InvalidArgument
from hawk.observe.log import get as get_log
from hawk.observe.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from hawk.observe.metrics import Metrics

log = get_log("hawk.observe.http")

REQUEST_BYTES = 8192
REQUEST_SECONDS = 5.0
CONNECTIONS = 32

_TEXT = "text/plain; charset=utf-8"
_Answer = tuple[HTTPStatus, str, bytes]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `"HOST:PORT"`; brackets around an IPv6 host are taken off."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidArgument(
            "not an address to listen on", field="agent.observe", got=repr(address), expected='"HOST:PORT"'
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


class ObserveServer:
    """Serves one agent's metrics and health.

    `ready` returns None when the agent can take jobs, else the reason why it cannot (one line), which
    `/readyz` answers with 503; `alive` likewise for `/livez`.  What does not live is not ready.
    """

    def __init__(
        self,
        address: str,
        metrics: Metrics,
        ready: Callable[[], str | None],
        *,
        alive: Callable[[], str | None] = lambda: None,
        request_seconds: float = REQUEST_SECONDS,
        connections: int = CONNECTIONS,
    ) -> None:
        self._host, self._port = split_address(address)
        self._metrics = metrics
        self._ready = ready
        self._alive = alive
        self._request_seconds = request_seconds
        self._connections = connections
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens.  Raises `ControlError` naming the address if that cannot be done."""
        try:
            self._server = await asyncio.start_server(
                self._accept, self._host, self._port, limit=REQUEST_BYTES, backlog=self._connections
            )
        except OSError as error:
            raise ControlError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error}",
                field="agent.observe",
                hint="Another process may have it; port 0 takes a free one",
            ) from error
        log.info("observe", address=self.address)

    @property
    def address(self) -> str:
        """`"HOST:PORT"` as bound; the port is a real one even if 0 was asked for."""
        if self._server is None or not self._server.sockets:
            return f"{self._host}:{self._port}"
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def close(self) -> None:
        """Stops listening and ends what is being served.  Safe to call twice."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        serving = dict(self._serving)
        for task in serving:
            task.cancel()
        # Here, too: a task that never ran ends nothing.
        await asyncio.gather(*serving, *map(gone, serving.values()), return_exceptions=True)
        await server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._serving) >= self._connections:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving[task] = writer
        task.add_done_callback(self._serving.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._request_seconds):
                status, kind, body, head_only = await self._answer(reader)
                head = (
                    f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                )
                writer.write(head.encode("ascii") + (b"" if head_only else body))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError):
            pass  # whoever asked went away, or never finished asking
        finally:
            await gone(writer)

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[HTTPStatus, str, bytes, bool]:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return *_plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), False
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        target, _, version = rest.partition(b" ")
        if not version.startswith(b"HTTP/1."):
            return *_plain(HTTPStatus.BAD_REQUEST), False
        if method not in (b"GET", b"HEAD"):
            return *_plain(HTTPStatus.METHOD_NOT_ALLOWED), False
        return *self._page(target.partition(b"?")[0]), method == b"HEAD"

    def _page(self, path: bytes) -> _Answer:
        if path == b"/metrics":
            return HTTPStatus.OK, CONTENT_TYPE, self._metrics.render()
        if path == b"/livez":
            return _health(self._alive())
        if path == b"/readyz":
            return _health(self._alive() or self._ready())
        return _plain(HTTPStatus.NOT_FOUND)


def _health(trouble: str | None) -> _Answer:
    if trouble is None:
        return HTTPStatus.OK, _TEXT, b"ok\n"
    return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{trouble}\n".encode()


def _plain(status: HTTPStatus) -> _Answer:
    return status, _TEXT, f"{status.phrase}\n".encode()
