"""The kernel that copies rows, run by a processor: blocks and threads in any order, every access counted."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest

from hawk.retile.cuda import copies
from tests.unit.retile.cuda.on_cpu import HEADER, RUN, Kernels, aligned

COMMON = "return x & 1 ? 1u : x & 2"


class Compiled(Kernels):
    def run(self, source: np.ndarray, target: np.ndarray, table: np.ndarray, rows: int | None = None) -> int:
        text = self.change(copies.text(HEADER)) + RUN
        run = self.compiled(text)
        spans = np.array([[a.ctypes.data, a.nbytes] for a in (target, source)], np.uint64)
        arguments = np.zeros((), [("table", np.uint64), ("rows", np.uint32), ("none", np.uint32)])
        arguments["table"], arguments["rows"] = table.ctypes.data, len(table) if rows is None else rows
        return run(
            ctypes.c_void_p(arguments.ctypes.data),
            ctypes.c_uint32(len(table)),
            ctypes.c_uint32(7),
            ctypes.c_uint32(16),
            ctypes.c_void_p(spans.ctypes.data),
            ctypes.c_uint32(len(spans)),
        )


def rows_of(rng: np.random.Generator, source: int, target: int, lengths: list[int], step: int):
    """Rows of these lengths, both ends `step` bytes from a whole multiple; where they begin."""
    gaps = rng.integers(0, 4, len(lengths)) * 16
    at = np.concatenate(([0], np.cumsum([(n + step + 15) // 16 * 16 for n in lengths] + gaps)[:-1]))
    n = np.asarray(lengths, np.int64)
    return source + at, target + at + step, n, at


LENGTHS = [1, 2, 7, 15, 16, 17, 255, 4096, 4111, 70_001, 32 << 10, (32 << 10) + 1, 3]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")
@pytest.mark.parametrize("step", [0, 8, 4, 2, 1, 3])
def test_rows_of_any_length_and_alignment(step: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = np.random.default_rng(step)
    whole = sum(LENGTHS) + 128 * len(LENGTHS)
    source, target = aligned(whole, rng=rng), aligned(whole, fill=0xA5)
    froms, tos, n, at = rows_of(rng, source.ctypes.data, target.ctypes.data, LENGTHS, step)
    table = copies.table(froms + 5, tos + 5, n)
    assert int(table[:, 2].max()) <= copies.LONGEST
    assert len(table) > len(LENGTHS)
    folder = tmp_path_factory.getbasetemp() / "copies"
    folder.mkdir(exist_ok=True)
    assert Compiled(folder).run(source, target, table) == 0
    right = np.full(whole, 0xA5, np.uint8)
    for begin, nbytes in zip(at.tolist(), LENGTHS, strict=True):
        right[begin + step + 5 :][:nbytes] = source[begin + 5 :][:nbytes]
    assert np.array_equal(target, right)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")
def test_a_kernel_that_takes_what_is_not_aligned_is_found_out(tmp_path: Path) -> None:
    source, target = aligned(256, fill=1), aligned(256, fill=0)
    table = copies.table(
        np.array([source.ctypes.data + 1]), np.array([target.ctypes.data + 2]), np.array([100])
    )
    broken = Compiled(tmp_path, lambda text: text.replace(COMMON, "return x & 1 ? 2u : x & 2"))
    assert broken.run(source, target, table) > 0


def test_short_rows_are_a_table_as_they_are() -> None:
    one = np.array([10, 20]), np.array([30, 40]), np.array([5, 6])
    assert copies.table(*one).tolist() == [[10, 30, 5], [20, 40, 6]]
