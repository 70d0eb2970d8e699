"""Every message that crosses a control socket, typed; nothing on the wire is decoded into anything else.

Two families: between agents (`PeerMessage`) and between an agent and its local clients (`LocalMessage`).
Fields are plain data; times are durations in seconds, never wall clocks; block tables are little-endian
int32 arrays as bytes; errors are the string maps of `hawk.errors`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from hawk.errors import BadFrame

Name = Annotated[str, Meta(min_length=1, max_length=128)]
RequestId = Annotated[str, Meta(min_length=1, max_length=512)]
JobId = Annotated[str, Meta(min_length=32, max_length=32, pattern="^[0-9a-f]{32}$")]
CacheId = Annotated[str, Meta(min_length=32, max_length=32, pattern="^[0-9a-f]{32}$")]
Claim = Annotated[str, Meta(min_length=32, max_length=32, pattern="^[0-9a-f]{32}$")]
Key = Annotated[bytes, Meta(min_length=16, max_length=64)]
Note = Annotated[bytes, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=2**48)]
Seconds = Annotated[float, Meta(ge=0, le=86_400 * 7)]
Blocks = Annotated[bytes, Meta(max_length=4 * 2**19)]
Wire = dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=8192)]]
Endpoints = dict[Annotated[str, Meta(max_length=64)], Wire]


def pack_blocks(blocks: np.ndarray) -> bytes:
    """A block table as little-endian int32."""
    return np.ascontiguousarray(blocks, dtype="<i4").tobytes()


def unpack_blocks(raw: bytes) -> np.ndarray:
    """The block table that `pack_blocks` wrote, as `int64[n]`; raises `BadFrame` for a ragged length."""
    if len(raw) % 4:
        raise BadFrame("a block table is a whole number of int32", field="blocks", got=f"{len(raw)} bytes")
    return np.frombuffer(raw, dtype="<i4").astype(np.int64)


class CacheDescr(Struct, frozen=True, kw_only=True):
    """A cache as any agent can understand it: the layout's own text, and what it is bound to."""

    layout: Annotated[str, Meta(max_length=32_768)]
    codec: Annotated[str, Meta(max_length=32)]
    layers: Annotated[int, Meta(ge=1, le=65_536)]
    heads: Annotated[int, Meta(ge=1, le=65_536)]
    dim: Annotated[int, Meta(ge=1, le=1_048_576)]
    block_size: Annotated[int, Meta(ge=1, le=1_048_576)]
    blocks: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    kvs: Annotated[int, Meta(ge=1, le=2)] = 2
    channels: Annotated[int, Meta(ge=0, le=4096)] = 0
    align: Annotated[int, Meta(ge=0, le=2**30)] = 0
    params: dict[Annotated[str, Meta(max_length=64)], int] = {}


# -- between agents --------------------------------------------------------------------------------------


class Hello(Struct, tag="hello", frozen=True):
    """First word of the connecting side; answered by `Welcome`."""

    name: Name
    role: Name
    software: Annotated[str, Meta(max_length=64)]
    endpoints: Endpoints


class Welcome(Struct, tag="welcome", frozen=True):
    """The answer to `Hello`: who this is and how its memory can be read."""

    name: Name
    role: Name
    software: Annotated[str, Meta(max_length=64)]
    endpoints: Endpoints


class Fetch(Struct, tag="fetch", frozen=True, kw_only=True):
    """D asks P for a request's cache.  Repeated with the same job id it names the same reservation.

    first, tokens    token positions wanted; `tokens` 0 means all that are offered from `first` on
    chunk, credit    largest chunk, and most bytes prepared but not yet consumed, in bytes
    deadline         seconds from arrival after which D no longer wants it
    wait             hold the request if nothing is offered yet, until the deadline
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


class Accepted(Struct, tag="accepted", frozen=True, kw_only=True):
    """P has claimed the offer for this job.  `lease` counts from when D sent what this answers."""

    job: JobId
    first: Count
    tokens: Count
    chunks: Count
    lease: Seconds
    note: Note
    lossy: bool = False


class Prepared(Struct, tag="prepared", frozen=True, kw_only=True):
    """A chunk lies in P's arena, retiled, and may be read under `key`."""

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
    """D has all bytes; did the lease hold?"""

    job: JobId


