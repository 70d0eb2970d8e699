"""Which core does the work: the compiled one where it was built, else numpy.

The environment variable `HAWK_CORE` decides: `auto` (the default) takes the C core if it can be imported, `c`
insists on it, `numpy` leaves it aside.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np

from hawk.errors import InvalidArgument, MissingDependency
from hawk.retile.numpy_core import announce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.int64] | NDArray[np.int32] | NDArray[np.uint8]

Core = Literal["c", "numpy"]

_forced: Core | None = None
_absent = ""


class CoreModule(Protocol):
    """What `_core.c` offers; arrays are C-contiguous and of the type named there."""

    def retile(
        self,
        facts: Array,
        loops: Array,
        columns: Sequence[Array],
        src: Sequence[Array],
        dst: Sequence[Array],
        begin: int,
        end: int,
        flags: int,
    ) -> tuple[int, int, int, int] | None:
        """Check, then retile pieces `[begin, end)`; None, or (piece, column, got, limit) of a misfit."""

    def copy_segments(
        self, dst_bases: Array, region: Array, local: Array, src_base: int, remote: Array, nbytes: Array
    ) -> None:
        """Copy the segments; addresses are not checked."""

    def copy_guarded(
        self,
        word: Array,
        board: Array,
        slot: int,
        state: int,
        mark: int,
        dst_bases: Array,
        region: Array,
        local: Array,
        src_base: int,
        src_bytes: int,
        remote: Array,
        nbytes: Array,
    ) -> bool:
        """Copy the segments if the guard covers them and stands before and after, see `_guard.h`; whether it did."""

    def post_guard(self, board: Array, slot: int, state: int, low: int, high: int) -> None:
        """Write a slot of a board; a state of 0 takes it down."""

    def bind_runs(
        self,
        term: Array,
        first: Array,
        channel: Array,
        slot: Array,
        count: Array,
        stride: int,
        page_bytes: int,
        align: int,
        to_channel: Array,
        arena: Array,
        target: Array,
        nbytes: Array,
        channel_bytes: Array,
        moved: Array,
    ) -> int:
        """Write the runs of a plane, see `hawk.plan.bind.whole_runs`; how many there are."""

    def bind_pieces(
        self,
        term: Array,
        channel: Array,
        page: Array,
        moved: Array,
        channels: int,
        stride: int,
        to_channel: Array,
        to_page: Array,
    ) -> None:
        """Write where each piece lies in the arena, see `hawk.plan.bind.dealt_pieces`."""

    def first_outside(self, blocks: Array, limit: int) -> int:
        """Index of the first number that is not in `[0, limit)`, or -1."""

    def bind_terms(self, blocks: Array, digits: Array, add: int, to: Array) -> None:
        """Write where blocks begin, see `hawk.plan.bind.terms`."""

    def bind_base(self, kind: Array, channel_bytes: Array, channels: int, base: Array) -> int:
        """Write where planes begin, see `hawk.plan.bind.bases`; how many bytes there are."""

    def bind_groups(
        self,
        channels: int,
        arena: int,
        channel: Array,
        ends: Array,
        kind: Array,
        buffer: Array,
        shift: Array,
        base: Array,
        region: Array,
        offset: Array,
        first: Array,
        count: Array,
        which: Array,
        to_region: Array,
        up: Array,
        on: Array,
    ) -> int:
        """Write the groups of a chunk, see `hawk.plan.bind.groups`; how many there are."""

    def bind_pages(self, term: Array, entry: Array, at: Array, stride: int, to: Array) -> None:
        """Write where source pages are, see `hawk.plan.bind.pages`."""

    def spread_rows(
        self,
        first: Array,
        count: Array,
        local: Array,
        remote: Array,
        nbytes: Array,
        which: Array,
        region: Array,
        up: Array,
        on: Array,
        begin: int,
        end: int,
        to_region: Array,
        to_local: Array,
        to_remote: Array,
        to_nbytes: Array,
    ) -> None:
        """Write the rows of groups `[begin, end)`, see `hawk.memory.groups`."""

    def calls(self, rows: Array) -> tuple[int, int] | None:
        """Make the calls of the rows, see `_calls.h`; None, or the row that failed and what it returned."""

    def level(self) -> str:
        """The instruction set in use: `"avx512"`, `"avx2"` or `"baseline"`."""

    def set_level(self, name: str) -> str:
        """Use the kernels of a lower level, for tests; ValueError for one this CPU lacks."""


def _load() -> CoreModule | None:
    global _absent
    try:
        return cast("CoreModule", importlib.import_module("hawk.retile._core"))
    except ImportError as reason:
        _absent = str(reason)
        return None


_core = _load()


def core() -> CoreModule:
    """The C core's module; only where `core_name()` is `"c"`."""
    if _core is None:
        raise MissingDependency("the C core is not there", got=_absent)
    return _core


