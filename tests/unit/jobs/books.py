"""What must hold of jobs whatever happens to them: a pure model, kept from what is seen at their edges.

It knows ranges and who owns them, readers and what they are inside of, leases as both sides' frames make them, what was
said about each job, and which blocks a fetch may write.  It shares no code with what it is held against.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from hawk.control.messages import (
    Abort,
    Accepted,
    Consumed,
    Ended,
    Fetch,
    PeerMessage,
    Prepared,
    Released,
)

FETCH_ORDER = ["reserving", "queued", "connecting", "requested", "receiving", "releasing", "ready"]
SERVE_ORDER = ["waiting", "queued", "preparing", "prepared", "draining", "released"]


@dataclass(eq=False)
class Reader:
    """Somebody in the middle of a read of `[start, end)` of the arena."""

    job: str
    chunk: int
    start: int
    end: int


@dataclass
class Piece:
    """`[start, end)` of the arena."""

    start: int
    end: int
    owner: str
    kept: bool = False  # in quarantine


@dataclass
class Wanted:
    """A fetch of the decode side."""

    number: int
    blocks: tuple[int, ...]
    busy: bool
    until: float
    states: list[str] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)
    ended: bool = False


class Books:
    """`wrong` says what was against the rules.

    fenced      whether revoking a key provably shuts its reader out
    lease       seconds
    credit      bytes that one job may have prepared and not consumed
    per_peer    bytes that all jobs together may have so
    """

    def __init__(self, *, fenced: bool, lease: float, credit: int, per_peer: int) -> None:
        self.fenced = fenced
        self.lease = lease
        self.credit = credit
        self.per_peer = per_peer
        self.wrong: list[str] = []
        self.pieces: dict[int, Piece] = {}
        self.claims: Counter[str] = Counter()
        self.readers: set[Reader] = set()
        self.until: dict[str, float] = {}
        self.requests: dict[str, str] = {}
        self.accepted: dict[str, Accepted] = {}
        self.prepared: dict[tuple[str, int], Prepared] = {}
        self.keys: dict[bytes, Prepared] = {}
        self.answers: dict[str, Released | Ended] = {}
        self.serves: dict[str, str] = {}
        self.wanted: dict[int, Wanted] = {}

    def _want(self, holds: object, what: str) -> None:
        if not holds:
            self.wrong.append(what)

    # -- the arena ---------------------------------------------------------------------------------------

    def _inside(self, start: int, end: int) -> list[Reader]:
        """Readers who can still read there whatever was revoked."""
        return [] if self.fenced else [r for r in self.readers if r.start < end and start < r.end]

    def claim(self, start: int, nbytes: int, owner: str) -> None:
        """A range is given to a job."""
        end = start + nbytes
        for piece in self.pieces.values():
            self._want(
                piece.end <= start or end <= piece.start, f"a range of {piece.owner} is given to {owner}"
            )
        self._want(not self._inside(start, end), f"a range is given to {owner} while somebody reads it")
        self._want(owner not in self.answers, f"{owner} has ended and takes a range")
        self.pieces[start] = Piece(start, end, owner)
        self.claims[owner] += 1
        held = [p.end - p.start for p in self.pieces.values() if not p.kept]
        own = [p.end - p.start for p in self.pieces.values() if p.owner == owner and not p.kept]
        self._want(sum(own) <= self.credit or len(own) == 1, f"{owner} has more prepared than it gave credit")
        self._want(sum(held) <= self.per_peer or len(held) == 1, "a peer has more than it may")

    def free(self, start: int, *, kept: bool) -> None:
        """A range is nobody's any more; `kept` where it was in quarantine."""
        piece = self.pieces.pop(start)
        self._want(piece.kept is kept, "a range was in quarantine, or was not")
        self._want(
            not self._inside(piece.start, piece.end), f"a range of {piece.owner} is freed under a reader"
        )

    def keep(self, start: int) -> None:
        """A range goes into quarantine."""
        self.pieces[start].kept = True

    # -- reads -------------------------------------------------------------------------------------------

    def enter(self, key: bytes, now: float) -> Reader:
        """A read begins."""
        told = self.keys[key]
        reader = Reader(told.job, told.chunk, told.offset, told.offset + told.nbytes)
        self._want(now < self.until[told.job], f"{told.job} reads after its lease")
        self.readers.add(reader)
        return reader

    def land(self, reader: Reader) -> None:
        """Its bytes are written into the target now."""
        piece = self.pieces.get(reader.start)
        self._want(piece is not None and piece.owner == reader.job, "bytes of another job's range land")
        mine = [w for w in self.wanted.values() if reader.job in w.attempts]
        self._want(mine and not mine[0].ended, "bytes land of a fetch that has ended")

    def leave(self, reader: Reader) -> None:
        """It has ended, one way or another."""
        self.readers.discard(reader)

    # -- frames ------------------------------------------------------------------------------------------

    def asked(self, frame: PeerMessage) -> None:
        """The decode side says something."""
        match frame:
            case Fetch(job=job):
                self.requests[job] = frame.request
            case Consumed(job=job, chunk=chunk):
                inside = [r for r in self.readers if (r.job, r.chunk) == (job, chunk)]
                self._want(not inside, f"{job} says that it read chunk {chunk}, and reads it")
            case Abort(job=job):
                self._want(all(r.job != job for r in self.readers), f"{job} says that it reads no more")
            case _:
                pass

    def heard(self, frame: PeerMessage, now: float) -> None:
        """A frame of the decode side arrives."""
        job = getattr(frame, "job", "")
        if now < self.until.get(job, 0.0):
            self.until[job] = now + self.lease

    def said(self, frame: PeerMessage, now: float) -> None:
        """The prefill side says something."""
        match frame:
            case Accepted(job=job, prepared=prepared):
                alone = msgspec.structs.replace(frame, prepared=None)
                first = self.accepted.setdefault(job, alone)
                self._want(first == alone, f"{job} is accepted anew")
                self._want(job not in self.answers, f"{job} is accepted after its end")
                self.until.setdefault(job, now + self.lease)
                if prepared is not None:
                    self.said(prepared, now)
            case Prepared(job=job, chunk=chunk):
                first_chunk = self.prepared.setdefault((job, chunk), frame)
                self._want(first_chunk == frame, f"chunk {chunk} of {job} lies elsewhere now")
                self.keys[frame.key] = frame
            case Released(job=job) | Ended(job=job):
                if job not in self.answers and isinstance(frame, Released):
                    self._want(now < self.until.get(job, 0.0), f"{job} is released after its lease")
                self._want(self.answers.setdefault(job, frame) == frame, f"{job} ends twice")
                left = [p for p in self.pieces.values() if p.owner == job and not p.kept]
                self._want(not left, f"{job} has ended and owns ranges")
            case _:
                pass

    def released(self, request: str) -> int:
        """How many jobs were told that they have the request."""
        jobs = (job for job, answer in self.answers.items() if isinstance(answer, Released))
        return sum(self.requests.get(job) == request for job in jobs)

    # -- fetches -----------------------------------------------------------------------------------------

    def begin(self, blocks: tuple[int, ...], until: float) -> Wanted:
        """A fetch begins; `busy` says whether it has to be refused for its blocks."""
        live = itertools.chain.from_iterable(
            w.blocks for w in self.wanted.values() if not w.ended and not w.busy
        )
        made = Wanted(len(self.wanted), blocks, bool(set(live) & set(blocks)), until)
        self.wanted[made.number] = made
        return made

    def move(self, wanted: Wanted, state: str) -> None:
        """It is in that state now."""
        before = wanted.states[-1] if wanted.states else "reserving"
        ahead = state == "failed" or FETCH_ORDER.index(state) >= FETCH_ORDER.index(before)
        self._want(before not in ("ready", "failed") and ahead, f"a fetch went from {before} to {state}")
        wanted.states.append(state)

    def end(self, wanted: Wanted, ending: str) -> None:
        """It has ended: `ready`, `cancelled` or the code of an error."""
        wanted.ended = True
        self._want(
            wanted.states[-1] == ("ready" if ending == "ready" else "failed"), f"{wanted.states}: {ending}"
        )
        self._want((ending == "range-busy") == wanted.busy, f"blocks busy or not, and it ended {ending}")
        self._want(ending not in ("internal", "error", "bad-frame", "invalid-argument"), f"it ended {ending}")
        self._want(all(r.job not in wanted.attempts for r in self.readers), f"ended {ending} under a read")
        if ending == "ready":
            answer = self.answers.get(wanted.attempts[-1])
            self._want(isinstance(answer, Released), "ready, and nobody has said that the lease held")

    # -- at rest -----------------------------------------------------------------------------------------

    def serve(self, job: str, state: str) -> None:
        """A serve is in that state."""
        before = self.serves.get(job, "waiting")
        self._want(
            state == "failed" or SERVE_ORDER.index(state) >= SERVE_ORDER.index(before),
            f"a serve went from {before} to {state}",
        )
        self.serves[job] = state

    def rest(self, now: float) -> None:
        """Nothing is under way at this moment."""
        for piece in self.pieces.values():
            if not piece.kept:
                self._want(now <= self.until[piece.owner], f"{piece.owner} owns ranges after its lease")
        for job, accepted in self.accepted.items():
            self._want(self.claims[job] <= accepted.chunks, f"{job} took a range for a chunk twice")
        for wanted in self.wanted.values():
            inside = any(r.job in wanted.attempts for r in self.readers)
            # A fetch whose read was cut off gives the other side a second to say why.
            late = now > wanted.until + 2.0
            self._want(wanted.ended or inside or not late, "a fetch outlived its deadline")