class Released(Struct, tag="released", frozen=True):
    """The lease held until `Release` arrived; P has forgotten the ranges."""

    job: JobId


class Abort(Struct, tag="abort", frozen=True):
    """D no longer wants the job and reads no more of it; answered by `Ended`."""

    job: JobId
    error: Wire


class Ended(Struct, tag="ended", frozen=True):
    """P has ended the job, and why; every range of it is closed to D."""

    job: JobId
    error: Wire


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
)


# -- between an agent and its local clients --------------------------------------------------------------


class Attach(Struct, tag="attach", frozen=True):
    """First word of a client.  `session` is the token that its sidecar connection presented."""

    id: Count
    session: Annotated[bytes, Meta(min_length=16, max_length=16)]
    pid: Count
    software: Annotated[str, Meta(max_length=64)]


class MemoryInfo(Struct, frozen=True):
    """One memory of the agent."""

    name: Name
    kind: Name
    channels: Count
    channel_bytes: Count
    free: list[Count]


class Attached(Struct, tag="attached", frozen=True):
    """The answer to `Attach`."""

    id: Count
    name: Name
    role: Name
    generation: Annotated[str, Meta(max_length=16)]
    memories: list[MemoryInfo]


class BufferRef(Struct, frozen=True):
    """A stretch of a shared memory that the client passed through the sidecar under `tag`.

    `tag` all zero: the agent lives in the client's own process and `offset` is an address.
    """

    tag: Annotated[bytes, Meta(min_length=16, max_length=16)]
    total: Count
    offset: Count
    nbytes: Count


class Register(Struct, tag="register", frozen=True, kw_only=True):
    """A cache in the client's own memory: one `BufferRef` per buffer, in buffer order."""

    id: Count
    cache: CacheDescr
    buffers: Annotated[list[BufferRef], Meta(min_length=1, max_length=65_536)]


class Registered(Struct, tag="registered", frozen=True):
    """The cache is known to the agent under this id."""

    id: Count
    cache: CacheId


class Allocate(Struct, tag="allocate", frozen=True, kw_only=True):
    """A cache in one of the agent's memories; its channels come back through the sidecar."""

    id: Count
    cache: CacheDescr
    memory: Name


class Allocated(Struct, tag="allocated", frozen=True, kw_only=True):
    """Where the cache lies: the base of buffer b is byte `offsets[b]` of every channel's region.

    `tags[c]` names the descriptor of channel c (of `region_bytes` bytes) on the sidecar.
    """

    id: Count
    cache: CacheId
    descr: CacheDescr
    offsets: list[Count]
    region_bytes: Count
    tags: list[bytes]


class ReleaseCache(Struct, tag="release-cache", frozen=True):
    """The client gives a cache back; answered by `Done` when no byte of it is touched any more."""

    id: Count
    cache: CacheId


class Offer(Struct, tag="offer", frozen=True, kw_only=True):
    """The client offers a request's blocks.  `layers` is how many layers are written already."""

    id: Count
    request: RequestId
    cache: CacheId
    blocks: Blocks
    tokens: Count
    ttl: Seconds
    note: Note
    layers: Count
    consumer: Annotated[str, Meta(max_length=128)]


class Offered(Struct, tag="offered", frozen=True):
    """The answer to `Offer`."""

    id: Count
    ticket: Annotated[str, Meta(max_length=2048)]


class LayersReady(Struct, tag="layers-ready", frozen=True):
    """Layers `[0, layers)` of the request are written."""

    id: Count
    request: RequestId
    layers: Count


class Withdraw(Struct, tag="withdraw", frozen=True):
    """End the offer; answered by `Done` when its source blocks are no longer read."""

    id: Count
    request: RequestId


class AwaitOffer(Struct, tag="await-offer", frozen=True):
    """Answered by `OfferEnded` when the offer has ended and its source blocks are no longer read."""

    id: Count
    request: RequestId


class OfferEnded(Struct, tag="offer-ended", frozen=True):
    """How the offer ended: `consumed`, `expired` or `withdrawn`."""

    id: Count
    outcome: Name
    consumer: Annotated[str, Meta(max_length=128)]


