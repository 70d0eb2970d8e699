"""Tables of what else was measured: the naive way's stages, the single buffer, whole jobs, retile, beside a prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hawk.bench.between_result import GOAL_STAGE
from hawk.evaluate.records import Axis, Column, Figure, Origin, Panel, Point, Series, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.evaluate.sources import Source

_SCHEMES = {
    "contiguous/first": ("one buffer, first channel with room", "first-channel"),
    "contiguous/emptiest": ("one buffer, emptiest channel", "emptiest-channel"),
    "per-channel": ("one region in every channel", "every-channel"),
}


def stages(sources: Sequence[Source]) -> Table | None:
    """How near the naive way's stages come to what the machine can do, which shows that it is no straw man."""
    rows = [
        (size.bytes / 1e6, stage, found, source.origin.value, source.name)
        for source in sources
        for size in source.data.sizes
        for stage, found in size.naive_ratio.items()
    ]
    if not rows:
        return None
    columns = (
        Column("size, MB", "size_mb", ".1f"),
        Column("stage of GN-Host", "stage"),
        Column("rate, by the best alone", "ratio", ".2f"),
        Column("origin", "origin"),
        Column("file", "source"),
    )
    caption = (
        "down, up: copies from and to the device's memory; sockets: the whole tensor; tile: rearranging on arrival. "
        f"Below {GOAL_STAGE:g} the naive way is slower than it need be, and what is said of it is too kind to HAWK."
    )
    return Table("naive-stages", "Is the naive way a straw man?", caption, columns, tuple(rows))


def fragmentation(source: Source) -> list[Figure | Table]:
    """The case that runs out of memory: what each channel held when it did."""
    data = source.data
    series, rows = [], []
    for scheme in data.schemes:
        label, key = _SCHEMES.get(scheme.name, (scheme.name, ""))
        points = tuple(
            Point(float(c), 100 * used / data.channel_bytes) for c, used in enumerate(scheme.last.used)
        )
        series.append(Series(f"{label}, step {scheme.last.step}", key, Origin.SIMULATED, source.name, points))
        failed = scheme.failure
        rows.append(
            (
                label,
                f"out of memory at step {failed.step} of {data.steps}"
                if failed
                else f"all {data.steps} steps fit",
                failed.asked / (1 << 20) if failed else None,
                failed.free / (1 << 20) if failed else None,
                scheme.widest_spread / (1 << 20),
                Origin.SIMULATED.value,
            )
        )
    columns = (
        Column("receive buffers", "placement"),
        Column("outcome", "outcome"),
        Column("asked for, MiB", "asked_mib", ",.0f"),
        Column("free in all channels, MiB", "free_mib", ",.0f"),
        Column("widest spread between channels, MiB", "spread_mib", ",.0f"),
        Column("origin", "origin"),
    )
    caption = (
        f"A serving run of {data.steps} steps, replayed on HAWK's own allocator for {data.channels} channels of "
        f"{data.channel_bytes / (1 << 30):g} GiB, seed {data.seed}; nothing is timed. {source.told}."
    )
    figure = Figure(
        "single-buffer-channels",
        "The single receive buffer: what each channel holds at the end",
        f"{caption} An allocation over all channels needs the same room in each.",
        Axis("memory channel", "", "channel"),
        Axis("used", "%", "used_percent"),
        (Panel("", tuple(series)),),
        form="points",
    )
    table = Table("single-buffer", "The single receive buffer", caption, columns, tuple(rows))
    return [table, figure]


