"""What `hawk bench serving` has measured and foretold, as records that its JSON is read back into."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from hawk.bench.load_pace import Pace
from hawk.bench.load_single import Calibration, Count, Seconds, Some
from hawk.errors import InvalidArgument

KIND = "hawk-bench-serving"
GOAL = 0.2
"""By how much of what was measured a percentile may be missed."""

PERCENTILES = (50, 90)

PARTS = ("prefill", "fetch", "step", "rest")
"""As of a `Single`; in `rest` is the line in front of the prefill engine, too, which no engine counts."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request: seconds since the first could be due, tokens.  `first` and `last` are none where it failed."""

    due: Seconds
    sent: float
    first: float | None
    last: float | None
    input: Count
    output: Count
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from when it was due to its first token; endless where it failed."""
        return float("inf") if self.first is None else self.first - self.due

    @property
    def tpot(self) -> float:
        """Seconds of a token behind the first."""
        if self.first is None or self.last is None:
            return float("inf")
        return (self.last - self.first) / max(1, self.output - 1)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Of the model."""

    vocabulary: Count
    width: Count
    inner: Count
    layers: Count
    heads: Count
    kv_heads: Count
    dim: Count


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of prompts and answers, in tokens.

    Prompts are log-uniform between `least` and `most`, whole tokens; answers are geometric with mean `output`, cut
    off at `output_most`, and of 2 tokens at least.
    """

    least: Count
    most: Count
    output: Annotated[float, msgspec.Meta(ge=2)]
    output_most: Count

    def draw(self, dice: np.random.Generator, count: int) -> tuple[list[int], list[int]]:
        """So many of each."""
        inputs = np.exp(dice.uniform(np.log(self.least), np.log(self.most), count))
        outputs = 1 + dice.geometric(1 / (self.output - 1), count)
        return (
            [int(n) for n in np.clip(np.rint(inputs), self.least, self.most)],
            [int(n) for n in np.minimum(outputs, self.output_most)],
        )


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """How the engines were started, and what was asked of them.

    block      tokens of a block of the cache, on both sides
    budget     tokens of a step of the prefill engine at most
    batch      requests of a step at most, on either side
    """

    shape: Shape
    dtype: str
    block: Count
    budget: Count
    batch: Count
    lengths: Lengths

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's cache."""
        shape = self.shape
        return 2 * shape.layers * shape.kv_heads * shape.dim * (4 if self.dtype == "float32" else 2)


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A percentile of the time to the first token, in seconds: measured and foretold by one model."""

    model: str
    percentile: int
    measured: float
    predicted: float

    @property
    def difference(self) -> float:
        """What is foretold over what was measured, less one."""
        return self.predicted / self.measured - 1

    @property
    def within(self) -> bool:
        """Whether that is at most `GOAL`."""
        return abs(self.difference) <= GOAL


class Rate(msgspec.Struct, kw_only=True):
    """Requests at one rate.

    fraction  of what the prefill engine can do
    warm_up   requests at the beginning that no percentile counts
    at        when the first could be due, on the system's count of seconds
    others    the part of the processors that other programs took meanwhile
    fetched   caches that HAWK has carried; of others the decode engine computed the prompt itself
    compared  one entry for each model and percentile, without those that lie among failed requests
    parts     mean seconds of `PARTS` over all answered requests, `measured` (by the engines' own counts, and the
              rest) and by each model: where the time goes that a model has not foretold
    """

    fraction: Some
    per_second: Some
    warm_up: int
    requests: list[Request]
    fetched: int
    at: float = 0.0
    others: float = 0.0
    compared: list[Compared] = []
    parts: dict[str, dict[str, float]] = {}

    @property
    def counted(self) -> list[Request]:
        """Those behind the warm-up."""
        return self.requests[self.warm_up :]

    @property
    def failed(self) -> list[Request]:
        """Those that got no whole answer."""
        return [request for request in self.requests if request.error]

    def ttft(self, percentile: float) -> float:
        """Seconds, of counted requests; linear between two neighbours; endless where one of these failed."""
        waits = sorted(r.ttft for r in self.counted)
        at = percentile / 100 * (len(waits) - 1)
        low, high = waits[int(at)], waits[min(int(at) + 1, len(waits) - 1)]
        return low if at == int(at) else low + (high - low) * (at - int(at)) if high < float("inf") else high

    @property
    def lasted(self) -> float:
        """Seconds from when the first could be due to the last token."""
        return max(r.last or r.due for r in self.requests)

    @property
    def late(self) -> float:
        """Seconds by which the latest request was sent behind its due time."""
        return max(r.sent - r.due for r in self.requests)


class Measured(msgspec.Struct, kw_only=True):
    """The whole benchmark; its JSON has these fields, with those that follow from them (`to_dict`).

    lacks  why something is missed or not compared;  logs: the end of the engines' where a request failed
    pace   of each side's processors all the while, on the system's count of seconds
    """

    kind: str = KIND
    format: int = 1
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    seed: int
    setting: Setting
    calibration: Calibration = msgspec.field(default_factory=Calibration)
    rates: list[Rate] = []
    lacks: list[str] = []
    logs: dict[str, str] = {}
    pace: dict[str, Pace] = {}

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the records, and what follows from them for who reads the JSON without us."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        for rate, told in zip(self.rates, plain["rates"], strict=True):
            told["failed"] = len(rate.failed)
            told["late"] = rate.late
            for entry, row in zip(rate.compared, told["compared"], strict=True):
                row["difference"] = entry.difference
                row["within"] = entry.within
        plain["goal"] = GOAL
        plain["holds"] = self.holds
        return plain

    @property
    def holds(self) -> dict[str, bool]:
        """By model: whether every percentile at every rate is foretold within `GOAL`."""
        models = dict.fromkeys(entry.model for rate in self.rates for entry in rate.compared)
        return {
            model: all(
                sum(entry.within for entry in rate.compared if entry.model == model) == len(PERCENTILES)
                for rate in self.rates
            )
            for model in models
        }


class _Said(msgspec.Struct):
    """What any benchmark's object says of itself."""

    benchmark: str | None = None


