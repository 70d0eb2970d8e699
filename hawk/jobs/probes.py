"""Trying a transport out: the prefill side lets a peer read a few random bytes, which says more than any table.

What `hawk doctor --peer` asks for.  A probe holds its bytes of the arena as a chunk of a job would, and for some
seconds at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from typing import TYPE_CHECKING

import numpy as np

from hawk.control.messages import Abort, Ended, Probe, Probed, TransportTry
from hawk.errors import (
    Aborted,
    Busy,
    DeadlineExceeded,
    HawkError,
    NotViable,
    TransferFailed,
    VersionMismatch,
    from_wire,
)
from hawk.jobs.lifting import lift
from hawk.jobs.room import RoomAsk
from hawk.jobs.shelf import Shelf
from hawk.memory.region import Segments
from hawk.memory.shared import alloc
from hawk.transports.registry import objection

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.control.messages import PeerMessage
    from hawk.jobs.fetch import FetchContext
    from hawk.jobs.guests import Guests
    from hawk.jobs.peers import PeerSession
    from hawk.jobs.serve import ServeContext

NBYTES = 16
MOST = 16
"""Probes of all peers at a time."""

LONGEST = 10.0
"""Seconds that a probe holds its bytes at most."""

SINCE = 2
"""The protocol version that has probes."""

_AGAIN = 1.0


# -- the side that is read from ----------------------------------------------------------------------------


class Probes:
    """The probes that peers have open here.

    guests    who is behind a connection
    send      puts a message on the way to it; never waits, never raises
    """

    def __init__(
        self, context: ServeContext, guests: Guests, send: Callable[[bytes, PeerMessage], None]
    ) -> None:
        self._context = context
        self._guests = guests
        self._send = send
        self._open: dict[tuple[bytes, str], _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def take(self, identity: bytes, message: PeerMessage) -> bool:
        """Whether a frame was about a probe, and is dealt with.  Any may come twice."""
        if not isinstance(message, Probe | Abort):
            return False
        key = (identity, message.job)
        known = self._open.get(key)
        if isinstance(message, Abort):
            if known is not None:
                known.over.set()
            return known is not None
        if known is not None:
            if known.answer is not None:
                self._send(identity, known.answer)
            return True
        consumer = self._guests.name(identity)
        if consumer is None:
            return self._refuse(identity, message, self._guests.unknown(identity, "probe"))
        if len(self._open) >= MOST:
            busy = Busy(f"the peer serves at most {MOST} probes at a time", retry_after=1.0)
            return self._refuse(identity, message, busy)
        known = self._open[key] = _Open()
        known.task = asyncio.get_running_loop().create_task(self._serve(identity, consumer, message, known))
        known.task.add_done_callback(lambda _: self._open.pop(key, None))
        return True

    def _refuse(self, identity: bytes, probe: Probe, error: HawkError) -> bool:
        self._send(identity, Ended(probe.job, error.to_wire()))
        return True

    async def _serve(self, identity: bytes, consumer: str, probe: Probe, this: _Open) -> None:
        context, transport = self._context, self._context.transports.get(probe.transport)
        shelf = Shelf(context.room, context.quarantine, transport, job=probe.job, credit=NBYTES)
        try:
            async with asyncio.timeout(LONGEST):
                if transport is None:
                    raise NotViable("the peer has no such transport", field="transport", got=probe.transport)
                ask = RoomAsk(
                    consumer, NBYTES, 0, math.inf, NBYTES, owner=probe.job, transport=probe.transport
                )
                held = await shelf.place(0, ask)
                offset, content = held.range.offset, secrets.token_bytes(NBYTES)
                context.room.arena.region.array[offset : offset + NBYTES] = np.frombuffer(content, np.uint8)
                if transport.shadow is not None:
                    await lift(context.room.arena.region, transport.shadow, offset, NBYTES)
                held.grant = transport.grant(offset, NBYTES)
                this.answer = Probed(probe.job, offset, held.grant.key, content)
                self._send(identity, this.answer)
                await this.over.wait()
        except HawkError as error:
            self._send(identity, Ended(probe.job, error.to_wire()))
        except TimeoutError:
            late = DeadlineExceeded("the probe was not over in time", seconds=LONGEST)
            self._send(identity, Ended(probe.job, late.to_wire()))
        finally:
            await shelf.clear(on_its_word=this.over.is_set(), reason="a peer did not end its probe")

    async def close(self) -> None:
        """Ends every probe."""
        tasks = [known.task for known in self._open.values() if known.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Open:
    """One probe: what was answered, and whether the reader said that it is over."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.answer: Probed | None = None
        self.task: asyncio.Task[None] | None = None


