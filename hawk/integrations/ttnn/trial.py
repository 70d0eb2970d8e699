"""Moves that show what moving costs on a chip, and whether it moves what it is told to.  Pure.

A trial has PAGES pages of each bank; its rows go from the first half of them to the second, in the opposite order, so
that none continues another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hawk.integrations.ttnn.moves import PAGE_BYTES, PAGE_WORDS
from hawk.memory.region import Moves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

PAGES = 512
ROWS = PAGES // 2
LEAST = 1e-15
"""Seconds a byte or a row: less than anything takes, where a clock saw no difference."""


def content(banks: int) -> NDArray[np.uint32]:
    """What a trial's memory holds before: `uint32[PAGES * banks, 512]`, page i in bank i % banks."""
    random = np.random.default_rng(9)
    return random.integers(0, 1 << 32, (PAGES * banks, PAGE_WORDS), dtype=np.uint32)


def moves(banks: int, least: int) -> tuple[Moves, Moves, Moves]:
    """One row of each bank, many small ones, and as many large ones; small are `least` bytes, large a page."""
    return _rows(banks, 1, least), _rows(banks, ROWS, least), _rows(banks, ROWS, PAGE_BYTES)


def _rows(banks: int, count: int, nbytes: int) -> Moves:
    number = np.arange(count, dtype=np.int64)
    source, target = number * PAGE_BYTES, (ROWS + number[::-1]) * PAGE_BYTES
    return Moves(
        np.repeat(np.arange(banks, dtype=np.int32), count),
        np.tile(source, banks),
        np.tile(target, banks),
        np.full(banks * count, nbytes, np.int64),
    )


def wrong(
    before: NDArray[np.uint32], after: NDArray[np.uint8], done: Sequence[Moves]
) -> tuple[int, int] | None:
    """Bank and byte of the first byte that is not what these moves, one lot after the other, leave there."""
    banks = len(before) // PAGES
    wanted = _by_bank(before.reshape(-1).view(np.uint8), banks)
    for lot in done:
        for row in zip(
            lot.channel.tolist(), lot.source.tolist(), lot.target.tolist(), lot.nbytes.tolist(), strict=True
        ):
            bank, source, target, nbytes = row
            wanted[bank, target : target + nbytes] = wanted[bank, source : source + nbytes]
    differs = _by_bank(after, banks) != wanted
    if not differs.any():
        return None
    bank = int(np.argmax(differs.any(axis=1)))
    return bank, int(np.argmax(differs[bank]))


def _by_bank(pages: NDArray[np.uint8], banks: int) -> NDArray[np.uint8]:
    return pages.reshape(PAGES, banks, PAGE_BYTES).transpose(1, 0, 2).reshape(banks, -1).copy()


def costs(took: Sequence[float], small: int, large: int) -> tuple[float, float, float]:
    """Seconds a byte, a row and a call, from the seconds that one row of each bank, `small` and `large` rows took."""
    call, some, all_ = took
    row = max((some - call) / small, LEAST)
    byte = max((all_ - call - large * row) / (large * PAGE_BYTES), LEAST)
    return byte, row, call
