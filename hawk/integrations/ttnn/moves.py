"""Moves inside banks as the kernel `move.cpp` takes them: checked, joined, cut, and dealt to cores.  Pure.

A table is a tensor of `pages` pages for each bank, which the allocator deals out in turn: page i lies in bank
i % banks.  So the pages of a bank follow each other there, and hold the moves of that bank, four words each: source,
target, bytes and a zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from hawk.memory.region import Moves

    I64 = NDArray[np.int64]
    U32 = NDArray[np.uint32]

WORDS = 4
PAGE_WORDS = 512
PAGE_BYTES = PAGE_WORDS * 4
PAGE_MOVES = PAGE_WORDS // WORDS
"""Moves of one page of the table, which has 2 KiB."""

MOVE_BYTES = WORDS * 4
BANK = 1 << 41
"""More than any bank has: what tells banks apart where addresses of all are sorted at once."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How moves are dealt out.

    banks   of the chip
    pages   of the table in each bank
    cores   that work for each bank
    slots   moves that a core has under way at a time: shares are multiples of it, but the last
    piece   bytes of a move at most
    """

    banks: int
    pages: int
    cores: int
    slots: int
    piece: int

    @property
    def room(self) -> int:
        """Moves of one bank that the table holds."""
        return self.pages * PAGE_MOVES


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of the kernel.

    table   `uint32[pages * banks, 512]`, as the tensor holds it
    first   number of the first of a core's moves in its bank, `int64[banks, cores]`
    count   how many are its, `int64[banks, cores]`
    """

    table: U32
    first: I64
    count: I64


def require_apart(moves: Moves) -> None:
    """Raises `InvalidArgument` naming the first row whose target meets another target, or any row's source.

    Moves run side by side, on several cores, so an order of theirs cannot be kept.
    """
    channel = moves.channel.astype(np.int64) * BANK
    target, source = channel + moves.target, channel + moves.source
    order = np.argsort(target, kind="stable")
    start, end = target[order], (target + moves.nbytes)[order]
    meets = np.flatnonzero(start[1:] < end[:-1])
    if len(meets):
        raise _meeting(moves, int(order[meets[0] + 1]), "target", int(order[meets[0]]), "target")
    before = (
        np.searchsorted(start, source + moves.nbytes) - 1
    )  # the last target that begins before a source ends
    hit = np.flatnonzero((before >= 0) & (end[np.maximum(before, 0)] > source))
    if len(hit):
        raise _meeting(moves, int(order[before[hit[0]]]), "target", int(hit[0]), "source")


def _meeting(moves: Moves, row: int, what: str, other: int, whose: str) -> InvalidArgument:
    def place(i: int, column: I64) -> str:
        return f"{int(moves.nbytes[i])} bytes at {int(column[i])} of channel {int(moves.channel[i])}"

    return InvalidArgument(
        "moves that overlap cannot be carried out side by side",
        field=f"moves[{row}].{what}",
        got=place(row, moves.target),
        expected=f"apart from moves[{other}].{whose}, "
        + place(other, moves.target if whose == "target" else moves.source),
    )


def cut(moves: Moves, piece: int) -> tuple[I64, I64, I64, I64]:
    """Channel, source, target and bytes, in order of channel and source: joined where both go on, then cut.

    No row has more than `piece` bytes.
    """
    order = np.lexsort((moves.source, moves.channel))
    channel, source, target, nbytes = (
        np.asarray(column)[order].astype(np.int64)
        for column in (moves.channel, moves.source, moves.target, moves.nbytes)
    )
    goes_on = (channel[1:] == channel[:-1]) & (source[1:] == source[:-1] + nbytes[:-1])
    goes_on &= target[1:] == target[:-1] + nbytes[:-1]
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    nbytes = np.add.reduceat(nbytes, first)
    times = -(-nbytes // piece)
    row = np.repeat(np.arange(len(first)), times)
    at = (np.arange(len(row)) - np.repeat(np.cumsum(times) - times, times)) * piece
    first = first[row]
    return channel[first], source[first] + at, target[first] + at, np.minimum(nbytes[row] - at, piece)


def launches(moves: Moves, address: int, shares: Shares) -> Iterator[Launch]:
    """The launches that carry moves out, which lie `address` bytes into each bank.

    Raises `InvalidArgument` for moves that overlap, see `require_apart`.
    """
    if not len(moves):
        return
    require_apart(moves)
    channel, source, target, nbytes = cut(moves, shares.piece)
    begin = np.searchsorted(channel, np.arange(shares.banks + 1))
    number = np.arange(len(channel)) - begin[channel]  # of a row among those of its bank
    for low in range(0, int(number.max()) + 1, shares.room):
        now = (number >= low) & (number < low + shares.room)
        bank, place = channel[now], number[now] - low
        table = np.zeros((shares.pages, shares.banks, PAGE_MOVES, WORDS), np.uint32)
        rows = (place // PAGE_MOVES, bank, place % PAGE_MOVES)
        table[(*rows, 0)] = source[now] + address
        table[(*rows, 1)] = target[now] + address
        table[(*rows, 2)] = nbytes[now]
        total = np.bincount(bank, minlength=shares.banks)
        step = shares.cores * shares.slots
        each = (total + step - 1) // step * shares.slots
        first = np.minimum(np.arange(shares.cores) * each[:, None], total[:, None])
        count = np.minimum(each[:, None], total[:, None] - first)
        yield Launch(table.reshape(-1, PAGE_WORDS), first, count)
