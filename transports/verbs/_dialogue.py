"""The reading side of a handshake connection: questions and their answers."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING

import msgspec

from hawk.endings import gone
from hawk.errors import HawkError, TransferFailed
from hawk.transports.verbs import _wire

if TYPE_CHECKING:
    from collections.abc import Callable


_REMEMBERED = 1024
"""Announcements kept of grants that nobody has read yet."""


class Dialogue:
    """One connection.  Its end is told to whoever `listen` was given, once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[_wire.Answer]] = {}
        self._listening: asyncio.Task[None] | None = None
        self._next = 1
        self._over = False
        self._announced: dict[bytes, _wire.Entered] = {}

    @classmethod
    async def connect(cls, host: str, port: int) -> Dialogue:
        """Connects.  Raises `OSError`."""
        try:
            return cls(*await asyncio.open_connection(host, port, limit=_wire.MOST_BYTES + 64))
        except ValueError as error:  # how the resolver is told that this can be no name of a host
            raise OSError(errno.EINVAL, f"no address: {error}") from error

    async def first(self, hello: _wire.Hello) -> _wire.Answer:
        """Says hello, and gives the answer.  Raises `OSError`."""
        _wire.write(self._writer, hello)
        return await _wire.read_answer(self._reader)

    def listen(self, on_end: Callable[[HawkError], None]) -> None:
        """From now on answers go to who asked."""
        self._listening = asyncio.get_running_loop().create_task(self._listen(on_end))

    async def ask(self, question: _wire.Enter | _wire.Renew | _wire.Push) -> _wire.Answer:
        """The answer to a question, whose `seq` is set here.  Raises `TransferFailed` when the connection ends."""
        return await self.send(question)[
            1
        ]  # held by nobody: what it fails with has this frame in its traceback

    def send(
        self, question: _wire.Enter | _wire.Renew | _wire.Push
    ) -> tuple[int, asyncio.Future[_wire.Answer]]:
        """Asks, and gives the question's number and where its answer will be."""
        seq, self._next = self._next, self._next + 1
        answer: asyncio.Future[_wire.Answer] = asyncio.get_running_loop().create_future()
        if self._over:
            answer.set_exception(TransferFailed("the peer is gone"))
            return seq, answer
        self._waiting[seq] = answer
        answer.add_done_callback(lambda _: self._waiting.pop(seq, None))
        _wire.write(self._writer, msgspec.structs.replace(question, seq=seq))
        return seq, answer

    def drop(self, seq: int) -> None:
        """Says that a Push is wanted no more."""
        _wire.write(self._writer, _wire.Drop(seq))

    def announced(self, key: bytes) -> _wire.Entered | None:
        """What the peer said of a grant unasked, once."""
        return self._announced.pop(key, None)

    async def _listen(self, on_end: Callable[[HawkError], None]) -> None:
        try:
            while True:
                answer = await _wire.read_answer(self._reader)
                if isinstance(answer, _wire.Entered) and answer.key:
                    self._announced[answer.key] = answer
                    if len(self._announced) > _REMEMBERED:
                        del self._announced[next(iter(self._announced))]
                    continue
                waiting = None if isinstance(answer, _wire.Welcome) else self._waiting.get(answer.seq)
                if waiting is not None and not waiting.done():  # else whoever asked has given up
                    waiting.set_result(answer)
        except OSError as error:
            on_end(TransferFailed("the peer is gone", got=error))

    def abort(self) -> None:
        """Ends the connection at once; questions that wait for an answer fail."""
        self._over = True
        self._writer.transport.abort()
        for waiting in list(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(TransferFailed("the peer is gone"))

    async def close(self) -> None:
        """Ends the connection and returns when it is gone."""
        self.abort()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait({self._listening})
        await gone(self._writer)
