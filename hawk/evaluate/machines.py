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


def beside_prefill(sources: Sequence[Source]) -> Table | None:
    """What a transfer costs the prefill that it runs beside."""
    rows = [
        (
            size.nbytes / 1e6,
            row.agent,
            row.beside,
            row.seconds * 1e3,
            100 * row.slows,
            row.after * 1e3,
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
        Column("size, MB", "size_mb", ".1f"),
        Column("agent", "agent"),
        Column("beside the prefill", "beside"),
        Column("prefill, ms", "prefill_ms", ".1f"),
        Column("slows by, %", "slows_percent", ".1f"),
        Column("left after its end, ms", "after_ms", ".1f"),
        Column("origin", "origin"),
        Column("file", "source"),
    )
    caption = "A prefill on a GPU alone and beside a transfer of its own layers."
    return Table("beside-prefill", "Beside a prefill", caption, columns, tuple(rows))
