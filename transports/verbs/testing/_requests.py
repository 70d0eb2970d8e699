"""Work requests of fake queue pairs, and how they are read out of memory, as hardware does."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hawk.transports.verbs import _abi
from hawk.transports.verbs.testing._faults import refused

if TYPE_CHECKING:
    from hawk.transports.verbs.testing._memory import FakeRegistration, FakeWindow


@dataclass(frozen=True, slots=True)
class Read:
    wr_id: int
    signalled: bool
    address: int
    key: int
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self.pieces)


@dataclass(frozen=True, slots=True)
class Write(Read):
    opcode: int
    immediate: int


@dataclass(frozen=True, slots=True)
class Bind:
    wr_id: int
    window: FakeWindow
    memory: FakeRegistration
    address: int
    nbytes: int
    access: int


@dataclass(frozen=True, slots=True)
class Invalidate:
    wr_id: int
    key: int


Request = Read | Write | Bind | Invalidate


def parse(row: np.void, sge: int, longest: int) -> Read:
    """A READ or WRITE with its pieces, of which it may have `sge`, and `longest` bytes in them."""
    opcode, count = int(row["opcode"]), int(row["num_sge"])
    least = {_abi.READ: 1, _abi.WRITE: 1, _abi.WRITE_IMM: 0}
    if opcode not in least or not least[opcode] <= count <= sge:
        raise refused("ibv_post_send")
    raw = ctypes.string_at(int(row["sg_list"]), count * _abi.SGE.itemsize) if count else b""
    pieces = tuple((int(a), int(n), int(k)) for a, n, k in np.frombuffer(raw, _abi.SGE).tolist())
    signalled = bool(int(row["flags"]) & _abi.SIGNALED)
    where = int(row["wr_id"]), signalled, int(row["remote_addr"]), int(row["rkey"]), pieces
    work = Read(*where) if opcode == _abi.READ else Write(*where, opcode, int(row["extra"]))
    if work.nbytes > longest:
        raise refused("ibv_post_send: longer than a message may be")
    return work