class StartFetch(Struct, tag="start-fetch", frozen=True, kw_only=True):
    """The client wants a request in its cache.  Either a ticket, or a request and the name of the peer."""

    id: Count
    job: JobId
    ticket: Annotated[str, Meta(max_length=2048)]
    request: Annotated[str, Meta(max_length=512)]
    source: Annotated[str, Meta(max_length=128)]
    cache: CacheId
    blocks: Blocks
    first: Count
    tokens: Count
    timeout: Seconds
    wait: bool


class AbortFetch(Struct, tag="abort-fetch", frozen=True):
    """End the job; answered by `Done` when no byte of it can land any more."""

    id: Count
    job: JobId


class Progress(Struct, tag="progress", frozen=True):
    """Latest state of a fetch; later ones replace earlier ones."""

    job: JobId
    state: Name
    nbytes: Count
    total: Count


class FetchEnded(Struct, tag="fetch-ended", frozen=True, kw_only=True):
    """How a fetch ended: `error` is empty when it is ready."""

    job: JobId
    error: Wire
    tokens: Count = 0
    first: Count = 0
    nbytes: Count = 0
    note: Note = b""
    transport: Annotated[str, Meta(max_length=64)] = ""
    mode: Annotated[str, Meta(max_length=16)] = ""
    phases: dict[Annotated[str, Meta(max_length=32)], float] = {}
    channels: list[Count] = []


class AskStatus(Struct, tag="ask-status", frozen=True):
    """Asks for the agent's pools and counts."""

    id: Count


class PoolStatus(Struct, frozen=True):
    """Bytes of one pool by state, and the owners that hold some."""

    name: Name
    total: Count
    free: Count
    owned: Count
    quarantined: Count


class Status(Struct, tag="status", frozen=True, kw_only=True):
    """The answer to `AskStatus`."""

    id: Count
    name: Name
    role: Name
    control: Annotated[str, Meta(max_length=512)]
    peers: dict[str, str]
    pools: list[PoolStatus]
    offers: Count
    serving: Count
    fetching: Count
    caches: Count
    blocks_owned: Count
    blocks_quarantined: Count
    endings: dict[str, int]
    transports: dict[str, str]


class Done(Struct, tag="done", frozen=True):
    """The call succeeded and has nothing to say."""

    id: Count


class Failed(Struct, tag="failed", frozen=True):
    """The call failed."""

    id: Count
    error: Wire


LocalMessage = (
    Attach
    | Attached
    | Register
    | Registered
    | Allocate
    | Allocated
    | ReleaseCache
    | Offer
    | Offered
    | LayersReady
    | Withdraw
    | AwaitOffer
    | OfferEnded
    | StartFetch
    | AbortFetch
    | Progress
    | FetchEnded
    | AskStatus
    | Status
    | Done
    | Failed
)


# -- tickets ---------------------------------------------------------------------------------------------


class Ticket(Struct, frozen=True, array_like=True):
    """What a decode side needs to fetch an offer: who has it, where, and the claim that only this ticket holds."""

    agent: Name
    address: Annotated[str, Meta(max_length=512)]
    generation: Annotated[str, Meta(max_length=16)]
    request: RequestId
    claim: Claim
    tokens: Count


_PREFIX = "hawk1."


def encode_ticket(ticket: Ticket) -> str:
    """The ticket as a printable string for JSON and headers."""
    import base64

    return _PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(ticket)).decode().rstrip("=")


def decode_ticket(text: str) -> Ticket:
    """The ticket that `encode_ticket` wrote; raises `BadFrame` for anything else."""
    import base64
    import binascii

    if not text.startswith(_PREFIX) or len(text) > 2048:
        raise BadFrame("not a HAWK ticket", field="ticket", got=repr(text[:24]), expected=f"{_PREFIX}...")
    body = text[len(_PREFIX) :]
    try:
        raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        return msgspec.msgpack.decode(raw, type=Ticket)
    except (binascii.Error, ValueError, msgspec.MsgspecError) as fault:
        raise BadFrame("the ticket is damaged", field="ticket", got=repr(text[:24])) from fault
