"""Retile on the CPU: one call for one plane, and a pool of threads for whole chunks off the event loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from hawk.errors import InvalidArgument
from hawk.retile import native, numpy_core
from hawk.retile.build import piece_elements
from hawk.retile.program import Pieces, Program
from hawk.retile.rows import RowsCall, RowsStep, behind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]

T = TypeVar("T")

CODEC_NUMBERS = {
    name: i
    for i, name in enumerate(
        (
            *("bf16", "fp16", "fp32", "fp8_e4m3fn", "fp8_e5m2", "int8"),
            *("bfp8_b", "bfp4_b", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4_e2m1"),
        )
    )
}
"""How the C core numbers the codecs; one that it does not know is numpy's."""

SLICE_BYTES = {"c": 8 << 20, "numpy": 1 << 18}
"""Bytes of the target between two looks at the stop flag: a few milliseconds, so that cancelling is prompt."""

INLINE_BYTES = 128 << 10
"""Bytes of a chunk up to which the C core takes less time than handing the chunk to a thread would."""

STREAM_BYTES = 4 << 20
"""From this size on the target is written past the caches: it will not be read before it has left them anyway."""

_PROGRAMS = 256
"""Programs whose tables are kept; those of a pair of layouts are a handful."""

_CHECK, _STREAM = 1, 2
_COLUMNS = tuple(f.name for f in fields(Pieces))


class Step(Protocol):
    """What a step of a chunk tells the retiler; `hawk.plan.types.RetileStep` is one."""

    @property
    def program(self) -> Program:
        """What to do in each piece."""

    @property
    def pieces(self) -> Pieces:
        """Where each piece begins."""

    @property
    def src_region(self) -> tuple[int, ...]:
        """Region of the plane's buffer, per source channel."""

    @property
    def src_offset(self) -> tuple[int, ...]:
        """Byte offset of the plane's buffer in that region, per source channel."""

    @property
    def dst_offset(self) -> tuple[int, ...]:
        """Byte offset of the plane's part of the arena, per target channel."""


def places(
    step: Step, regions: Sequence[T], arena: T, behind: Callable[[T, int, str], T]
) -> tuple[list[T], list[T]]:
    """What lies behind the plane's buffer in each channel, of the source and of the target.

    `behind(memory, offset, field)` says what lies behind an offset.  Raises `InvalidArgument` where there is nothing.
    """
    if len(step.src_region) != len(step.src_offset):
        raise InvalidArgument(
            "one offset a region",
            field="step.src_offset",
            got=len(step.src_offset),
            expected=len(step.src_region),
        )
    src = []
    for c, (region, offset) in enumerate(zip(step.src_region, step.src_offset, strict=True)):
        if not 0 <= region < len(regions):
            raise InvalidArgument(
                "no such region",
                field=f"step.src_region[{c}]",
                got=region,
                expected=f"0..{len(regions) - 1}",
            )
        src.append(behind(regions[region], offset, f"step.src_offset[{c}]"))
    return src, [behind(arena, offset, f"step.dst_offset[{c}]") for c, offset in enumerate(step.dst_offset)]


def run(program: Program, pieces: Pieces, src: Sequence[U8], dst: Sequence[U8], *, threads: int = 1) -> None:
    """Carry out `program` for all `pieces`, in this thread or spread over `threads`.

    Parameters
    ----------
    src, dst
        per channel the bytes that begin at the plane's base there, `uint8[...]`, contiguous; they must not overlap

    Raises
    ------
    InvalidArgument
        a piece leaves its page or its channel, a codec is unknown, or a buffer is of the wrong kind; nothing
        was written then
    """
    _spread(_Call(program, pieces, src, dst), threads)


def run_step(step: Step | RowsStep, regions: Sequence[U8], arena: U8, *, threads: int = 1) -> None:
    """Carry out one step of a chunk as `Retiler.run_steps` does, in this thread or spread over `threads`.

    Raises `InvalidArgument` as it does; the arena's content is undefined then.
    """
    _spread(_call(step, regions, arena), threads)


def _call(step: Step | RowsStep, regions: Sequence[U8], arena: U8) -> _Call | RowsCall:
    if isinstance(step, RowsStep):
        return RowsCall(step, regions, arena, run)
    return _Call.of(step, regions, arena, check=False)  # pieces are looked at as they are carried out


def _spread(call: _Call | RowsCall, threads: int) -> None:
    if threads <= 1:
        call.execute(0, call.pieces_count)
        return
    work = _Work(iter([call]))
    with ThreadPoolExecutor(threads, thread_name_prefix="hawk-retile") as pool:
        for future in [pool.submit(work.drain) for _ in range(threads)]:
            future.result()