def planner() -> CoreModule | None:
    """The C core where it is in use and binds plans (one that was built from older sources does not)."""
    return _planner(_forced, cast("Any", _core))


@functools.cache
def _planner(forced: Core | None, core: Any) -> CoreModule | None:
    # A plan asks a dozen times, and looking at the environment would cost it a tenth of its time.
    return core if core_name() == "c" and hasattr(core, "bind_pages") else None


def caller() -> Callable[[Any], tuple[int, int] | None] | None:
    """What makes calls of a library without Python's lock, where the C core in use has that; see `CoreModule.calls`."""
    return getattr(_core, "calls", None) if core_name() == "c" else None


def available() -> bool:
    """Whether the C core was built and can be imported."""
    return _core is not None


def core_name() -> Core:
    """The core in use, `"c"` or `"numpy"`.

    Raises
    ------
    MissingDependency
        `HAWK_CORE=c`, but the C core was not built
    InvalidArgument
        `HAWK_CORE` holds something else than `auto`, `c` or `numpy`
    """
    choice = _forced or os.environ.get("HAWK_CORE", "auto") or "auto"
    if choice not in ("auto", "c", "numpy"):
        raise InvalidArgument("no such core", field="HAWK_CORE", got=choice, expected="auto, c or numpy")
    if choice == "numpy":
        if _forced is None:  # whoever forced it knows
            announce("HAWK_CORE=numpy asks for it")
        return "numpy"
    if _core is not None:
        return "c"
    if choice == "c":
        raise MissingDependency(
            "the C core is not there",
            field="HAWK_CORE",
            got=_absent,
            hint="install a C compiler and reinstall the package, or set HAWK_CORE=auto",
        )
    announce(
        f"the C core is not there ({_absent}); a C compiler at installation makes it several times faster"
    )
    return "numpy"


@contextmanager
def using(core: Core) -> Iterator[None]:
    """Within the block `core` is used whatever `HAWK_CORE` says; for tests and benchmarks, not for threads."""
    global _forced
    before, _forced = _forced, core
    try:
        yield
    finally:
        _forced = before


def copy_segments(
    dst_bases: NDArray[np.int64],
    region: NDArray[np.int32],
    local: NDArray[np.int64],
    src_base: int,
    remote: NDArray[np.int64],
    nbytes: NDArray[np.int64],
) -> None:
    """Copy segment i of `nbytes[i]` bytes from `src_base + remote[i]` to `dst_bases[region[i]] + local[i]`.

    All bases are absolute addresses in this process.  The caller vouches that every range lies in memory it
    holds and that no source overlaps a target: addresses cannot be checked here.  Array lengths, region numbers
    and signs are.  The GIL is released while bytes move.

    Raises
    ------
    InvalidArgument
        the arrays differ in length, a region is not in `dst_bases`, or an offset or size is negative
    """
    n = len(region)
    for name, array in (("local", local), ("remote", remote), ("nbytes", nbytes)):
        if len(array) != n:
            raise InvalidArgument("one entry a segment", field=name, got=len(array), expected=n)
    if n == 0:
        return
    if int(region.min()) < 0 or int(region.max()) >= len(dst_bases):
        raise InvalidArgument(
            "no such region",
            field="region",
            got=f"{region.min()}..{region.max()}",
            expected=f"0..{len(dst_bases) - 1}",
        )
    for name, array in (("local", local), ("remote", remote), ("nbytes", nbytes)):
        if int(array.min()) < 0:
            raise InvalidArgument("negative", field=name, got=int(array.min()), expected="0 or more")
    if core_name() == "c":
        core().copy_segments(
            np.ascontiguousarray(dst_bases, np.int64),
            np.ascontiguousarray(region, np.int32),
            np.ascontiguousarray(local, np.int64),
            src_base,
            np.ascontiguousarray(remote, np.int64),
            np.ascontiguousarray(nbytes, np.int64),
        )
        return
    target, source = dst_bases[region] + local, src_base + remote
    # Neighbours that go on where the one before ended move in one call.
    cut = (target[1:] != target[:-1] + nbytes[:-1]) | (source[1:] != source[:-1] + nbytes[:-1])
    first = np.concatenate(([0], np.flatnonzero(cut) + 1))
    sizes = np.add.reduceat(nbytes, first)
    for d, s, size in zip(target[first].tolist(), source[first].tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(d, s, size)