# -- the side that reads -----------------------------------------------------------------------------------


async def try_transports(context: FetchContext, peer: str, timeout: float) -> list[TransportTry]:
    """Reads a few bytes of `peer` by every transport that either side has, one after another.

    Raises what keeps the agents from talking at all: `UnknownPeer`, `PeerUnreachable`, `VersionMismatch`.
    """
    until = time.monotonic() + timeout
    async with context.peers.session(peer, "", timeout=timeout) as session:
        if session.version < SINCE:
            raise VersionMismatch(
                "the peer's protocol version has no probes",
                field="peer",
                got=f"version {session.version}",
                expected=f"version {SINCE}",
                peer=peer,
                hint="Upgrade that agent",
            )
        names = list(dict.fromkeys((*context.prefer, *session.endpoints)))
        tries = []
        for i, name in enumerate(names):
            # What is left is shared out, so that a transport that hangs leaves time for the others.
            share = max(until - time.monotonic(), 0.0) / (len(names) - i)
            tries.append(await _try(context, session, name, share))
        return tries


async def _try(context: FetchContext, session: PeerSession, name: str, timeout: float) -> TransportTry:
    try:
        # Not `choose`, whose error tells of others that a whole preference leaves out; this is one name of it.
        if (why := objection(name, context.transports, session.endpoints)) is not None:
            return TransportTry(transport=name, ok=False, text=why[:1024])
        async with asyncio.timeout(timeout):
            seconds = await _read(context, session, name, timeout)
    except HawkError as error:
        return TransportTry(transport=name, ok=False, text=str(error)[:1024])
    except TimeoutError:
        return TransportTry(transport=name, ok=False, text=f"nothing was read in {timeout:.1f} s")
    return TransportTry(transport=name, ok=True, seconds=seconds)


async def _read(context: FetchContext, session: PeerSession, name: str, timeout: float) -> float:
    """Seconds that reading a probe took; raises what went wrong."""
    job = secrets.token_hex(16)
    answer: asyncio.Future[Probed] = asyncio.get_running_loop().create_future()

    def told(message: PeerMessage) -> None:
        if isinstance(message, Probed) and not answer.done():
            answer.set_result(message)
        elif isinstance(message, Ended):
            lost(from_wire(message.error))

    def lost(error: HawkError) -> None:
        if not answer.done():
            answer.set_exception(error)

    session.attach(job, told, lost)
    try:
        link = await context.links.get(session, name, timeout=timeout)
        while not answer.done():
            session.send(Probe(job, name))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(answer), _AGAIN)
        probed = answer.result()
        memory = alloc(NBYTES, name="probe")
        try:
            region = memory.region()
            wanted = Segments.of([(0, 0, probed.offset, len(probed.content))])
            began = time.perf_counter()
            await link.read(probed.key, wanted, [region], timeout=timeout)
            took = time.perf_counter() - began
            got = region.array[: len(probed.content)].tobytes()
        finally:
            memory.close()
        if got != probed.content:
            raise TransferFailed(
                "other bytes were read than the peer has there", got=got.hex(), expected=probed.content.hex()
            )
        return took
    finally:
        if not answer.cancel():
            answer.exception()  # so that one which came too late is not told as never looked at
        session.detach(job)
        session.send(Abort(job, Aborted("the probe is over", by="consumer").to_wire()))
