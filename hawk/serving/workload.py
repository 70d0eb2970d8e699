"""What is asked of a cluster: when requests arrive and how long their prompts and answers are.

`chatbot` and `summarization` are DistServe's two larger workloads (Zhong et al., 2024, OSDI), from ShareGPT and
LongBench: mean lengths of prompt and answer 755.5 and 200.3, and 1738.3 and 90.7 tokens, for models that hold 2048.
That lengths are log-normal, and how wide, is assumed; `ASSUMED` has all of it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

import numpy as np

from hawk.errors import InvalidArgument
from hawk.serving.figures import Figure, number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    F64 = NDArray[np.float64]
    I64 = NDArray[np.int64]

MOST_REQUESTS = 10_000_000
MOST_TOKENS = 1 << 24
MOST_LINE = 1 << 16
"""Bytes of a line of a trace."""

_SOURCE = "DistServe (Zhong et al., 2024), lengths of its workloads, not read again"
_SHAPE = "log-normal, coefficient of variation and cut assumed: DistServe shows histograms, no figures"
ASSUMED = {
    "chatbot input mean": Figure(755.5, "tokens", "assumed", f"{_SOURCE}: ShareGPT"),
    "chatbot output mean": Figure(200.3, "tokens", "assumed", f"{_SOURCE}: ShareGPT"),
    "chatbot spread": Figure(0.9, "1", "assumed", _SHAPE),
    "summarization input mean": Figure(1738.3, "tokens", "assumed", f"{_SOURCE}: LongBench"),
    "summarization output mean": Figure(90.7, "tokens", "assumed", f"{_SOURCE}: LongBench"),
    "summarization input spread": Figure(0.25, "1", "assumed", _SHAPE),
    "summarization output spread": Figure(0.9, "1", "assumed", _SHAPE),
    "longest prompt": Figure(2048, "tokens", "assumed", "DistServe's models (OPT) hold 2048 tokens"),
}
"""Every figure of the two workloads, with its source."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt or an answer: whole numbers from `shortest` to `longest` with this mean.

    kind      "fixed"; "lognormal" with a coefficient of variation `spread` before it is cut; "exponential"
    """

    kind: Literal["fixed", "lognormal", "exponential"]
    mean: float
    spread: float = 0.0
    shortest: int = 1
    longest: int = 1 << 20

    def __post_init__(self) -> None:
        if self.kind not in ("fixed", "lognormal", "exponential"):
            raise InvalidArgument(
                "unknown kind of lengths",
                field="kind",
                got=self.kind,
                expected="fixed, lognormal or exponential",
            )
        number(self.spread, "spread", 0.0, 100.0)
        number(self.shortest, "shortest", 1)
        number(self.longest, "longest", self.shortest, MOST_TOKENS)
        number(self.mean, "mean", self.shortest, self.longest)

    def draw(self, count: int, rng: np.random.Generator) -> I64:
        """`count` lengths, `int64[count]`."""
        if self.kind == "fixed":
            return np.full(count, round(self.mean), np.int64)
        if self.kind == "exponential":
            drawn = rng.exponential(self.mean, count)
        else:
            sigma = math.sqrt(math.log1p(self.spread**2))
            drawn = np.exp(_centre(self, sigma) + sigma * rng.standard_normal(count))
        return np.clip(np.rint(drawn), self.shortest, self.longest).astype(np.int64)


@lru_cache(maxsize=64)
def _centre(lengths: Lengths, sigma: float) -> float:
    """The logarithm's mean with which what is left after cutting has the mean that is asked for."""
    normal = NormalDist()
    z = np.array([normal.inv_cdf((i + 0.5) / 4096) for i in range(4096)])
    low, high = math.log(lengths.shortest) - 5 * sigma, math.log(lengths.longest) + 5 * sigma
    for _ in range(60):
        middle = (low + high) / 2
        mean = float(np.clip(np.exp(middle + sigma * z), lengths.shortest, lengths.longest).mean())
        low, high = (middle, high) if mean < lengths.mean else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True, slots=True)
