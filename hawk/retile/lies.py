"""Where the steps of a chunk lie, said of all of them at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hawk.retile.program import Pieces, Program

    I64 = NDArray[np.int64]


class Lies(NamedTuple):
    """What steps say one by one as `src_region`, `src_offset` and `dst_offset`, see `hawk.retile.cpu.Step`.

    kinds            programs and pieces; chunks have this very object in common whose steps differ in places alone
    which            the kind of each step, `int64[steps]`
    region, offset   `int64[steps, source channels]`
    target           `int64[steps, target channels]`
    """

    kinds: tuple[tuple[Program, Pieces], ...]
    which: I64
    region: I64
    offset: I64
    target: I64
