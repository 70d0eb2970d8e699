"""The network between a transport's two ends: forwards streams of tcp, stalls them, cuts them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

_PIECE = 16 << 10


class DataProxy:
    """Listens at `host`, on a port whose number is free at `target` too, and forwards there.

    The agent behind it listens at `target` and advertises `host`, so peers come through here.
    """

    def __init__(self, host: str, target: str) -> None:
        self._host = host
        self._target = target
        self.port = 0
        self.carried = 0
        self._server: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listens."""
        for _ in range(100):
            listener = socket.create_server((self._host, 0), backlog=128)
            self.port = listener.getsockname()[1]
            with contextlib.suppress(OSError), socket.create_server((self._target, self.port)):
                self._server = await asyncio.start_server(self._came, sock=listener, limit=_PIECE)
                return
            listener.close()
        raise OSError(f"no port that is free at both {self._host} and {self._target}")

    async def close(self) -> None:
        """Ends all."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stall(self) -> None:
        """From now on nothing passes, until `resume`; nobody is told."""
        self._open.clear()

    def resume(self) -> None:
        """What was kept goes on."""
        self._open.set()

    def cut(self) -> int:
        """Resets every stream; returns how many there were."""
        cut = 0
        for writer in list(self._writers):
            raw = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            cut += 1
        return cut // 2

    async def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(OSError):
                await self._joined(reader, writer)
        finally:
            self._tasks.discard(task)

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there, back = await asyncio.open_connection(self._target, self.port, limit=_PIECE)
            self._writers.add(back)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._forward(reader, back))
                    group.create_task(self._forward(there, writer))
            except* OSError:
                pass
            finally:
                self._writers.discard(back)
                back.close()
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_PIECE):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
            self.carried += len(data)
        await self._open.wait()
        raise ConnectionResetError("one side has ended, so both do")