class Requests:
    """Drawn requests in the order of their arrival: seconds from 0 on, `float64[n]`; tokens, `int64[n]` each."""

    arrival: F64
    input: I64
    output: I64

    def __len__(self) -> int:
        return len(self.arrival)


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths and a way of arriving.

    arrivals    "poisson", or "even": one every 1 / rate seconds
    recorded    a trace in place of both: (arrival seconds, prompt tokens, answer tokens) by arrival
    """

    name: str
    input: Lengths
    output: Lengths
    arrivals: Literal["poisson", "even"] = "poisson"
    recorded: tuple[tuple[float, int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.arrivals not in ("poisson", "even"):
            raise InvalidArgument(
                "unknown way of arriving", field="arrivals", got=self.arrivals, expected="poisson or even"
            )

    @classmethod
    def chatbot(cls) -> Workload:
        """DistServe's chatbot: ShareGPT."""
        longest, spread = int(ASSUMED["longest prompt"].value), ASSUMED["chatbot spread"].value
        return cls(
            "chatbot",
            Lengths("lognormal", ASSUMED["chatbot input mean"].value, spread, 4, longest),
            Lengths("lognormal", ASSUMED["chatbot output mean"].value, spread, 2, longest),
        )

    @classmethod
    def summarization(cls) -> Workload:
        """DistServe's summarization: LongBench."""
        longest = int(ASSUMED["longest prompt"].value)
        first, second = (ASSUMED[f"summarization {side} spread"].value for side in ("input", "output"))
        return cls(
            "summarization",
            Lengths("lognormal", ASSUMED["summarization input mean"].value, first, 64, longest),
            Lengths("lognormal", ASSUMED["summarization output mean"].value, second, 2, longest),
        )

    @classmethod
    def fixed(cls, input: int, output: int, arrivals: Literal["poisson", "even"] = "poisson") -> Workload:
        """Every request alike."""
        return cls("fixed", Lengths("fixed", input), Lengths("fixed", output), arrivals)

    @classmethod
    def named(cls, name: str) -> Workload:
        """`"chatbot"`, `"summarization"`, or the path of a trace that ends in `.jsonl`."""
        if name.endswith(".jsonl"):
            return cls.trace(Path(name))
        known = {"chatbot": cls.chatbot, "summarization": cls.summarization}
        if name not in known:
            raise InvalidArgument(
                "unknown workload",
                field="workload",
                got=name[:200],
                expected=f"{' or '.join(known)}, or a file .jsonl",
            )
        return known[name]()

    @classmethod
    def trace(cls, path: str | Path) -> Workload:
        """A trace: one JSON object a line with `arrival` (seconds), `input` and `output` (tokens, 1 or more).

        Lines may come in any order; the first arrival becomes 0.  Raises `InvalidArgument` naming file and line.
        """
        rows: list[tuple[float, int, int]] = []
        try:
            with Path(path).open("rb") as file:
                for n, line in enumerate(iter(partial(file.readline, MOST_LINE + 1), b""), 1):
                    if len(line) > MOST_LINE:
                        raise InvalidArgument(
                            "the line is too long", field=f"{path}:{n}", expected=f"{MOST_LINE} bytes"
                        )
                    if line.strip():
                        rows.append(_row(line, f"{path}:{n}"))
                    if len(rows) > MOST_REQUESTS:
                        raise InvalidArgument(
                            "too many requests", field=f"{path}:{n}", expected=MOST_REQUESTS
                        )
        except OSError as error:
            raise InvalidArgument("cannot read this file", field=str(path), got=error.strerror) from error
        return cls._of(rows, str(path))

    @classmethod
    def of(cls, rows: list[tuple[float, int, int]], name: str = "trace") -> Workload:
        """A trace of rows (arrival seconds, prompt tokens, answer tokens); raises `InvalidArgument` naming the row."""
        return cls._of([_checked(*row, f"{name}[{n}]") for n, row in enumerate(rows)], name)

    @classmethod
    def _of(cls, rows: list[tuple[float, int, int]], name: str) -> Workload:
        if not rows:
            raise InvalidArgument("a trace needs a request", field=name, got="none", expected="1 or more")
        rows = sorted(rows)
        first = rows[0][0]
        columns = np.array([(a - first, i, o) for a, i, o in rows])
        means = [Lengths("fixed", max(1.0, float(columns[:, k].mean()))) for k in (1, 2)]
        kept = tuple((float(a), int(i), int(o)) for a, i, o in columns)
        return cls(name, means[0], means[1], "poisson", kept)

    def draw(self, rate: float | None, count: int | None, seed: int) -> Requests:
        """`count` requests at `rate` a second.

        Of a trace the first `count` (None: all), at its own times where `rate` is None, else spread so that they come
        at that rate on average.  The same seed gives the same gaps in every unit of 1 / rate, and the same lengths.
        """
        if self.recorded:
            kept = np.array(self.recorded[:count])
            arrival = kept[:, 0]
            if rate is not None and len(arrival) > 1:
                if arrival[-1] <= 0:
                    raise InvalidArgument(
                        "requests that come all at once have no rate",
                        field="rate",
                        got=rate,
                        expected="None, for a trace's own times",
                    )
                arrival = arrival * ((len(arrival) - 1) / arrival[-1] / rate)
            return Requests(arrival, kept[:, 1].astype(np.int64), kept[:, 2].astype(np.int64))
        if rate is None or count is None:
            field = "rate" if rate is None else "requests"
            raise InvalidArgument("needed without a trace", field=field, got=None, expected="a number")
        streams = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(3)]
        gaps = streams[0].exponential(1.0, count) if self.arrivals == "poisson" else np.ones(count)
        arrival = np.cumsum(gaps) / rate
        return Requests(arrival, self.input.draw(count, streams[1]), self.output.draw(count, streams[2]))


def _row(line: bytes, field: str) -> tuple[float, int, int]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("this is no JSON", field=field, got=str(error)[:200]) from None
    if not isinstance(found, dict):
        raise InvalidArgument(
            "an object is needed", field=field, got=str(found)[:200], expected="arrival, input, output"
        )
    return _checked(found.get("arrival"), found.get("input"), found.get("output"), field)


def _checked(arrival: object, input: object, output: object, field: str) -> tuple[float, int, int]:
    """One request of a trace."""
    tokens = []
    for key, value in (("input", input), ("output", output)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_TOKENS:
            got, most = str(value)[:200], MOST_TOKENS
            raise InvalidArgument(
                "a number of tokens", field=f"{field}: {key}", got=got, expected=f"1..{most}"
            )
        tokens.append(value)
    return number(arrival, f"{field}: arrival"), tokens[0], tokens[1]
