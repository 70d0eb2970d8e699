"""Who may read what of a served region, and who is reading it now."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import threading
from typing import TYPE_CHECKING

from hawk.errors import InvalidArgument
from hawk.transports._threads import Latch
from hawk.transports.base import Grant

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.memory.region import Region
    from hawk.transports.shm._board import Board

KEY_BYTES = 32

_LOOK_AGAIN = 0.001
"""Seconds between two looks at readers that do not say when they leave."""


class Held:
    """One grant as the serving side keeps it.

    guests    those inside its range at this moment, as far as they have said so
    board     where readers look for themselves, if it stands on one; it outlives the server that showed it
    slot      its place there, or -1
    """

    __slots__ = ("board", "grant", "guests", "latches", "revoked", "slot")

    def __init__(self, grant: Grant, board: Board | None = None, slot: int = -1) -> None:
        self.grant = grant
        self.board = board
        self.guests: set[object] = set()
        self.latches: list[Latch] = []
        self.revoked = False
        self.slot = slot


class GrantTable:
    """The grants of one served region.  `enter` and `leave` are for serving threads, the rest for the loop.

    board    where readers may look for themselves, and are seen inside without having said so
    """

    def __init__(self) -> None:
        self.board: Board | None = None
        self._lock = threading.Lock()
        self._pepper = secrets.token_bytes(32)
        self._open: dict[bytes, Held] = {}
        self._draining: dict[bytes, Held] = {}
        self._region: Region | None = None

    @property
    def region(self) -> Region | None:
        """The served region."""
        return self._region

    def serve(self, region: Region) -> None:
        """Sets the region; raises `InvalidArgument` where grants of another one are open."""
        with self._lock:
            if self._region is not region and (self._open or self._draining):
                raise InvalidArgument(
                    "grants of another region are still open", field="region", got=region.name
                )
            self._region = region

    def _digest(self, key: bytes) -> bytes:
        # The dictionary compares digests under a secret of our own, so that how long a lookup takes says
        # nothing about how much of a guessed key was right.
        return hashlib.blake2b(key, key=self._pepper, digest_size=16).digest()

    def grant(self, offset: int, nbytes: int) -> Grant:
        """Opens a range; raises `InvalidArgument` when it is not inside the served region."""
        region = self._region
        if region is None:
            raise InvalidArgument("nothing is served yet", field="grant", hint="Call serve(region) first")
        if offset < 0 or nbytes <= 0 or offset + nbytes > region.nbytes:
            raise InvalidArgument(
                "a grant lies outside the served region",
                field="grant",
                got=f"offset {offset}, {nbytes} bytes",
                expected=f"a range of at least one byte within {region.nbytes} bytes",
            )
        key, slot = (secrets.token_bytes(KEY_BYTES), -1) if self.board is None else self.board.key()
        grant = Grant(key, offset, nbytes)
        with self._lock:
            self._open[self._digest(grant.key)] = Held(grant, self.board, slot)
        if self.board is not None and slot >= 0:
            self.board.post(key, slot, offset, offset + nbytes)
        return grant

    def enter(self, key: bytes, low: int, high: int, guest: object) -> Held | None:
        """Lets `guest` into `[low, high)` if the key covers it; None otherwise.  Pair it with `leave`."""
        digest = self._digest(key)
        with self._lock:
            held = self._open.get(digest)
            if held is None or not hmac.compare_digest(held.grant.key, key):
                return None
            if low < held.grant.offset or high <= low or high > held.grant.offset + held.grant.nbytes:
                return None
            held.guests.add(guest)
            return held

    def admit(self, key: bytes, guest: object) -> Held | None:
        """Lets `guest` into all of what the key covers; None for a key that opens nothing.  Pair it with `leave`."""
        digest = self._digest(key)
        with self._lock:
            held = self._open.get(digest)
            if held is None or not hmac.compare_digest(held.grant.key, key):
                return None
            held.guests.add(guest)
            return held

    def leave(self, held: Held, guest: object) -> bool:
        """Says that `guest` is out; True if the grant stood all the time."""
        with self._lock:
            held.guests.discard(guest)
            latches: list[Latch] = []
            if not held.guests and held.latches:
                latches, held.latches = held.latches, []
                if not self._looks(held):
                    self._let_go(held)
            stood = not held.revoked
        for latch in latches:
            latch.set()
        return stood

    @staticmethod
    def _looks(held: Held) -> bool:
        """Whether a reader is inside that has not said so."""
        return held.board is not None and held.slot >= 0 and held.board.inside(held.slot)

    def _let_go(self, held: Held) -> None:
        """Nobody is inside, nor comes in any more."""
        self._draining.pop(self._digest(held.grant.key), None)
        if held.board is not None and held.slot >= 0:
            held.board.free(held.slot)
            held.slot = -1

    def open_grants(self) -> list[Grant]:
        """The grants that are not revoked."""
        with self._lock:
            return [held.grant for held in self._open.values()]

    def _close(self, grant: Grant) -> Held | None:
        """Lets nobody in any more; None if nobody is inside either, and the grant is gone.  Under the lock."""
        digest = self._digest(grant.key)
        held = self._open.pop(digest, None) or self._draining.get(digest)
        if held is None:
            return None
        if held.board is not None and held.slot >= 0:
            held.board.take_down(held.slot)
        if held.guests or self._looks(held):
            self._draining[digest] = held
            return held
        held.revoked = True
        self._let_go(held)
        return None

    def shut(self, grant: Grant) -> bool:
        """Ends a grant that nobody is inside of; False where somebody is, and `revoke` has to see to that."""
        with self._lock:
            return self._close(grant) is None

    async def revoke(
        self, grant: Grant, evict: Callable[[object], None] | None, grace: float, *, patience: float = 0.0
    ) -> bool:
        """Ends a grant; True if nobody is inside it, after at most `patience + grace` seconds.

        From now on nobody comes in.  Who is inside has `patience` seconds to leave by the door; a reader that has
        all its bytes is told before the sender's thread has left, and throwing that one out would cost a
        connection.  Then `evict` throws guests out, one at a time; it must neither block nor call back here.
        Calling this again for a grant that still had guests asks once more; for a grant that is gone the answer
        is True.
        """
        with self._lock:
            held = self._close(grant)
            if held is None:
                return True
            latch = Latch()
            held.latches.append(latch)
        if patience > 0 and not held.revoked:
            await asyncio.wait({latch.future}, timeout=patience)
        with self._lock:
            held.revoked = True
            if not held.guests and not self._looks(held):
                self._let_go(held)
                return True
            if evict is not None:
                # Under the lock, so that only those still inside are thrown out.
                for guest in held.guests:
                    evict(guest)
        return await self._left(held, latch, grace)

    async def _left(self, held: Held, latch: Latch, grace: float) -> bool:
        """Whether everybody has left, after at most so many seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + grace
        while True:
            with self._lock:
                looks = self._looks(held)
                if not held.guests and not looks:
                    self._let_go(held)
                    return True
            left = until - loop.time()
            if left <= 0:
                return False
            if looks and not held.guests:
                await asyncio.sleep(
                    min(left, _LOOK_AGAIN)
                )  # it is copying, for microseconds, or it stands still
            else:
                await asyncio.wait({latch.future}, timeout=left)
