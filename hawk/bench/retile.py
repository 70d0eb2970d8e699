"""What retiling costs on one core: both cores beside a plain copy of the same bytes, all in one run.

Figures are bytes read plus bytes written per second, of the data that is moved, in warm, page-aligned memory.
Every conversion is compared with numpy's own reshaping first, so a fast wrong answer is no result.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from hawk.demo import scenario
from hawk.errors import InternalError, InvalidArgument, OutOfMemory
from hawk.layouts import codecs
from hawk.layouts.compiled import CacheShape
from hawk.memory.available import available_memory
from hawk.retile import cpu, native
from hawk.retile.build import build_program
from hawk.retile.program import Pieces

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from rich.console import Console

    from hawk.layouts.compiled import CompiledLayout
    from hawk.retile.program import Program

    I64 = NDArray[np.int64]
    U8 = NDArray[np.uint8]

HEADS, DIM, BLOCK = 8, 128, 64
MIN_BLOCKS = 8
CHANNELS = 8

CASES: tuple[tuple[str, str, int], ...] = (
    ("V to tiles, bf16", "bf16", 1),
    ("K to tiles, bf16, halves woven", "bf16", 0),
    ("V to tiles, bfp8_b", "bfp8_b", 1),
)
"""Title, target codec, kv."""


@dataclass(frozen=True)
class Row:
    """One conversion on one core: best time of the repetitions, GB/s read and written, and the copy's beside it."""

    case: str
    core: str
    seconds: float
    gigabytes_per_second: float
    copy_gigabytes_per_second: float

    @property
    def ratio(self) -> float:
        """Of the plain copy's rate."""
        return self.gigabytes_per_second / self.copy_gigabytes_per_second


@dataclass(frozen=True)
class Result:
    """All rows, and what they were measured on."""

    size: int
    repeats: int
    instructions: str
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        rows = [dataclasses.asdict(row) | {"ratio": row.ratio} for row in self.rows]
        return dataclasses.asdict(self) | {"rows": rows}


