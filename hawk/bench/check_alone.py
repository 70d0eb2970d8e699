"""The check of a chunk alone: where the sender has it, in one piece, and where the receiver has it, in pages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from hawk.bench import whole_job
from hawk.bench.samples import Samples
from hawk.errors import InternalError
from hawk.jobs.verify import checks_of
from hawk.memory.npu import EmulatedNpu
from hawk.plan import stretches
from hawk.plan.segments import direct
from hawk.plan.target import split, target_chunk
from hawk.plan.types import Placement, Selection

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.demo.scenario import Scenario


def measure(scene: Scenario, runs: int) -> dict[str, Samples]:
    """Samples by what was done with one chunk of the scene: "copy" by `np.copyto`, "sent" and "landed" its check.

    Raises `InternalError` if the check of both sides differs, or a flipped bit does not change it.
    """
    target = scene.target.compile()
    selection = Selection(0, scene.target.layers, 0, scene.tokens)
    chunk = split(target, selection, max_bytes=16 << 20)[0]
    planned = target_chunk(target, scene.target_blocks(), selection, chunk)
    memory = EmulatedNpu(
        "bench", capacity=scene.target_bytes + whole_job.SPARE, channels=scene.channels, alignment=64
    )
    try:
        offsets = [memory.allocate(target.channel_bytes, "bench").offset for _ in range(target.buffer_count)]
        placement = Placement(
            np.tile(np.arange(memory.channels, dtype=np.int32), (target.buffer_count, 1)),
            np.tile(np.array(offsets, np.int64)[:, None], (1, memory.channels)),
        )
        regions = [region.array for region in memory.regions]
        arena = np.random.default_rng(0).integers(0, 256, planned.nbytes, np.uint8)
        rows = direct(planned, placement, 0)
        columns = (rows.region.tolist(), rows.local.tolist(), rows.remote.tolist(), rows.nbytes.tolist())
        for region, local, remote, nbytes in zip(*columns, strict=True):
            regions[region][local : local + nbytes] = arena[remote : remote + nbytes]
        sent, landed = stretches.prepared(planned), stretches.landed(planned, placement)
        out, there, copy = (
            np.zeros(len(sent), np.uint64),
            np.zeros(len(sent), np.uint64),
            np.empty_like(arena),
        )
        samples = {name: Samples(rows.total) for name in ("copy", "sent", "landed")}
        samples["copy"].nbytes = planned.nbytes
        ways: dict[str, Callable[[], None]] = {
            "copy": lambda: np.copyto(copy, arena),
            "sent": lambda: checks_of(sent, [arena], out),
            "landed": lambda: checks_of(landed, regions, there),
        }
        for number in range(runs + 1):
            for name, work in ways.items():
                began = time.perf_counter()
                work()
                if number:
                    samples[name].seconds.append(time.perf_counter() - began)
        if not np.array_equal(out, there):
            raise InternalError("the same bytes have different checks")
        regions[rows.region[-1]][rows.local[-1]] ^= 1
        checks_of(landed, regions, there)
        if int((out != there).sum()) != 1:
            raise InternalError("a flipped bit does not change its check, or changes others")
    finally:
        memory.close()
    return samples