def _behind(step: Step, regions: Sequence[U8], arena: U8) -> tuple[list[U8], list[U8]] | None:
    """`places` of a step that is as it should be, at a glance; None where that has to be looked at one by one."""
    if (
        min(step.src_offset + step.dst_offset + step.src_region, default=-1) < 0
        or len(step.src_region) != len(step.src_offset)
        or max(step.src_region, default=-1) >= len(regions)
        or max(step.dst_offset, default=0) > len(arena)
    ):
        return None
    src = [regions[r] for r in step.src_region]
    for c, offset in enumerate(step.src_offset):
        if offset > len(src[c]):
            return None
        src[c] = src[c][offset:]
    return src, [arena[offset:] for offset in step.dst_offset]


class Retiler:
    """Threads that retile chunks off the event loop; close it (or leave the `with` block) when done."""

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise InvalidArgument("no thread to work", field="threads", got=threads, expected="1 or more")
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hawk-retile")

    def close(self) -> None:
        """Wait for running slices and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Retiler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def at_once(self, steps: Sequence[Step | RowsStep], src_regions: Sequence[U8], arena: U8) -> bool:
        """`run_steps` in this very call where that takes less time than handing it to a thread; else False.

        After False nothing was written.
        """
        if len(arena) > INLINE_BYTES or native.core_name() != "c":
            return False
        todo: list[Step] = []
        for each in steps:
            if isinstance(each, RowsStep) or not _in_c(each.program):
                return False
            todo.append(each)
        core = native.core()
        # Of pieces that several steps share, which live as long as they do.
        columns: dict[int, list[NDArray[np.int64]]] = {}
        _bytes(arena, "arena", writable=True)
        for i, region in enumerate(src_regions):
            _bytes(region, f"regions[{i}]", writable=False)
        for step in todo:
            # What lies behind an offset of what was looked at needs no second look; the core checks each piece.
            src, dst = _behind(step, src_regions, arena) or places(step, src_regions, arena, behind)
            _, _, facts, loops = _tables(step.program)
            if id(step.pieces) not in columns:
                columns[id(step.pieces)] = _columns(step.pieces)
            bad = core.retile(facts, loops, columns[id(step.pieces)], src, dst, 0, len(step.pieces), 0)
            if bad is not None:
                raise _misfit(step.program, bad)
        return True

    async def run_steps(self, steps: Sequence[Step | RowsStep], src_regions: Sequence[U8], arena: U8) -> None:
        """Carry out `steps` from the source's regions into `arena`, which begins at the chunk's first byte.

        Returns, raises or is cancelled only when no thread reads or writes any more: within one slice, a few
        milliseconds.  After an error or a cancellation the arena's content is undefined.

        Raises
        ------
        InvalidArgument
            a step names a region or an offset that is not there, or its pieces do not fit
        """
        if self.at_once(steps, src_regions, arena):
            return
        work = _Work(_call(step, src_regions, arena) for step in steps)
        futures = [self._pool.submit(work.drain) for _ in range(self.threads)]
        waits = [asyncio.wrap_future(future) for future in futures]
        cancelled: tuple[object, ...] | None = None
        while not all(wait.done() for wait in waits):
            try:
                await asyncio.wait(waits)
            except asyncio.CancelledError as error:
                # Threads may still be writing: they stop at the next slice, and only then may the caller go on.
                cancelled = error.args
                work.stop()
                for future in futures:
                    future.cancel()  # those that have not begun
        errors = [e for wait in waits if not wait.cancelled() and (e := wait.exception()) is not None]
        try:
            if cancelled is not None:
                raise asyncio.CancelledError(*cancelled)
            if errors:
                raise errors[0]
        finally:
            # An error that is kept by the frame that it came through would keep the source's memory with it.
            cancelled, errors = None, []


class _Work:
    """Slices of calls, handed out to whichever thread is free."""

    def __init__(self, calls: Iterator[_Call | RowsCall]) -> None:
        self._slices = self._cut(calls)
        self._lock = threading.Lock()
        self._stopped = False

    @staticmethod
    def _cut(calls: Iterator[_Call | RowsCall]) -> Iterator[tuple[_Call | RowsCall, int, int]]:
        for call in calls:
            for begin in range(0, call.pieces_count, call.slice):
                yield call, begin, min(begin + call.slice, call.pieces_count)

    def stop(self) -> None:
        self._stopped = True

    def drain(self) -> None:
        """Work until nothing is left, somebody stopped it, or an error occurred here or elsewhere."""
        try:
            while not self._stopped:
                with self._lock:  # also guards the generator, and so the check of the next step
                    item = next(self._slices, None)
                if item is None:
                    return
                call, begin, end = item
                call.execute(begin, end)
        except BaseException:
            self._stopped = True
            raise


class _Call:
    """One program over its pieces: everything checked, ready to be executed in slices."""

    def __init__(
        self,
        program: Program,
        pieces: Pieces,
        src: Sequence[U8],
        dst: Sequence[U8],
        *,
        check: bool = True,
    ) -> None:
        self.program, self.pieces, self.pieces_count = program, pieces, len(pieces)
        self.src = [_bytes(s, f"src[{c}]", writable=False) for c, s in enumerate(src)]
        self.dst = [_bytes(d, f"dst[{c}]", writable=True) for c, d in enumerate(dst)]
        self.core = _core_for(program)
        if self.core == "numpy":
            each = max(1, piece_elements(program) * program.dst_codec.bits // 8)
            self.slice = max(1, SLICE_BYTES[self.core] // each)
            numpy_core.check(program, pieces, [len(s) for s in self.src], [len(d) for d in self.dst])
            return
        _, each, self._facts, self._loops = _tables(program)
        self.slice = max(1, SLICE_BYTES[self.core] // each)
        self._columns = _columns(pieces)
        self._flags = _STREAM if each * self.pieces_count >= STREAM_BYTES else 0
        if check:
            self._native(0, self.pieces_count, _CHECK)

    @classmethod
    def of(cls, step: Step, regions: Sequence[U8], arena: U8, *, check: bool = True) -> _Call:
        """The call of one step of a chunk; without `check` whether it fits is looked at when it is executed."""
        src, dst = places(step, regions, arena, behind)
        return cls(step.program, step.pieces, src, dst, check=check)

    def execute(self, begin: int, end: int) -> None:
        """Retile pieces `[begin, end)`."""
        if self.core == "c":
            self._native(begin, end, self._flags)
            return
        part = self.pieces
        if (begin, end) != (0, self.pieces_count):
            part = replace(part, **{name: getattr(part, name)[begin:end] for name in _COLUMNS})
        numpy_core.run(self.program, part, self.src, self.dst, checked=True)

    def _native(self, begin: int, end: int, flags: int) -> None:
        bad = native.core().retile(
            self._facts, self._loops, self._columns, self.src, self.dst, begin, end, flags
        )
        if bad is not None:
            raise _misfit(self.program, bad)


def _misfit(program: Program, bad: tuple[int, int, int, int]) -> InvalidArgument:
    """What the C core found wrong."""
    row, column, got, limit = bad
    if row < 0:
        return InvalidArgument("the loops do not fit the codecs", field="program.loops", got=program.loops)
    return InvalidArgument(
        "the piece does not fit",
        field=f"pieces[{row}].{_COLUMNS[column]}",
        got=got,
        expected=f"0..{limit}",
    )


def _columns(pieces: Pieces) -> list[NDArray[np.int64]]:
    """As the C core takes them; raises `InvalidArgument` where they differ in length."""
    found = [np.ascontiguousarray(getattr(pieces, name), np.int64) for name in _COLUMNS]
    for name, column in zip(_COLUMNS, found, strict=True):
        if len(column) != len(pieces):
            raise InvalidArgument(
                "one row a piece", field=f"pieces.{name}", got=len(column), expected=len(pieces)
            )
    return found


_known: dict[int, tuple[Program, int, NDArray[np.int64], NDArray[np.int64]]] = {}
"""Tables of programs by their identity, which hashing one's arrays would cost more than."""