def jobs(sources: Sequence[Source]) -> Table | None:
    """Whole jobs of `hawk bench transfer` and of `hawk bench gpu`."""
    rows: list[tuple[Any, ...]] = []
    for source in sources:
        for size in source.data.sizes:
            found = (
                [("the host", name, t.job) for name, t in size.transports.items()]
                if source.benchmark == "transfer"
                else [("a GPU" if j.source == "gpu" else "the host", j.transport, j) for j in size.jobs]
            )
            rows += [
                (
                    size.bytes / 1e6,
                    where,
                    over,
                    job.seconds * 1e3,
                    job.fastest * 1e3,
                    job.slowest * 1e3,
                    size.bytes / job.seconds / 1e9,
                    source.origin.value,
                    source.name,
                )
                for where, over, job in found
            ]
    if not rows:
        return None
    columns = (
        Column("size, MB", "size_mb", ".1f"),
        Column("from memory of", "source_memory"),
        Column("over", "transport"),
        Column("median, ms", "median_ms", ".1f"),
        Column("fastest, ms", "fastest_ms", ".1f"),
        Column("slowest, ms", "slowest_ms", ".1f"),
        Column("GB/s", "gb_per_s", ".2f"),
        Column("origin", "origin"),
        Column("file", "source"),
    )
    caption = (
        "From offering until ready, pages into tiles in eight emulated channels, between two agents; "
        "every byte compared."
    )
    return Table("jobs", "Whole jobs over HAWK's transports", caption, columns, tuple(rows))


def retile(sources: Sequence[Source]) -> Table | None:
    """Conversion beside a plain copy."""
    rows = []
    for source in sources:
        where = "one processor" if source.benchmark == "retile" else source.data.device
        rows += [
            (
                row.pair,
                row.tensor,
                where,
                row.gb_per_s,
                row.copy_gb_per_s,
                row.ratio,
                source.origin.value,
                source.name,
            )
            for row in source.data.rows
        ]
    if not rows:
        return None
    columns = (
        Column("from > to", "pair"),
        Column("tensor", "tensor"),
        Column("on", "device"),
        Column("GB/s read and written", "gb_per_s", ".1f"),
        Column("a plain copy, GB/s", "copy_gb_per_s", ".1f"),
        Column("by the copy", "ratio", ".2f"),
        Column("origin", "origin"),
        Column("file", "source"),
    )
    caption = (
        "Conversion between layouts and number types beside a plain copy of as many bytes in the same run."
    )
    return Table("retile", "Retile", caption, columns, tuple(rows))


_NOTHING_MOVES = ("nothing", "told")
"""What is beside a prefill in rows after whose end nothing can be left."""


def _spread(row: Any) -> tuple[float | None, ...]:
    """By how much it is slowed, in percent; the prefill alone is what the others are held against."""
    if row.beside == "nothing":
        return None, None, None
    return 100 * row.slows, 100 * row.least, 100 * row.most


def beside_prefill(sources: Sequence[Source]) -> Table | None:
    """What a transfer costs the prefill that it runs beside."""
    rows = [
        (
            size.tokens,
            size.nbytes / 1e6,
            row.agent,
            row.launch,
            row.beside,
            row.seconds * 1e3,
            *_spread(row),
            None if row.beside in _NOTHING_MOVES else row.after * 1e3,
            row.part or None,
            source.origin.value,
            source.name,
        )
        for source in sources
        for size in source.data.sizes
        for row in size.rows
    ]
    if not rows:
        return None
    columns = (
        Column("tokens", "tokens", ",.0f"),
        Column("size, MB", "size_mb", ",.0f"),
        Column("agent", "agent"),
        Column("launched as", "launch"),
        Column("beside", "beside"),
        Column("prefill, ms", "prefill_ms", ".1f"),
        Column("slows by, %", "slows_percent", ".1f"),
        Column("least", "least_percent", ".1f"),
        Column("most", "most_percent", ".1f"),
        Column("after, ms", "after_ms", ".1f"),
        Column("of the job", "part_of_job", ".2f"),
        Column("origin", "origin"),
        Column("file", "source"),
    )
    caption = (
        "A prefill on a GPU, alone and beside a transfer of its own layers: by what part it takes longer than alone in "
        "the same round, the median of the rounds with the least and the most of them. Agent: embedded in the "
        "prefill's process, apart in a process of its own, or none. Launched as: kernels, one by one from a thread, as "
        "engines do, or a layer at a time as CUDA graphs. Beside: nothing; told: an agent is told of each layer, and "
        "nobody fetches; job: it is told, and another process fetches all of it; kernels: all chunks are only retiled; "
        "copies: as many bytes are only copied into locked memory. After: from the prefill's end until all of that is "
        "done, and what part that is of the job alone. A rate beside the agent: into another GPU over a link of that "
        "rate."
    )
    return Table("beside-prefill", "Beside a prefill", caption, columns, tuple(rows))
