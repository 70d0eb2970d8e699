"""A connection that takes its time: a TCP relay that hands every byte on after a fixed delay, in order."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

_READ = 1 << 16


class Distance:
    """Relays each connection to `target`, `delay` seconds later each way: `async with Distance(0.01) as far`.

    address    `"tcp://HOST:PORT"` to connect to
    target     the same of who is far away; to be set before anybody connects
    """

    def __init__(self, delay: float) -> None:
        self.target = ""
        self.address = ""
        self._delay = delay
        self._relays: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Distance:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"tcp://{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        task.add_done_callback(self._relays.discard)
        host, _, port = self.target.removeprefix("tcp://").rpartition(":")
        with contextlib.suppress(OSError, asyncio.CancelledError):
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            with contextlib.closing(writer), contextlib.closing(far_writer):
                await asyncio.gather(self._hand_on(reader, far_writer), self._hand_on(far_reader, writer))

    @staticmethod
    def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
        if not writer.is_closing():  # the near end may have gone while the bytes were on their way
            writer.write(data)

    async def _hand_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(_READ):
            loop.call_later(self._delay, self._write, writer, data)
        # Whatever is on its way arrives; then the other side learns of the end.
        await asyncio.sleep(self._delay)
        writer.close()