def read(path: str | Path) -> Measured:
    """What the command's `--json` wrote.  Raises `InvalidArgument` naming file and field, and `OSError`."""
    raw = Path(path).read_bytes()
    with contextlib.suppress(msgspec.MsgspecError):  # what is wrong otherwise is said below, with its field
        said = msgspec.json.decode(raw, type=_Said).benchmark
        if said not in (None, "load"):
            raise InvalidArgument(
                f"not a serving run: it says benchmark={said}",
                field="benchmark",
                got=said,
                expected="load",
                file=str(path),
            )
    try:
        found = msgspec.json.decode(raw, type=Measured)
    except msgspec.ValidationError as fault:
        text, _, where = str(fault).partition(" - at ")
        raise InvalidArgument(text, field=where.strip("`") or "$", file=str(path)) from None
    except msgspec.DecodeError as fault:
        raise InvalidArgument("no JSON", field="file", got=str(path), reason=str(fault)) from None
    for field, got, expected in (("kind", found.kind, KIND), ("format", found.format, 1)):
        if got != expected:
            raise InvalidArgument(
                "not of this benchmark", field=field, got=got, expected=expected, file=str(path)
            )
    lengths = found.calibration.lengths()
    for field, entries in (("singles", lengths), ("steps", found.calibration.steps)):
        if not entries:
            raise InvalidArgument(
                "nothing was measured", field=f"$.calibration.{field}", got="none", expected="1 or more"
            )
    others = {f"beside[{n}].one": entry.one for n, entry in enumerate(found.calibration.beside)}
    others |= {f"behind[{n}]": one for n, one in enumerate(found.calibration.behind)}
    for name, one in others.items():
        if one.input not in lengths:
            raise InvalidArgument(
                "no single request of this length",
                field=f"$.calibration.{name}.input",
                got=one.input,
                expected=", ".join(map(str, lengths)),
                file=str(path),
            )
    for number, rate in enumerate(found.rates):
        for which, asked in enumerate(rate.requests):
            if asked.first is not None and not asked.due < asked.first <= (asked.last or asked.first) < float(
                "inf"
            ):
                raise InvalidArgument(
                    "a token before its time",
                    field=f"$.rates[{number}].requests[{which}].first",
                    got=asked.first,
                    expected=f"after {asked.due}, when it was due, and not after {asked.last}",
                    file=str(path),
                )
        if not 0 <= rate.warm_up < len(rate.requests):
            raise InvalidArgument(
                "no request is counted",
                field=f"$.rates[{number}].warm_up",
                got=rate.warm_up,
                expected=f"0..{len(rate.requests) - 1}",
                file=str(path),
            )
    return found


def medians(values: Sequence[float]) -> str:
    """Milliseconds: the median, the least and the most."""
    ms = sorted(1e3 * value for value in values)
    return f"{statistics.median(ms):.1f} ({ms[0]:.1f} to {ms[-1]:.1f})"
