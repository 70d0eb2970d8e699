"""What an operator's tools ask of a live agent, since protocol 2; parts of `LocalMessage`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from hawk.control.messages.common import Count, Name, Seconds, Software

QUIET = " tool"
"""How the `software` of a client ends that only looks on, whose coming and going is not worth a line in the log."""

Text = Annotated[str, Meta(max_length=1024)]


class AskPeers(Struct, tag="ask-peers", frozen=True):
    """Asks for the agents that this one knows or talks with; answered by `PeerList`."""

    id: Count


class PeerInfo(Struct, frozen=True, kw_only=True):
    """One other agent.

    direction   `reads-from` (we connect to it), `serves` (it connects to us), `registered` (the directory tells of it)
                or `configured` (neither as yet)
    state       `connecting`, `up`, `refused` (it is there, and talks not with us), `lost`, `closed`,
                `failed` (the last try), or `not-tried`
    version     protocol version that is spoken, 0 before the first contact
    generation  its run, 16 hexadecimal digits, empty before the first contact
    jobs        jobs under way with it
    trouble     what keeps this agent from talking with it, empty if nothing is known to
    """

    name: Name
    direction: Name
    state: Name
    address: Text = ""
    version: Count = 0
    generation: Annotated[str, Meta(max_length=16)] = ""
    role: Annotated[str, Meta(max_length=128)] = ""
    software: Software = ""
    transports: list[Text] = []
    jobs: Count = 0
    draining: bool = False
    trouble: Text = ""


class PeerList(Struct, tag="peer-list", frozen=True):
    """The answer to `AskPeers`."""

    id: Count
    peers: list[PeerInfo]


class AskJobs(Struct, tag="ask-jobs", frozen=True, kw_only=True):
    """Asks for jobs, the latest first; answered by `JobList`.

    job     only those whose id, on either side, begins so; empty for all
    request    only those of this request; an agent that does not know the field lists all
    ended   those that have ended too, as far as they are remembered
    most    jobs in the answer; how many more there are is said
    """

    id: Count
    job: Annotated[str, Meta(max_length=32, pattern="^[0-9a-f]*$")] = ""
    ended: bool = True
    most: Annotated[int, Meta(ge=1, le=1000)] = 1000
    request: Annotated[str, Meta(max_length=512)] = ""


class JobInfo(Struct, frozen=True, kw_only=True):
    """One job.

    job         its id here: on the decode side the client's, on the prefill side the one on the wire
    attempt     its id on the wire, by which the other side knows it; empty before there is one
    role        `fetch` or `serve`
    phase       what it does or waits for now, or did last (docs/operations.md lists them)
    age         seconds since it began; of an ended job, how long it took
    ended       seconds since it ended, or None
    deadline    seconds that it has left, negative where it is overdue; None once it has ended
    ending      `ready`, `released`, or the code of the error that ended it
    """

    job: Annotated[str, Meta(max_length=32)]
    role: Name
    request: Annotated[str, Meta(max_length=512)]
    peer: Annotated[str, Meta(max_length=128)]
    state: Name
    phase: Annotated[str, Meta(max_length=32)] = ""
    attempt: Annotated[str, Meta(max_length=32)] = ""
    transport: Annotated[str, Meta(max_length=128)] = ""
    mode: Annotated[str, Meta(max_length=16)] = ""
    nbytes: Count = 0
    total: Count = 0
    age: float = 0.0
    ended: float | None = None
    deadline: float | None = None
    ending: Annotated[str, Meta(max_length=64)] = ""
    reason: Text = ""
    phases: dict[Annotated[str, Meta(max_length=32)], float] = {}


class JobList(Struct, tag="job-list", frozen=True):
    """The answer to `AskJobs`; `left_off` jobs did not fit."""

    id: Count
    jobs: list[JobInfo]
    left_off: Count = 0


class TryPeer(Struct, tag="try-peer", frozen=True, kw_only=True):
    """Read a few bytes of another agent by every transport; answered by `Tried`, after `timeout` seconds at most."""

    id: Count
    peer: Name
    timeout: Seconds


class TransportTry(Struct, frozen=True, kw_only=True):
    """What came of one transport: whether the right bytes were read, in how many seconds, or why not."""

    transport: Name
    ok: bool
    text: Text = ""
    seconds: float = 0.0


class Tried(Struct, tag="tried", frozen=True):
    """The answer to `TryPeer`: every transport that either side has."""

    id: Count
    tries: list[TransportTry]


class Drain(Struct, tag="drain", frozen=True, kw_only=True):
    """Take no new work, finish what was promised; answered by `Drained` when that is done, or after `timeout`.

    timeout     seconds to wait for the answer; 0 answers at once, and the draining goes on all the same
    resume      ends the draining instead: the agent takes new work again
    """

    id: Count
    timeout: Seconds = 0.0
    resume: bool = False


class Drained(Struct, tag="drained", frozen=True, kw_only=True):
    """The answer to `Drain`: whether nothing promised is left, and what is."""

    id: Count
    done: bool
    draining: bool
    offers: Count
    serving: Count
    fetching: Count
