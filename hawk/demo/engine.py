"""The inference engine's part: it owns the source cache and knows what is in it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hawk.demo import check
from hawk.demo.scenario import ALIGNMENT
from hawk.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hawk.cache import KVCache
    from hawk.demo.scenario import Scenario
    from hawk.handles import DeviceCache

UNTOUCHED = 0xA5
"""What the device cache holds before the transfer, and afterwards wherever the request has no block."""

_BATCH = 256
"""Tokens filled at a time: half a MiB, which stays in the caches while it is worked on."""


def fill(cache: KVCache, scenario: Scenario) -> Iterator[int]:
    """Writes the request's keys and values into its blocks, plane by plane; yields how many are done."""
    spec, table = scenario.source, scenario.source_blocks()
    step = _BATCH // spec.block_size * spec.block_size
    for layer in range(spec.layers):
        # The paged cache of an engine: [kv, block, slot, head, dim] of 16-bit elements.
        pages = (
            cache.buffers[layer]
            .view(np.uint16)
            .reshape(spec.kvs, spec.blocks, spec.block_size, spec.heads, spec.dim)
        )
        for kv in range(spec.kvs):
            for first in range(0, scenario.tokens, step):
                count = min(step, scenario.tokens - first)
                rows = check.elements(layer, kv, first, count, spec.heads, spec.dim)
                whole = count // spec.block_size
                begin = first // spec.block_size
                size = whole * spec.block_size
                pages[kv][table[begin : begin + whole]] = rows[:size].reshape(
                    whole, spec.block_size, spec.heads, spec.dim
                )
                if size < count:
                    pages[kv][table[begin + whole], : count - size] = rows[size:]
            yield layer * spec.kvs + kv + 1


async def fill_in_threads(cache: KVCache, scenario: Scenario) -> None:
    """`fill`, off the event loop; cancelled, it ends after the plane it is at."""
    planes = fill(cache, scenario)
    while await asyncio.to_thread(next, planes, None) is not None:
        pass


def mark(target: DeviceCache) -> None:
    """Fills the device cache with `UNTOUCHED`."""
    layout = target.layout
    for channel in target.channels:
        for base in target.offsets:
            channel[base : base + layout.channel_bytes] = UNTOUCHED


def job(target: DeviceCache, scenario: Scenario, table: list[int] | None = None) -> check.Job:
    """What the checker is told about the device cache."""
    spec, layout = scenario.target, target.layout
    return check.Job(
        layers=spec.layers,
        heads=spec.heads,
        dim=spec.dim,
        block_size=spec.block_size,
        blocks=spec.blocks,
        tokens=scenario.tokens,
        table=scenario.target_blocks().tolist() if table is None else table,
        codec=spec.codec or layout.codec.name,
        align=ALIGNMENT,
        bases=[
            [target.offsets[layout.buffer(layer, kv)] for kv in range(spec.kvs)]
            for layer in range(spec.layers)
        ],
        fds=target.descriptors,
        channel_bytes=len(target.channels[0]),
        untouched=UNTOUCHED,
    )


async def verify(wanted: check.Job) -> check.Verdict:
    """Runs the checker as a process that is handed the channels' descriptors and nothing else of HAWK's."""
    process = _checker(wanted.fds)
    try:
        out, err = await asyncio.to_thread(process.communicate, json.dumps(dataclasses.asdict(wanted)))
    except BaseException:
        process.kill()
        raise
    try:
        return check.Verdict(**json.loads(out))
    except (ValueError, TypeError):
        last = err.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        raise InternalError("the checker did not finish", got=last[0]) from None


def _checker(fds: list[int]) -> subprocess.Popen[str]:
    # -P: the script's own folder, which is HAWK's, stays out of its path.
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(check.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=fds,
    )
