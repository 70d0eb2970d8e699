"""What the report reads of benchmarks' JSON, as types that `msgspec` checks; times in seconds, sizes in bytes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

Seconds = Annotated[float, Meta(gt=0, le=1e6)]
Span = Annotated[float, Meta(ge=0, le=1e6)]
Rate = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Some = Annotated[int, Meta(ge=1, le=1 << 62)]


class Machine(Struct, frozen=True):
    """As `hawk.bench.samples.machine` says it; older files say less."""

    cpus: int = 0
    python: str = ""
    numpy: str = ""
    retile_core: str = ""
    processor: str = ""
    system: str = ""


class About(Struct, frozen=True):
    """What every benchmark's object may have."""

    machine: Machine | None = None
    date: str = ""
    hawk: str = ""


class Sample(Struct, frozen=True):
    """The median run, with the fastest and the slowest."""

    seconds: Seconds
    fastest: Seconds
    slowest: Seconds

    def __post_init__(self) -> None:
        """Raises what `msgspec` makes a `ValidationError` of."""
        if not self.fastest <= self.seconds <= self.slowest:
            raise ValueError(
                f"Expected fastest <= seconds <= slowest, got {self.fastest}, {self.seconds}, {self.slowest}"
            )


class Way(Sample, frozen=True):
    """A way of `hawk bench transfer --devices` at one rate."""

    phases: dict[str, Span] = field(default_factory=dict)
    stages: dict[str, Span] = field(default_factory=dict)
    control: float = 0.0


class BetweenSize(Struct, frozen=True):
    """Ways by name and rate; baselines of the naive way's stages."""

    bytes: Some
    ways: Annotated[dict[str, dict[str, Way]], Meta(min_length=1)]
    tokens: Count = 0
    raw: Sample | None = None
    baselines: dict[str, Sample] = field(default_factory=dict)
    naive_ratio: dict[str, Rate] = field(default_factory=dict)


class Between(Struct, frozen=True):
    """`hawk bench transfer --devices`."""

    devices: str
    sizes: Annotated[list[BetweenSize], Meta(min_length=1)]
    runs: Some
    pace: Annotated[float, Meta(ge=0)]
    names: list[str] = field(default_factory=list)
    one_gpu: bool = False
    channels: str = ""
    correct: bool = True


class Job(Sample, frozen=True):
    """A whole job of `hawk bench transfer`."""

    mode: str
    control: float = 0.0
    parts: dict[str, Span] = field(default_factory=dict)
    parts_sum: Span = 0.0


class Over(Struct, frozen=True):
    """One transport of `hawk bench transfer`."""

    beside: str
    job: Job
    one: Sample | None = None
    pieces: Sample | None = None


class TransferSize(Struct, frozen=True):
    """One size of `hawk bench transfer`."""

    bytes: Some
    transports: dict[str, Over]
    sockets: Sample | None = None
    memcpy: Sample | None = None


class LeftOut(Struct, frozen=True):
    """A size that was not measured."""

    asked: Count
    reason: str


class Transfer(Struct, frozen=True):
    """`hawk bench transfer`."""

    runs: Some
    sizes: list[TransferSize]
    left_out: list[LeftOut] = field(default_factory=list)
    correct: bool = True


class GpuJob(Sample, frozen=True):
    """A whole job of `hawk bench gpu`."""

    source: str
    transport: str
    phases: dict[str, Span] = field(default_factory=dict)


class Beside(Struct, frozen=True):
    """A job beside a prefill, of `hawk bench gpu`."""

    transport: str
    alone: Seconds
    beside: Seconds
    tail: float
    sequential: Span
    slows: float


class GpuSize(Struct, frozen=True):
    """One size of `hawk bench gpu`."""

    bytes: Some
    copies: dict[str, Seconds]
    jobs: list[GpuJob]
    overlap: list[Beside] = field(default_factory=list)


class Gpu(Struct, frozen=True):
    """`hawk bench gpu`."""

    device: str
    runs: Some
    sizes: list[GpuSize]
    correct: bool = True


