"""Generated kernels as functions of this process, which run blocks and threads in any order; `cc` compiles them."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from pathlib import Path

import numpy as np

from hawk.retile.cuda.bases import Span
from hawk.retile.cuda.through import stages

HEADER = Path(__file__).with_name("on_cpu.h").read_text()
RUN = """
i64 run_into(const struct args *a, u32 blocks, u32 start, u32 shared_bytes, const u64 *spans, u32 count, u32 written)
{
    u32 *order = malloc(blocks * sizeof *order + 1);
    u8 *shared = aligned_alloc(64, (shared_bytes + 63) / 64 * 64);
    seed = start, faults = 0, givens = 0, outs = written;
    for (u32 i = 0; i < count; i++)
        given[givens].begin = spans[2 * i], given[givens++].end = spans[2 * i] + spans[2 * i + 1];
    given[givens].begin = (u64)shared, given[givens++].end = (u64)shared + shared_bytes;
    shuffle(order, blocks);
    for (u32 i = 0; i < blocks; i++) {
        for (u32 k = 0; k < shared_bytes; k++)
            shared[k] = (u8)chance();
        retile(order[i], shared, *a);
    }
    free(order);
    free(shared);
    return faults;
}
i64 run(const struct args *a, u32 blocks, u32 start, u32 shared_bytes, const u64 *spans, u32 count)
{
    return run_into(a, blocks, start, shared_bytes, spans, count, 1);
}
"""
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-overflow")


def aligned(nbytes, fill=None, rng=None, at=0):
    """Bytes that begin `at` behind a multiple of 256."""
    room = np.empty(nbytes + 512, np.uint8)
    first = -room.ctypes.data % 256 + at
    found = room[first : first + nbytes]
    found[:] = rng.integers(0, 256, nbytes, np.uint8) if rng is not None else fill
    return found


def span(array):
    return Span(array.ctypes.data, len(array))


class Kernels:
    """Compiles once for each text; what it made lies in `folder`."""

    def __init__(self, folder, change=lambda text: text):
        self.folder, self.change, self.known = Path(folder), change, {}

    def function(self, bound):
        return self.compiled(self.change(bound.text(HEADER)) + RUN, "run_into")

    def compiled(self, text, name="run"):
        """The function of that name; `run` writes into the first of its spans alone."""
        found = self.library(text)[name]
        found.restype = ctypes.c_int64
        return found

    def library(self, text):
        if text not in self.known:
            name = self.folder / hashlib.sha256(text.encode()).hexdigest()[:16]
            name.with_suffix(".c").write_text(text)
            made = name.with_suffix(".so")
            command = [
                "cc",
                "-std=c11",
                "-O0",
                *WARNINGS,
                "-fPIC",
                "-shared",
                "-o",
                made,
                name.with_suffix(".c"),
                "-lm",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[:4000]
            self.known[text] = ctypes.CDLL(str(made))
        return self.known[text]

    def launch(self, bound, regions, written, seed=1):
        """One launch, as a GPU would carry it out; the number of accesses that it should not have made."""
        written = written if isinstance(written, list) else [written]
        spans = np.array([span(array) for array in (*written, *regions)], np.uint64)
        table = aligned(len(bound.table), 0)
        table[:] = bound.table
        arguments = np.concatenate(
            [np.array([table.ctypes.data], np.uint64).view(np.uint32), bound.parts.ravel()]
        )
        run = self.function(bound)
        return run(
            ctypes.c_void_p(np.ascontiguousarray(arguments).ctypes.data),
            ctypes.c_uint32(bound.blocks),
            ctypes.c_uint32(seed),
            ctypes.c_uint32(bound.shared_bytes),
            ctypes.c_void_p(spans.ctypes.data),
            ctypes.c_uint32(len(spans)),
            ctypes.c_uint32(len(written)),
        )

    def run(self, steps, regions, arena, seed=1):
        for one in self.bound(steps, regions, arena):
            assert self.launch(*one, seed) == 0, "an access outside, or not aligned"

    def bound(self, steps, regions, arena, shelf=None, recipes=None):
        """Every launch, and the memory that it reads and writes."""
        rows = []

        def room(nbytes):
            rows.append(aligned(nbytes, 0xEE))
            return span(rows[0])

        found = stages(steps, [span(r) for r in regions], span(arena), room, shelf, recipes)
        return [
            (
                s.bound,
                [*(regions if s.source else ()), *(rows if s.rows else ())],
                [*([arena] if s.target else ()), *(rows if s.rows else ())],
            )
            for s in found
        ]
