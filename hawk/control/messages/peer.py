"""Messages between agents: `PeerMessage`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from hawk.control.messages.common import (
    Blocks,
    CacheDescr,
    CheckName,
    Checks,
    Count,
    Endpoints,
    JobId,
    Key,
    Name,
    Note,
    PartDescr,
    Priority,
    RequestId,
    Seconds,
    Software,
    Wire,
)


class Hello(Struct, tag="hello", frozen=True):
    """First word of the connecting side; answered by `Welcome`, or by `Refused`."""

    name: Name
    role: Name
    software: Software
    endpoints: Endpoints
    draining: bool = False


class Welcome(Struct, tag="welcome", frozen=True):
    """The answer to `Hello`: who this is and how its memory can be read."""

    name: Name
    role: Name
    software: Software
    endpoints: Endpoints
    draining: bool = False


class Refused(Struct, tag="refused", frozen=True):
    """P will not talk with this peer, whose key it knows, and why; since protocol 2."""

    error: Wire


class Notice(Struct, tag="notice", frozen=True):
    """The sender takes no new jobs any more, or takes them again; since protocol 2."""

    draining: bool


class Fetch(Struct, tag="fetch", frozen=True, kw_only=True):
    """D asks P for a request's cache.  Repeated with the same job id it names the same reservation.

    first, tokens    token positions wanted; `tokens` 0 means all that are offered from `first` on
    chunk, credit    largest chunk, and most bytes prepared but not yet consumed, in bytes
    deadline         seconds from arrival after which D no longer wants it
    wait             hold the request if nothing is offered yet, until the deadline
    verify, share    the check that D wants of every chunk, and of what part of its stretches; empty: none
    priority         among the jobs of D, the higher first
    ttft             seconds from arrival within which D would like to have it; 0 where it does not say
    together         D reads the first `Prepared` out of `Accepted`, where P says it there
    """

    job: JobId
    request: RequestId
    claim: Annotated[str, Meta(max_length=32)]
    target: CacheDescr
    blocks: Blocks
    first: Count
    tokens: Count
    transport: Name
    chunk: Count
    credit: Count
    deadline: Seconds
    wait: bool = False
    verify: CheckName = ""
    share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    priority: Priority = 0
    ttft: Seconds = 0.0
    together: bool = False


class Prepared(Struct, tag="prepared", frozen=True, kw_only=True):
    """A chunk lies in P's arena, retiled, and may be read under `key`.

    checks    the check of each of its stretches that were asked for, 8 bytes little-endian each, in arena order
    """

    job: JobId
    chunk: Count
    layer: Count
    layers: Count
    block: Count
    blocks: Count
    offset: Count
    nbytes: Count
    key: Key
    retile: Seconds = 0.0
    checks: Checks = b""


class Accepted(Struct, tag="accepted", frozen=True, kw_only=True):
    """P has claimed the offer for this job.  `lease` counts from when D sent what this answers.

    verify    the check that every `Prepared` will carry; empty: none
    part    what of a model's cache the offer holds; None from a peer that speaks version 1
    prepared    the first chunk, where that was there at once and D asked for it so, as its own frame would say it
    """

    job: JobId
    first: Count
    tokens: Count
    chunks: Count
    lease: Seconds
    note: Note
    lossy: bool = False
    verify: CheckName = ""
    part: PartDescr | None = None
    prepared: Prepared | None = None


class Consumed(Struct, tag="consumed", frozen=True):
    """D has read the chunk; P may reuse its range."""

    job: JobId
    chunk: Count


class Poll(Struct, tag="poll", frozen=True):
    """D is alive and renews the lease; P answers `Alive` and repeats what D lacks."""

    job: JobId
    seq: Count
    consumed: Annotated[list[Count], Meta(max_length=65_536)]


class Alive(Struct, tag="alive", frozen=True):
    """The lease was renewed on receipt of `Poll` number `seq`."""

    job: JobId
    seq: Count


class Release(Struct, tag="release", frozen=True):
    """D has all bytes; did the lease hold?  With `hold` P says so and keeps the offer for D, who may still go away."""

    job: JobId
    hold: bool = False


class Released(Struct, tag="released", frozen=True):
    """The lease held until `Release` arrived; P has forgotten the ranges, or, with `held`, keeps the job's offer."""

    job: JobId
    held: bool = False


class Abort(Struct, tag="abort", frozen=True):
    """D no longer wants the job and reads no more of it; answered by `Ended`."""

    job: JobId
    error: Wire


class Ended(Struct, tag="ended", frozen=True):
    """P has ended the job, and why; every range of it is closed to D."""

    job: JobId
    error: Wire


class Probe(Struct, tag="probe", frozen=True):
    """D asks for a few bytes of P's arena to try a transport with, until it says `Abort`; since protocol 2."""

    job: JobId
    transport: Name


class Probed(Struct, tag="probed", frozen=True):
    """They are there: `content`, random, at `offset`, to be read under `key` for some seconds; since protocol 2."""

    job: JobId
    offset: Count
    key: Key
    content: Annotated[bytes, Meta(min_length=1, max_length=64)]


PeerMessage = (
    Hello
    | Welcome
    | Fetch
    | Accepted
    | Prepared
    | Consumed
    | Poll
    | Alive
    | Release
    | Released
    | Abort
    | Ended
    | Refused
    | Notice
    | Probe
    | Probed
)
