"""The serving side: a listener for handshakes, and a session for every reader that was let in."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
from typing import TYPE_CHECKING

from hawk.endings import all_ended, gone, outlast
from hawk.errors import HawkError, RegistrationFailed, TransportError
from hawk.observe.log import get as get_log
from hawk.transports.verbs import _wire
from hawk.transports.verbs._device import BIND, VerbsError
from hawk.transports.verbs._session import Session

if TYPE_CHECKING:
    from hawk.transports._grants import GrantTable
    from hawk.transports.verbs._register import Registered
    from hawk.transports.verbs._shared import Shared

log = get_log("hawk.transports.verbs")

_FIRST_FRAME = 8 << 10


class Server:
    """Listens, admits and serves, all on the event loop.

    pools    windows of each port's device; empty where grants are opened by registrations
    trouble  why the served region could not be registered the last time, None where it could
    """

    def __init__(
        self,
        shared: Shared,
        grants: GrantTable,
        token: bytes,
    ) -> None:
        self.shared = shared
        self.config = shared.config
        self.grants = grants
        self.ports = shared.ports
        self.worker = shared.worker
        self.pools = shared.pools
        self.sessions: set[Session] = set()
        self._token = token
        self._listener: asyncio.Server | None = None
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # in order of arrival
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.port = 0
        self.trouble: str | None = None

    async def start(self, host: str) -> None:
        """Binds and listens.  Raises `TransportError` naming the address."""
        port = self.config.port
        # To its end even if cancelled: asyncio loses a listener that is cancelled while it begins.
        beginning = asyncio.get_running_loop().create_task(self._listen(host, port))
        try:
            await outlast(beginning)
        finally:
            failed = beginning.exception()
        if isinstance(failed, OSError):
            in_use = failed.errno == errno.EADDRINUSE
            raise TransportError(
                "the port is in use" if in_use else "cannot listen",
                field="transport.verbs.port" if in_use else "transport.verbs.host",
                got=f"{host}:{port}" if in_use else failed,
                address=f"{host}:{port}",
            ) from failed
        if failed is not None:
            raise failed

    async def _listen(self, host: str, port: int) -> None:
        self._listener = await asyncio.start_server(
            self._accept, None if host == "*" else host, port, limit=_wire.MOST_BYTES + 64
        )
        self.port = int(self._listener.sockets[0].getsockname()[1])

    @property
    def listening(self) -> bool:
        """Whether readers are let in."""
        return self._listener is not None and self._listener.is_serving()

    async def registered(self) -> Registered:
        """The served region's registration, made if need be.  Raises `RegistrationFailed`."""
        region = self.grants.region
        if region is None:
            raise RegistrationFailed("nothing is served yet", hint="Call serve(region) first")
        try:
            # Without windows grants are registered one by one, and this one opens nothing to anybody.
            found = await self.shared.registrations.of(region, BIND if self.pools else 0)
        except RegistrationFailed as error:
            self.trouble = str(error)
            raise
        self.trouble = None
        return found

    def announce(self, key: bytes, reader: bytes) -> None:
        """Opens a grant to the reader that calls itself so, on each of its links."""
        for session in self.sessions:
            if hmac.compare_digest(session.reader, reader):
                session.announce(key)

    async def close(self) -> None:
        """Closes the listener and every session."""
        self._closing = True
        listener, self._listener = self._listener, None  # it refers to us in turn
        if listener is not None:
            listener.close()
        await all_ended(
            *map(gone, list(self._strangers)), *(session.close() for session in list(self.sessions))
        )
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in self.pools.values():
            await pool.close()

    # -- the door ------------------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing:
            writer.transport.abort()
            return
        if len(self._strangers) >= self.config.max_strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        task = asyncio.get_running_loop().create_task(self._welcome(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first byte to its last."""
        try:
            try:
                async with asyncio.timeout(self.config.handshake_timeout):
                    hello = await _wire.read_question(reader, _FIRST_FRAME)
            finally:
                known = writer in self._strangers
                self._strangers.pop(writer, None)
            if not known or not isinstance(hello, _wire.Hello) or hello.version != _wire.VERSION:
                return
            if not hmac.compare_digest(hello.token, self._token):
                return
            await self._serve(hello, reader, writer)
        except (OSError, TimeoutError):
            pass  # the peer is gone, has talked nonsense or was cut off: its connection is all that ends
        except Exception as error:
            if isinstance(error, HawkError):
                log.warning("a reader's session ended", reason=str(error))
            else:
                log.exception("a reader's session failed on a fault of ours")
        finally:
            await gone(writer)

    async def _serve(
        self, hello: _wire.Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if len(self.sessions) >= self.config.max_connections:
            _wire.write(writer, _wire.Refused(0, _wire.FULL, "transport.verbs.max_connections"))
            await writer.drain()
            return
        session = Session(self, reader, writer)
        self.sessions.add(session)
        try:
            await session.run(hello)
        except VerbsError as error:
            log.warning("a reader could not be served", reason=str(error))
            _wire.write(writer, _wire.Refused(0, _wire.FAILED, str(error)))
            with contextlib.suppress(OSError):
                await writer.drain()
        finally:
            await session.close()
            self.sessions.discard(session)