def _tables(program: Program) -> tuple[Program, int, NDArray[np.int64], NDArray[np.int64]]:
    """The program, bytes that one of its pieces writes, and what the C core is given of it: facts and loops."""
    found = _known.get(id(program))
    if found is None or found[0] is not program:
        numbers = [CODEC_NUMBERS[codec.name] for codec in (program.src_codec, program.dst_codec)]
        factors = np.array([program.src_codec.factor, program.dst_codec.factor], np.float32).view(np.uint32)
        facts = np.array([*numbers, program.src_elements, program.dst_elements, *factors], np.int64)
        loops = np.array([(p.ext, p.src, p.dst, p.row, p.col) for p in program.loops], np.int64)
        each = max(1, piece_elements(program) * program.dst_codec.bits // 8)
        if len(_known) >= _PROGRAMS:
            _known.clear()
        found = _known[id(program)] = (program, each, facts, loops)
    return found


def _core_for(program: Program) -> native.Core:
    """The core in use, or numpy where the C core does not know a codec."""
    return native.core_name() if _in_c(program) else "numpy"


def _in_c(program: Program) -> bool:
    return program.src_codec.name in CODEC_NUMBERS and program.dst_codec.name in CODEC_NUMBERS


def _bytes(array: U8, field: str, *, writable: bool) -> U8:
    flags = array.flags
    if array.dtype != np.uint8 or array.ndim != 1 or not flags.c_contiguous:
        raise InvalidArgument(
            "bytes are needed",
            field=field,
            got=f"{array.dtype}{list(array.shape)}",
            expected="contiguous uint8[n]",
        )
    if writable and not flags.writeable:
        raise InvalidArgument("the target must be writable", field=field, got="a read-only array")
    return array
