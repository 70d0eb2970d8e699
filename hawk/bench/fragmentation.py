"""Why a receive buffer lies in every channel: the same serving run with three ways of placing buffers.

A device holds its tensors interleaved over all channels at one common offset.  A receive buffer for a KV cache
can be *contiguous*, wholly inside one channel, or *per channel*, one region at a common offset in each.  The
contiguous one unbalances the channels, and every offset it takes in its own channel is lost to all interleaved
tensors, so allocations fail while most of the missing bytes lie free elsewhere (the paper's section 4.2, and
the configuration that its section 5 could not run).  This module replays one sequence under each rule on the
allocator that `EmulatedNpu` uses; no memory is touched.
"""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

from hawk.errors import InvalidArgument, OutOfMemory
from hawk.memory.lockstep import LockstepAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from hawk.memory.base import Allocation

PAGE = 2048
"""Bytes of one page, the unit in which tensors are spread over channels: a 32 x 32 tile of 2-byte elements."""

ALIGNMENT = 64
STEPS = 200

# Shares of the device's capacity, so that the run means the same at any size.  Half for weights is what 8
# billion parameters of 2 bytes take of 32 GiB.
_WEIGHTS, _WEIGHT_TENSORS = 0.50, 64
_CACHES, _CACHE_TENSORS = 0.12, 16
_ACTIVATIONS = (0.012, 0.008)
_RECEIVE_FIRST, _RECEIVE_LAST, _RECEIVE_GROWS = 0.04, 0.22, 0.5
_REQUEST, _REQUEST_SPREAD, _REQUEST_BOUNDS = 0.010, 0.6, (0.2, 3.0)
_SMALLEST_CHANNEL = 64 << 20

SchemeName = Literal["contiguous/first", "contiguous/emptiest", "per-channel"]


@dataclass(frozen=True, slots=True)
class _Step:
    """One thing that the serving run does: frees, then allocates (name, what, total bytes)."""

    number: int
    free: tuple[str, ...]
    allocate: tuple[tuple[str, Literal["interleaved", "receive"], int], ...]


@dataclass(frozen=True, slots=True)
class Balance:
    """What lies where after a step; all in bytes, one entry per channel.

    used     everything that is allocated
    receive  the receive buffers' part of it
    largest_common_piece  the largest piece free at one offset in all channels
    """

    step: int
    used: tuple[int, ...]
    receive: tuple[int, ...]
    largest_common_piece: int

    @property
    def spread(self) -> int:
        """Bytes between the fullest channel and the emptiest."""
        return max(self.used) - min(self.used)


@dataclass(frozen=True, slots=True)
class Failure:
    """The first allocation that did not fit.

    asked  bytes of the tensor over all channels
    free   bytes free over all channels at that moment
    """

    step: int
    tensor: str
    asked: int
    free: int
    reason: str


@dataclass(frozen=True, slots=True)
class SchemeResult:
    """How the run went under one rule.  `last` is the balance at the failure, or at the end of the run."""

    name: SchemeName
    steps_done: int
    failure: Failure | None
    last: Balance
    widest_spread: int
    """Largest difference between channels after any step, in bytes."""


@dataclass(frozen=True, slots=True)
class FragmentationResult:
    """Outcome of `run`.

    capacity       bytes over all channels
    channel_bytes  bytes of each
    steps          length of the run
    compared       the per-channel rule's balance at the step where the first contiguous rule failed
    """

    channels: int
    capacity: int
    channel_bytes: int
    seed: int
    steps: int
    schemes: tuple[SchemeResult, ...]
    compared: Balance | None

    def scheme(self, name: SchemeName) -> SchemeResult:
        """The result of one rule."""
        return next(s for s in self.schemes if s.name == name)

    @property
    def claim_holds(self) -> bool:
        """Every contiguous rule failed with enough bytes free, and the per-channel rule ran to the end."""
        failures = [s.failure for s in self.schemes if s.name != "per-channel"]
        return self.scheme("per-channel").failure is None and all(
            f is not None and f.asked <= f.free for f in failures
        )

    def to_dict(self) -> dict[str, object]:
        """Everything as plain values, for JSON."""
        return {**dataclasses.asdict(self), "claim_holds": self.claim_holds}