class RetileRow(Struct, frozen=True):
    """One conversion: 10**9 bytes a second read and written, and the rate as part of a copy's."""

    pair: str
    tensor: str
    gb_per_s: Rate
    copy_gb_per_s: Rate
    ratio: Rate
    goal: float | None = None


class Retile(Struct, frozen=True):
    """`hawk bench retile`."""

    size: Some
    repeats: Some
    instructions: str
    rows: Annotated[list[RetileRow], Meta(min_length=1)]


class RetileCuda(Struct, frozen=True):
    """`hawk bench retile --device`."""

    device: str
    repeats: Some
    rows: Annotated[list[RetileRow], Meta(min_length=1)]


class OverlapRow(Struct, frozen=True):
    """Something beside a prefill, of `hawk bench overlap`."""

    agent: str
    launch: str
    beside: str
    seconds: Seconds
    slows: float
    least: float
    most: float
    after: float = 0.0
    part: float = 0.0


class OverlapSize(Struct, frozen=True):
    """One number of tokens of `hawk bench overlap`."""

    tokens: Some
    nbytes: Some
    rows: list[OverlapRow]


class Overlap(Struct, frozen=True):
    """`hawk bench overlap`."""

    device: str
    runs: Some
    sizes: list[OverlapSize]
    correct: bool = True


class Failure(Struct, frozen=True):
    """The allocation that did not fit."""

    step: Count
    tensor: str
    asked: Count
    free: Count


class Balance(Struct, frozen=True):
    """Bytes in each channel."""

    step: Count
    used: list[Count]
    receive: list[Count]
    largest_common_piece: Count = 0


class Scheme(Struct, frozen=True):
    """A way of placing receive buffers."""

    name: str
    steps_done: Count
    failure: Failure | None
    last: Balance
    widest_spread: Count


class Fragmentation(Struct, frozen=True):
    """`hawk bench fragmentation`."""

    channels: Some
    capacity: Some
    channel_bytes: Some
    seed: int
    steps: Count
    schemes: Annotated[list[Scheme], Meta(min_length=1)]
    compared: Balance | None = None
    claim_holds: bool = False


class Compared(Struct, frozen=True):
    """A percentile of the time to the first token, measured and foretold by one model."""

    model: str
    percentile: Annotated[int, Meta(ge=1, le=100)]
    measured: Seconds
    predicted: Span


class Asked(Struct, frozen=True):
    """A request of it, as far as the report counts it."""

    error: str = ""


class LoadRate(Struct, frozen=True):
    """One rate of `hawk bench serving`; `fetched`: caches that HAWK has carried."""

    fraction: Annotated[float, Meta(gt=0, le=100)]
    per_second: Annotated[float, Meta(gt=0, le=1e9)]
    requests: list[Asked]
    compared: list[Compared] = field(default_factory=list)
    fetched: Count | None = None

    @property
    def failed(self) -> int:
        """Requests that got no whole answer."""
        return sum(bool(one.error) for one in self.requests)


class Load(Struct, frozen=True):
    """`hawk bench serving`: engines under load, beside what the simulator foretold of them."""

    rates: Annotated[list[LoadRate], Meta(min_length=1)]
    lacks: list[str] = field(default_factory=list)
    goal: Annotated[float, Meta(gt=0, le=10)] = 0.2

    @property
    def models(self) -> list[str]:
        """Those that foretold something, in their order."""
        return list(dict.fromkeys(one.model for rate in self.rates for one in rate.compared))

    def held(self, model: str) -> bool:
        """Whether it foretold every percentile at every rate within the goal, by the numbers that the report shows.

        A percentile that another rate has, and one does not (since it lies among requests that failed), is missed.
        """
        wanted = {one.percentile for rate in self.rates for one in rate.compared}
        return all(
            wanted
            == {
                one.percentile
                for one in rate.compared
                if one.model == model and abs(one.predicted / one.measured - 1) <= self.goal
            }
            for rate in self.rates
        )
