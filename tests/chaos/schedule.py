"""What happens in a run, all of it from one seed: the requests, the faults, the weather."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.chaos import content
from tests.chaos.site import AGENTS, CLIENTS, DECODE, LEASE, PREFILL
from tests.chaos.weather import Sky

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FETCH_STATES = ("reserving", "queued", "connecting", "requested", "receiving", "releasing")

MAX_TOKENS = 256


@dataclass(frozen=True)
class Request:
    """One transfer.

    prefill, decode    the clients of both sides; of two `prefill` each has a part, and two `decode` want the same
    consumers          how many are to have it
    written, layers    layers that are written when it is offered, and those that ever will be
    withdraw, end      when either side gives it up, in seconds (`end` also: at a state), or never
    early, offered     the fetch is asked for by name, before the offer is made, or without one ever being made
    gap                seconds between the one and the other
    """

    content: int
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    consumers: int
    priority: int
    tokens: int
    first: int
    written: int
    layers: int
    pause: float
    ttl: str
    withdraw: float | None
    timeout: float
    end: float | str | None
    how: str
    early: bool
    offered: bool
    gap: float
    seed: int

    @property
    def name(self) -> str:
        """The request id."""
        return f"r{self.content}"


@dataclass(frozen=True)
class Fault:
    """Something that happens to a process or to the network, `after` seconds from the one before."""

    after: float
    kind: str
    target: str
    seconds: float


def requests(seed: int, counts: Mapping[str, int]) -> Iterator[Request]:
    """Transfers without end, between so many clients of each agent."""
    dice = random.Random(f"{seed}/requests")
    clients = {side: [f"{a}/{i}" for a in names for i in range(counts[a])] for side, names in _SIDES.items()}
    for number in range(1, 1 << 30):
        tokens = dice.choice([1, 31, 32, 33, 64, dice.randint(1, MAX_TOKENS), dice.randint(1, MAX_TOKENS)])
        early, parts = dice.random() < 0.15, dice.random() < 0.25
        decode = dice.sample(clients["decode"], 1 if early or dice.random() < 0.8 else 2)
        prefill = [dice.choice([c for c in clients["prefill"] if c.startswith(name)]) for name in PREFILL]
        # A tenth of the offers is never written to the end, and the same share of fetches has time without end:
        # what ends those is the lease, or somebody's abort.
        stuck = dice.random() < 0.1
        layers = dice.randint(0, content.LAYERS - 1) if stuck else content.LAYERS
        yield Request(
            content=number,
            prefill=tuple(prefill) if parts else (dice.choice(prefill),),
            decode=tuple(decode),
            consumers=dice.randint(1, len(decode)),
            priority=dice.choice([0, 0, dice.randint(-100, 100)]),
            tokens=tokens,
            first=dice.choice([0, 0, 0, dice.randrange(tokens)]),
            written=dice.randint(0, layers),
            layers=layers,
            pause=dice.choice([0.0, 0.0, dice.uniform(0, 0.2)]),
            ttl=dice.choice(["1s", "4s", "20s"]),
            withdraw=dice.uniform(0, 2) if dice.random() < 0.1 else None,
            timeout=dice.choice([0.2, 2.0, 6.0, 60.0, 60.0]),
            end=_end(dice),
            how=dice.choice(["abort", "cancel"]),
            early=early,
            offered=not early or dice.random() < 0.7,
            gap=dice.choice([0.0, dice.uniform(0, 0.5)]),
            seed=dice.getrandbits(32),
        )


_SIDES = {"prefill": PREFILL, "decode": DECODE}


def _end(dice: random.Random) -> float | str | None:
    if dice.random() >= 0.3:
        return None
    return dice.uniform(0, 0.3) if dice.random() < 0.5 else dice.choice(FETCH_STATES)


def good(number: int, prefill: tuple[str, ...], decode: str) -> Request:
    """A transfer that has to succeed in calm weather."""
    return Request(
        content=number,
        prefill=prefill,
        decode=(decode,),
        consumers=1,
        priority=0,
        tokens=100,
        first=0,
        written=content.LAYERS,
        layers=content.LAYERS,
        pause=0.0,
        ttl="30s",
        withdraw=None,
        timeout=15.0,
        end=None,
        how="abort",
        early=False,
        offered=True,
        gap=0.0,
        seed=number,
    )


KINDS = {
    # kind: (weight, who, shortest, longest); durations in seconds
    "stop": (22, AGENTS, 0.05, 1.5 * LEASE),
    "cut off": (10, AGENTS, 0.2, 1.5 * LEASE),
    "kill": (10, AGENTS, 0.0, 1.0),
    "terminate": (3, AGENTS, 0.0, 0.5),
    "reload": (4, AGENTS, 0.0, 0.0),
    "cut streams": (22, PREFILL, 0.0, 0.0),
    "stall streams": (16, PREFILL, 0.1, 1.2 * LEASE),
    "kill client": (8, tuple(f"{a}/{i}" for a, many in CLIENTS.items() for i in range(many)), 0.0, 0.3),
    "stop client": (8, tuple(f"{a}/{i}" for a, many in CLIENTS.items() for i in range(many)), 0.1, 1.0),
}

GENTLE = ("cut streams", "stall streams")


def faults(seed: int, *, gentle: bool) -> Iterator[Fault]:
    """Faults without end; gentle ones spare the processes."""
    dice = random.Random(f"{seed}/faults")
    kinds = [kind for kind in KINDS if not gentle or kind in GENTLE]
    weights = [KINDS[kind][0] for kind in kinds]
    while True:
        kind = dice.choices(kinds, weights)[0]
        _, who, shortest, longest = KINDS[kind]
        yield Fault(dice.uniform(0.1, 0.9), kind, dice.choice(who), dice.uniform(shortest, longest))


LOST_WORDS = Sky(drop=0.01, delay=0.02, repeat=0.1, last=0.5, longest=0.2, slow=0.05, slowest=0.3)
"""The weather in which a promise broken on purpose shows soonest: much gets through, but not how a job ended."""


def skies(seed: int, *, lost_words: bool) -> Iterator[Sky]:
    """The weather of one round after another: few losses and late frames, or many; always `LOST_WORDS` if asked."""
    dice = random.Random(f"{seed}/skies")
    while True:
        drawn = Sky(
            drop=dice.choice([0.01, 0.03, 0.08]),
            delay=dice.choice([0.02, 0.1]),
            repeat=dice.choice([0.02, 0.1]),
            last=dice.choice([0.0, 0.2]),
            longest=dice.choice([0.05, 0.5, 3.0]),
            slow=dice.choice([0.002, 0.02]),
            slowest=dice.choice([0.02, 0.3]),
        )
        yield LOST_WORDS if lost_words else drawn
