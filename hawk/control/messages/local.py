"""Messages between an agent and its local clients: `LocalMessage`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from hawk.control.messages.common import (
    Blocks,
    CacheDescr,
    CacheId,
    Claim,
    Count,
    JobId,
    Name,
    Note,
    Priority,
    RequestId,
    Seconds,
    Software,
    Wire,
)
from hawk.control.messages.operator import (
    AskJobs,
    AskPeers,
    Drain,
    Drained,
    JobList,
    PeerList,
    Text,
    Tried,
    TryPeer,
)

MOST_CONSUMERS = 4096
"""Claims that one offer can be taken by."""

MOST_PARTS = 1024
"""Tickets or peers that one fetch can name."""

Gpu = Annotated[int, Meta(ge=-1, le=4096)]

Consumers = Annotated[list[Name], Meta(max_length=MOST_CONSUMERS)]


class Attach(Struct, tag="attach", frozen=True):
    """First word of a client.  `session` is the token that its sidecar connection presented."""

    id: Count
    session: Annotated[bytes, Meta(min_length=16, max_length=16)]
    pid: Count
    software: Software


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

    `tag` all zero: the agent lives in the client's own process and `offset` is an address; one of the host's memory,
    or of the GPU's of that number.
    """

    tag: Annotated[bytes, Meta(min_length=16, max_length=16)]
    total: Count
    offset: Count
    nbytes: Count
    gpu: Gpu = -1


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
    """The client offers a request's blocks.  `layers` is how many layers are written already.

    consumer, consumers    the agent or agents that may claim it, each as often as it is named
    claims                 without such names, how many claims are to be released before it is consumed
    mark                   where a GPU is when these layers are written; 0: they are
    claim                  what its ticket is to hold, where the client has told the consumer already; empty: the
                           agent draws it
    """

    id: Count
    request: RequestId
    cache: CacheId
    blocks: Blocks
    tokens: Count
    ttl: Seconds
    note: Note
    layers: Count
    consumer: Annotated[str, Meta(max_length=128)]
    consumers: Consumers = []
    claims: Annotated[int, Meta(ge=1, le=MOST_CONSUMERS)] = 1
    mark: Count = 0
    claim: Annotated[str, Meta(max_length=32, pattern="^([0-9a-f]{32})?$")] = ""


class Offered(Struct, tag="offered", frozen=True):
    """The answer to `Offer`."""

    id: Count
    ticket: Annotated[str, Meta(max_length=2048)]


class LayersReady(Struct, tag="layers-ready", frozen=True):
    """Layers `[0, layers)` of the request are written, or will be when a GPU has come to `mark`."""

    id: Count
    request: RequestId
    claim: Claim
    layers: Count
    mark: Count = 0


class Withdraw(Struct, tag="withdraw", frozen=True):
    """End the offer; answered by `Done` when its source blocks are no longer read."""

    id: Count
    request: RequestId
    claim: Claim


class Forgo(Struct, tag="forgo", frozen=True):
    """No offer will be made with this claim: who waits for it, or comes later, is told `why`; answered by `Done`."""

    id: Count
    request: RequestId
    claim: Claim
    why: Annotated[str, Meta(max_length=1024)]


class AwaitOffer(Struct, tag="await-offer", frozen=True):
    """Answered by `OfferEnded` when the offer has ended and its source blocks are no longer read."""

    id: Count
    request: RequestId
    claim: Claim


class OfferEnded(Struct, tag="offer-ended", frozen=True):
    """How the offer ended: `consumed`, `expired` or `withdrawn`; and who took it, the last one in `consumer`."""

    id: Count
    outcome: Name
    consumer: Annotated[str, Meta(max_length=128)]
    consumers: Consumers = []


class StartFetch(Struct, tag="start-fetch", frozen=True, kw_only=True):
    """The client wants a request in its cache.  Either a ticket, or a request and the name of the peer.

    tickets, sources    further ones, where the request comes in parts
    """

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
    priority: Priority = 0
    ttft: Seconds = 0.0
    tickets: Annotated[list[Annotated[str, Meta(max_length=2048)]], Meta(max_length=MOST_PARTS)] = []
    sources: Annotated[list[Name], Meta(max_length=MOST_PARTS)] = []


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
    parts: Count = 1


class AskStatus(Struct, tag="ask-status", frozen=True):
    """Asks for the agent's pools and counts."""

    id: Count


class PoolStatus(Struct, frozen=True):
    """Bytes of one pool by state; `note` says how its memory is reached, where there are several ways."""

    name: Name
    total: Count
    free: Count
    owned: Count
    quarantined: Count
    note: Text = ""


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
    generation: Annotated[str, Meta(max_length=16)] = ""
    software: Software = ""
    pid: Count = 0
    uptime: float = 0.0
    draining: bool = False
    not_ready: Annotated[str, Meta(max_length=1024)] = ""
    clients: Count = 0
    loop_lag: float = 0.0
    directory: Annotated[str, Meta(max_length=1024)] = ""


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
    | AskPeers
    | PeerList
    | AskJobs
    | JobList
    | Drain
    | Drained
    | TryPeer
    | Tried
    | Forgo
)