def run(size_mb: int = 128, repeats: int = 5) -> Result:
    """Measure every case on every core there is, on one thread.

    `size_mb` is the size of K or V in units of 2**20 bytes; up to eight times that is allocated.

    Raises `InvalidArgument` for a size below one, `OutOfMemory` for one that the machine has no room for, and
    `InternalError` where a conversion gives other bytes than the reference.
    """
    if size_mb < 1 or repeats < 1:
        raise InvalidArgument(
            "nothing to measure", field="size_mb, repeats", got=f"{size_mb}, {repeats}", expected="1 or more"
        )
    _require(8 * (size_mb << 20))
    blocks = max(MIN_BLOCKS, (size_mb << 20) // (2 * BLOCK * HEADS * DIM))
    shape = CacheShape(layers=1, heads=HEADS, dim=DIM, block_size=BLOCK, blocks=blocks, kvs=2)
    names = scenario.load(tokens=1)
    source = names.source.resolve().compile(shape)
    src = _aligned(source.channel_bytes)
    for kv in (0, 1):
        # Ordinary numbers: a normal distribution, some zeros.
        values = np.random.default_rng(kv).standard_normal(blocks * BLOCK * HEADS * DIM, np.float32)
        half = len(src) // 2
        src[kv * half : (kv + 1) * half].view(np.uint16)[:] = values.view(np.uint32) >> 16
    cores: tuple[native.Core, ...] = ("c", "numpy") if native.available() else ("numpy",)
    rows: list[Row] = []
    for case, codec, kv in CASES:
        target = names.target.resolve().compile(shape, codec=codec, channels=CHANNELS)
        job = _Job(source, target, kv, src)
        rows += [_measure(case, core, job, repeats) for core in cores]
    return Result(
        size_mb << 20, repeats, native.core().level() if native.available() else "none", tuple(rows)
    )


def _require(nbytes: int) -> None:
    """Raises `OutOfMemory` for what cannot be: numpy's own failure comes late, and on many systems as a kill."""
    available = available_memory()
    if nbytes > available:
        raise OutOfMemory(
            "too little memory to measure that size",
            field="size_mb",
            asked=nbytes,
            available=available,
            hint="Measure a smaller size",
        )


def render(result: Result, console: Console) -> None:
    """Print `result` as a table."""
    table = Table(
        title=f"Retile, {result.size >> 20} MiB of bf16, {HEADS} heads of {DIM}, one thread, "
        f"best of {result.repeats}; GB/s read + written"
    )
    table.add_column("conversion")
    table.add_column("core")
    for title in ("ms", "GB/s", "np.copyto GB/s", "ratio"):
        table.add_column(title, justify="right")
    for row in result.rows:
        table.add_row(
            row.case,
            f"C ({result.instructions})" if row.core == "c" else row.core,
            f"{row.seconds * 1e3:.1f}",
            f"{row.gigabytes_per_second:.2f}",
            f"{row.copy_gigabytes_per_second:.2f}",
            f"{row.ratio:.2f}",
        )
    console.print(table)


def _measure(case: str, core: native.Core, job: _Job, repeats: int) -> Row:
    plane, copy = job.plane, _aligned(len(job.plane))
    times, copies = [], []
    with native.using(core):
        for i in range(repeats + 1):
            copies.append(_seconds(lambda: np.copyto(copy, plane)))
            times.append(_seconds(lambda: cpu.run(job.program, job.pieces, [job.src], job.dst)))
            if i == 0:  # the first round warms up, and is checked
                job.check(case, core)
    seconds = min(times[1:])
    return Row(case, core, seconds, job.moved / seconds / 1e9, 2 * len(plane) / min(copies[1:]) / 1e9)


def _seconds(what: Callable[[], None]) -> float:
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


def _aligned(nbytes: int) -> U8:
    """Zeros on a page boundary, as regions are; every page touched."""
    room = np.empty(nbytes + 4096, np.uint8)
    at = -room.ctypes.data % 4096
    room[at : at + nbytes] = 0
    return room[at : at + nbytes]


class _Job:
    """One tensor of every block on its way from `source` into `target`, its blocks in shuffled order."""

    def __init__(self, source: CompiledLayout, target: CompiledLayout, kv: int, src: U8) -> None:
        self.source, self.target, self.kv, self.src = source, target, kv, src
        self.blocks = source.shape.blocks
        self.table = np.random.default_rng(0).permutation(self.blocks)
        half = len(src) // 2
        self.plane = src[kv * half : (kv + 1) * half]
        self.dst = [_aligned(target.channel_bytes) for _ in range(target.channels)]
        self.moved = half + target.pages * target.page_bytes
        self.program: Program = build_program(source, target, kv)
        axes = (np.arange(self.blocks), self.program.slots, self.program.heads, self.program.dims)
        block, slot, head, dim = (x.ravel() for x in np.meshgrid(*axes, indexing="ij"))
        n = len(block)
        self.pieces = Pieces(
            *self._where(source, self.table[block], slot, head, dim),
            *self._where(target, block, slot, head, dim),
            lo=np.zeros(n, np.int64),
            hi=np.full(n, self.program.rows, np.int64),
            cols=DIM - dim,
        )

    def _where(
        self, layout: CompiledLayout, block: I64, slot: I64, head: I64, dim: I64
    ) -> tuple[I64, I64, I64]:
        piece = layout.piece(self.kv)
        page, start = np.full_like(block, layout.fixed_term(self.kv, 0)), np.zeros_like(block)
        page += piece.page_term("block", block) + piece.page_term("slot", slot)
        page += piece.page_term("head", head) + piece.page_term("dim", dim)
        start += piece.inside_term("slot", slot) + piece.inside_term("head", head)
        start += piece.inside_term("dim", dim)
        return page % layout.channels, page // layout.channels * layout.page_stride, start

    def check(self, case: str, core: str) -> None:
        """Compare up to 64 blocks with tiles that numpy's reshaping gives."""
        cache = self.plane.view(np.uint16).reshape(self.blocks, BLOCK, HEADS, DIM)
        pages = self.target.pages // self.blocks
        for block in np.unique(np.linspace(0, self.blocks - 1, 64).astype(np.int64)).tolist():
            x = cache[self.table[block]].transpose(1, 0, 2)  # head, slot, dim
            if self.kv == 0:
                x = x.reshape(HEADS, BLOCK, 2, DIM // 2).swapaxes(2, 3).reshape(HEADS, BLOCK, DIM)
            faces = x.reshape(HEADS, BLOCK // 32, 2, 16, DIM // 32, 2, 16).transpose(0, 1, 4, 2, 5, 3, 6)
            tiles = np.ascontiguousarray(faces).reshape(pages, 1024)
            want = tiles.view(np.uint8)
            if self.target.codec.name != "bf16":
                want = codecs.encode(self.target.codec, tiles.astype(np.uint32) << np.uint32(16))
            for i in range(pages):
                page = block * pages + i
                at = page // CHANNELS * self.target.page_stride
                got = self.dst[page % CHANNELS][at : at + self.target.page_bytes]
                if not np.array_equal(got, want[i]):
                    raise InternalError("a conversion is wrong", case=case, core=core, page=page)