def run(channels: int = 8, capacity: int = 32 << 30, seed: int = 0) -> FragmentationResult:
    """Replays one serving run under each rule; the same arguments give the same result.

    channels  memory channels of the device, at least 2 (with one there is nothing to unbalance)
    capacity  bytes over all of them, at least 64 MiB each

    Raises `InvalidArgument` for figures outside these bounds.
    """
    if channels < 2:
        raise InvalidArgument("too few channels", field="channels", got=channels, expected="at least 2")
    if capacity < channels * _SMALLEST_CHANNEL:
        raise InvalidArgument(
            "too little for a device with that many channels",
            field="capacity",
            got=capacity,
            expected=f"at least {channels * _SMALLEST_CHANNEL} bytes",
        )
    steps = _serving_run(capacity, random.Random(seed))
    first, _ = _replay("contiguous/first", _first_with_room, channels, capacity, steps, None)
    emptiest, _ = _replay("contiguous/emptiest", _emptiest_first, channels, capacity, steps, None)
    failed = [s.failure.step for s in (first, emptiest) if s.failure is not None]
    per_channel, compared = _replay(
        "per-channel", None, channels, capacity, steps, min(failed) if failed else None
    )
    return FragmentationResult(
        channels=channels,
        capacity=capacity,
        channel_bytes=LockstepAllocator(channels, capacity // channels, ALIGNMENT).channel_bytes,
        seed=seed,
        steps=len(steps) - 1,
        schemes=(first, emptiest, per_channel),
        compared=compared,
    )


def _serving_run(capacity: int, rng: random.Random) -> list[_Step]:
    """Step 0 loads the model; each later one receives a request and decodes once.

    A request's keys and values of all layers arrive as one tensor.  The receive buffers of the requests in
    flight grow from a small share of the device to a large one and stay there; they come back in no
    particular order, as requests of different lengths end.
    """

    def parts(name: str, share: float, count: int) -> list[tuple[str, int]]:
        return [(f"{name}{i}", max(PAGE, int(capacity * share / count))) for i in range(count)]

    model = parts("weights", _WEIGHTS, _WEIGHT_TENSORS) + parts("cache", _CACHES, _CACHE_TENSORS)
    steps = [_Step(0, (), tuple((name, "interleaved", n) for name, n in model))]
    in_flight: dict[str, int] = {}
    activations: list[tuple[str, int]] = []
    for number in range(1, STEPS + 1):
        free = [name for name, _ in activations]
        factor = math.exp(rng.gauss(0.0, _REQUEST_SPREAD))
        share = _REQUEST * min(max(factor, _REQUEST_BOUNDS[0]), _REQUEST_BOUNDS[1])
        request, wanted = f"request{number}/kv", int(capacity * share)
        load = min(1.0, number / (STEPS * _RECEIVE_GROWS))
        room = capacity * (_RECEIVE_FIRST + (_RECEIVE_LAST - _RECEIVE_FIRST) * load)
        while in_flight and wanted + sum(in_flight.values()) > room:
            ended = rng.choice(list(in_flight))
            del in_flight[ended]
            free.append(ended)
        in_flight[request] = wanted
        activations = [(f"step{number}/activation{i}", int(capacity * s)) for i, s in enumerate(_ACTIVATIONS)]
        steps.append(
            _Step(
                number,
                tuple(free),
                (
                    (request, "receive", wanted),
                    *((name, "interleaved", n) for name, n in activations),
                ),
            )
        )
    return steps


def _first_with_room(device: LockstepAllocator, nbytes: int) -> int:
    for c, bank in enumerate(device.banks):
        if bank.largest_free >= nbytes:
            return c
    return 0


def _emptiest_first(device: LockstepAllocator, nbytes: int) -> int:
    """The kindest rule there is for buffers in single channels."""
    return max(range(device.channels), key=lambda c: (device.banks[c].free_bytes, -c))


def _replay(
    name: SchemeName,
    choose: Callable[[LockstepAllocator, int], int] | None,
    channels: int,
    capacity: int,
    steps: Sequence[_Step],
    snapshot: int | None,
) -> tuple[SchemeResult, Balance | None]:
    """One run; `choose` picks a contiguous buffer's channel, None stands for one region in every channel.

    Also returns the balance after step `snapshot`, if the run got there.
    """
    device = LockstepAllocator(channels, capacity // channels, ALIGNMENT)
    held: dict[str, Allocation] = {}
    receive: set[str] = set()
    widest, taken = 0, None
    number = 0
    for step in steps:
        number = step.number
        for tensor in step.free:
            device.free(held.pop(tensor))
            receive.discard(tensor)
        for tensor, what, nbytes in step.allocate:
            try:
                if what == "receive" and choose is not None:
                    held[tensor] = device.allocate(nbytes, tensor, channels=(choose(device, nbytes),))
                else:
                    pages = -(-nbytes // PAGE)
                    held[tensor] = device.allocate(-(-pages // channels) * PAGE, tensor)
            except OutOfMemory as e:
                failure = Failure(number, tensor, nbytes, sum(device.free_bytes()), str(e))
                last = _balance(number, device, held, receive)
                return SchemeResult(name, number - 1, failure, last, max(widest, last.spread)), taken
            if what == "receive":
                receive.add(tensor)
        balance = _balance(number, device, held, receive)
        widest = max(widest, balance.spread)
        if number == snapshot:
            taken = balance
    return SchemeResult(name, number, None, _balance(number, device, held, receive), widest), taken


def _balance(step: int, device: LockstepAllocator, held: dict[str, Allocation], receive: set[str]) -> Balance:
    per_channel = [0] * device.channels
    for tensor in receive:
        for c in held[tensor].channels:
            per_channel[c] += held[tensor].nbytes
    used = tuple(device.channel_bytes - free for free in device.free_bytes())
    return Balance(step, used, tuple(per_channel), device.largest_common())


_LABELS: dict[SchemeName, str] = {
    "contiguous/first": "one buffer in the first channel with room",
    "contiguous/emptiest": "one buffer in the emptiest channel",
    "per-channel": "one region in every channel",
}


def render(result: FragmentationResult, console: Console) -> None:
    """Prints the outcome under each rule, then what each channel held."""
    outcome = Table(
        title=f"Receive buffers on {result.channels} channels, {_size(result.capacity)}, seed {result.seed}",
        title_justify="left",
    )
    outcome.add_column("placement")
    outcome.add_column("outcome")
    for heading in ("asked for", "free in all", "largest common piece", "widest spread"):
        outcome.add_column(heading, justify="right")
    for s in result.schemes:
        failed = s.failure
        outcome.add_row(
            _LABELS[s.name],
            Text(f"fails at step {failed.step} of {result.steps}", "red")
            if failed
            else Text(f"all {result.steps} steps fit", "green"),
            _size(failed.asked) if failed else "",
            _size(failed.free if failed else result.channel_bytes * result.channels - sum(s.last.used)),
            _size(s.last.largest_common_piece),
            _size(s.widest_spread),
        )
    console.print(outcome)

    fill = Table(title="Used, of which receive buffers", title_justify="left")
    fill.add_column("channel", justify="right")
    columns = [(f"{s.name}, step {s.last.step}", s.last) for s in result.schemes]
    if result.compared is not None:
        columns.insert(-1, (f"per-channel, step {result.compared.step}", result.compared))
    for heading, _ in columns:
        fill.add_column(heading, justify="right")
    for c in range(result.channels):
        cells = [f"{b.used[c] / result.channel_bytes:6.1%}  {_size(b.receive[c]):>9}" for _, b in columns]
        fill.add_row(str(c), *cells)
    console.print(fill)
    for s in result.schemes:
        if s.failure is not None:
            console.print(Text(f"{_LABELS[s.name]}: {s.failure.tensor}: {s.failure.reason}"))


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB" if nbytes < 10 << 30 else f"{nbytes / (1 << 30):,.1f} GiB"
