"""What `hawk bench overlap` has seen, as JSON and as tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from rich.table import Table

from hawk.bench.samples import machine

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Row:
    """Something beside the prefill; seconds of the runs, one a round.

    agent     "none", "embedded" or "apart"
    launch    "kernels" or "graphs"
    slows     by what part of itself the prefill takes longer than alone in the same round, the median of the rounds
    least, most    of the rounds
    after     from the prefill's end until the job is ready, or all that was put onto the GPU is done
    part      that as part of the job alone
    """

    agent: str
    launch: str
    beside: str
    seconds: float
    slows: float
    least: float
    most: float
    launching: float
    after: float = 0.0
    part: float = 0.0


@dataclass
class Size:
    """All of one number of tokens: bytes of the request, seconds of the job alone by agent, and rows."""

    tokens: int
    nbytes: int
    alone: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


@dataclass
class Result:
    """Outcome of `run`; every byte of the last job was compared."""

    device: str
    runs: int
    chunk: int
    mps: bool
    sizes: list[Size]

    def to_dict(self) -> dict[str, object]:
        """Seconds and bytes throughout."""
        return {"machine": machine(), "correct": True, **asdict(self)}


def render(result: Result, console: Console) -> None:
    """Print `result` as tables."""
    mps = ", under MPS" if result.mps else ""
    console.print(
        f"Beside a prefill on {result.device}{mps}, {result.runs} rounds, chunks of at most {result.chunk >> 20} MiB; "
        "every byte of the last job compared"
    )
    for size in result.sizes:
        told = ", ".join(f"{agent} {seconds * 1e3:.1f} ms" for agent, seconds in size.alone.items())
        table = Table(
            title=f"{size.tokens} tokens, {size.nbytes / 1e6:.0f} MB; a job alone: {told or 'none'}"
        )
        for title in ("agent", "launched as", "beside"):
            table.add_column(title)
        for title in ("prefill, ms", "launching", "slows", "least", "most", "after, ms", "of the job"):
            table.add_column(title, justify="right")
        for row in size.rows:
            table.add_row(
                row.agent,
                row.launch,
                row.beside,
                f"{row.seconds * 1e3:.2f}",
                f"{row.launching * 1e3:.2f}",
                *(f"{x:+.1%}" for x in (row.slows, row.least, row.most)),
                f"{row.after * 1e3:.2f}" if row.after else "",
                f"{row.part:.2f}" if row.part else "",
            )
        console.print(table)
