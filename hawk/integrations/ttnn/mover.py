"""Moves inside the banks of a chip as a program of ttnn: what a memory of kind `tenstorrent` takes as its `mover`.

The kernel is `move.cpp`, run through `ttnn.generic_op` by a core or more for each bank.  What it is to move is a table
in the chip's memory, which the host writes before each launch: the arguments of a kernel are few (341 words in all of
ttnn 0.81's), and one chunk of a request has thousands of moves.
"""

from __future__ import annotations

import math
import time
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.arguments import count as whole
from hawk.arguments import instance
from hawk.errors import DeviceReset, HawkMemoryError, InvalidArgument, MissingDependency
from hawk.integrations.ttnn import api, trial
from hawk.integrations.ttnn.calling import Calls, NotBegun, NotEnded, told, words
from hawk.integrations.ttnn.moves import MOVE_BYTES, PAGE_BYTES, PAGE_WORDS, Shares, launches
from hawk.integrations.ttnn.reserving import banks as banks_of
from hawk.integrations.ttnn.reserving import chips, rows
from hawk.memory.tenstorrent import Reservation

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from hawk.integrations.ttnn.moves import Launch
    from hawk.memory.region import Moves

NEEDED = (
    "CBDescriptor",
    "CBFormatDescriptor",
    "CoreCoord",
    "CoreRange",
    "CoreRangeSet",
    "DataMovementConfigDescriptor",
    "KernelDescriptor",
    "MeshCoordinateRange",
    "MeshProgramDescriptor",
    "ProgramDescriptor",
    "RuntimeArgs",
    "from_device",
    "generic_op",
    "replicate_tensor_to_mesh_mapper",
)
"""What is called of ttnn besides `api.NEEDED`."""

HALVES = 2
"""Lists of moves, and batches of moved bytes, that a core's memory holds: one is written while the next is read."""


class BankMover:
    """Moves bytes inside the DRAM banks of one chip, by the chip: `Tenstorrent(name, reservation, mover=...)`.

    device       the mesh that the chip is one of; open for as long as this is used
    reservation  of that chip alone (`Reservation.of_chip`); offsets of moves are its
    cost, row_cost, call_cost   seconds a byte, a row and a call; `measure` finds them.  Until then a byte costs
                 infinitely much, so that plans stay direct
    cores        that work for each bank; they are taken near it, and are the engine's while nothing is moved
    pages        of 2 KiB that the table of moves has in each bank: 128 moves each, more take several launches
    slots, piece   moves that a core has under way at a time, and bytes of each at most; twice their product, and a
                 little, is taken of a core's memory during a launch
    executor     where ttnn is called: a thread for each call if None, all movers one at a time.  An engine that calls
                 it in other threads meanwhile gives one that runs calls between its own, for ttnn does not say that it
                 may be called in two at once
    timeout      seconds from the beginning of a call after which a chip that has not answered is given up

    Blocks while the table is allocated.  Raises `InvalidArgument` for a reservation of several chips, of other banks or
    of another mesh and for figures that make no program, `OutOfMemory`, `MissingDependency` without ttnn or with one
    that runs no programs of others.
    """

    def __init__(
        self,
        device: Any,
        reservation: Reservation,
        *,
        cost: float = math.inf,
        row_cost: float = 0.0,
        call_cost: float = 0.0,
        cores: int = 1,
        pages: int = 16,
        slots: int = 16,
        piece: int = 2048,
        executor: Executor | None = None,
        timeout: float = 30.0,
    ) -> None:
        ttnn = self._ttnn = _library()
        self.cost, self.row_cost, self.call_cost = cost, row_cost, call_cost
        self.launched = 0
        self._device, self._timeout, self._calls = device, timeout, Calls(executor)
        self._stuck: list[Any] = []
        self._table: Any = None
        self.reservation = instance(reservation, Reservation, "reservation", "a Reservation")
        for name, value in (
            ("cost", cost),
            ("row_cost", row_cost),
            ("call_cost", call_cost),
            ("timeout", timeout),
        ):
            if not value >= 0:
                raise InvalidArgument("no number of seconds", field=name, got=value, expected="0 or more")
        _limited("cores", cores, 1, 64)
        _limited("pages", pages, 1, 1 << 14)
        _limited("slots", slots, 4, 256, multiple=4)
        self._shares = Shares(reservation.banks, pages, cores, slots, piece)
        self._source = resources.files(__package__).joinpath("move.cpp").read_text()
        with told("ttnn does not say what a program for this chip needs", "device"):
            self._align = int(ttnn.get_dram_alignment())
            _limited("piece", piece, self._align, 1 << 16, multiple=self._align)
            self._chip, coordinate = _place(device, reservation)
            self._coordinate = ttnn.MeshCoordinate(*coordinate)
            self._cores = _cores(device, self._coordinate, reservation.banks, cores)
            self._set = ttnn.CoreRangeSet(
                [ttnn.CoreRange(core, core) for line in self._cores for core in line]
            )
            self._table = rows(device, pages * reservation.banks, PAGE_WORDS, "the table of moves")

    # -- what a memory asks ----------------------------------------------------------------------------------

    async def __call__(self, moves: Moves) -> None:
        """Carries moves out on the chip; returns when all bytes have moved.

        Raises `InvalidArgument` for rows that overlap or leave the reservation (nothing is moved), `DeviceReset` for a
        chip that does not answer in time, after which this moves nothing any more, and `HawkMemoryError` with what
        ttnn says where it does not run the program.
        """
        self._check(moves)
        await self._apart(lambda: self._run(moves, self.reservation.address))

    def _check(self, moves: Moves) -> None:
        bad = (moves.channel < 0) | (moves.channel >= self.reservation.banks)
        bad |= (moves.nbytes <= 0) | (np.minimum(moves.source, moves.target) < 0)
        bad |= np.maximum(moves.source, moves.target) > self.reservation.nbytes - moves.nbytes
        if bad.any():
            i = int(np.argmax(bad))
            raise InvalidArgument(
                "a move leaves the reservation",
                field=f"moves[{i}]",
                got=f"{int(moves.nbytes[i])} bytes from {int(moves.source[i])} to {int(moves.target[i])} of bank "
                f"{int(moves.channel[i])}",
                expected=f"within {self.reservation.nbytes} bytes of banks 0..{self.reservation.banks - 1}",
            )

    async def _apart(self, work: Callable[[], None]) -> None:
        """In a thread where ttnn is called, at most for as long as a chip that works may take."""
        self._opened()
        said = "ttnn does not run the program that moves bytes"
        try:
            with told(said, f"chip {self._chip}", "Kernels need the chip's compiler (docs/ttnn.md)"):
                await self._calls(work, self._timeout)
        except NotBegun as error:
            raise HawkMemoryError(
                "ttnn's thread had no time to move bytes",
                field=f"chip {self._chip}",
                got=str(error),
                hint="The executor given has to run calls between the engine's own",
            ) from error
        except NotEnded:
            raise self._gone(f"no answer in {self._timeout:g} s") from None

    def _opened(self) -> Any:
        """The table; raises `HawkMemoryError` where it was given back."""
        table = self._table
        if table is None and not self._calls.hung:
            raise HawkMemoryError("the mover is closed", field=f"chip {self._chip}")
        return table

    def _gone(self, said: str) -> DeviceReset:
        return DeviceReset(
            "the chip does not end the program that moves bytes",
            field=f"chip {self._chip}",
            got=said,
            hint="Reset it, and start engine and agent anew",
        )

    # -- the program -----------------------------------------------------------------------------------------

    def program(self, launch: Launch, moves: Any) -> Any:
        """The `ttnn.MeshProgramDescriptor` of a launch whose table is `moves`: the kernel, for this chip alone.

        What differs between launches is the runtime arguments, so ttnn compiles it once.
        """
        ttnn, shares = self._ttnn, self._shares
        table = int(moves.buffer_address())
        arguments = ttnn.RuntimeArgs()
        for bank, line in enumerate(self._cores):
            for number, core in enumerate(line):
                at = table + int(launch.first[bank, number]) * MOVE_BYTES
                arguments[core.x][core.y] = [bank, at, int(launch.count[bank, number])]
        kernel = ttnn.KernelDescriptor(
            kernel_source=self._source,
            source_type=ttnn.KernelDescriptor.SourceType.SOURCE_CODE,
            core_ranges=self._set,
            compile_time_args=[shares.piece, shares.slots, self._align],
            runtime_args=arguments,
            config=ttnn.DataMovementConfigDescriptor(
                processor=ttnn.DataMovementProcessor.RISCV_0, noc=ttnn.NOC.RISCV_0_default
            ),
        )
        room = self._align + HALVES * shares.slots * (MOVE_BYTES + shares.piece + self._align)
        buffer = ttnn.CBDescriptor(
            total_size=room,
            core_ranges=self._set,
            format_descriptors=[
                ttnn.CBFormatDescriptor(buffer_index=0, data_format=ttnn.uint32, page_size=room)
            ],
        )
        made = ttnn.MeshProgramDescriptor()
        here = ttnn.MeshCoordinateRange(self._coordinate, self._coordinate)
        made[here] = ttnn.ProgramDescriptor(kernels=[kernel], semaphores=[], cbs=[buffer])
        return made

    def _run(self, moves: Moves, address: int) -> None:
        """Launches and waits; in a thread where ttnn is called."""
        ttnn, table = self._ttnn, self._opened()
        # Copies are put on a queue: until it is empty the chip may read the host's tensors, and the table.
        kept = [table]
        try:
            for launch in launches(moves, address, self._shares):
                kept.append(_on_host(self._device, launch.table))
                ttnn.copy_host_to_device_tensor(kept[-1], table)
                ttnn.generic_op([table, table], self.program(launch, table))
                self.launched += 1
        except InvalidArgument:  # nothing was put there
            raise
        except Exception:
            self._over(kept)
            raise
        self._over(kept)

    def _over(self, kept: list[Any]) -> None:
        """Returns when the chip has done what is on its queue; raises `DeviceReset` where ttnn cannot say that."""
        try:
            self._ttnn.synchronize_device(self._device)
        except Exception as fault:
            self._calls.hung = True
            self._stuck += kept
            raise self._gone(words(fault)) from fault

    # -- what it costs ---------------------------------------------------------------------------------------

    async def measure(self) -> None:
        """Finds `cost`, `row_cost` and `call_cost` by moves in memory of its own, and looks at what was moved.

        Takes 1 MiB of each bank meanwhile.  Raises `HawkMemoryError` where other bytes arrived, besides what moving and
        allocating raise; costs are as before then.
        """
        await self._apart(self._measure)

    def _measure(self) -> None:
        nbytes = trial.PAGES * PAGE_BYTES
        scratch = rows(self._device, trial.PAGES * self.reservation.banks, PAGE_WORDS, "a trial of moves")
        address = int(scratch.buffer_address())
        content = trial.content(self.reservation.banks)
        given = _on_host(self._device, content)
        one, small, large = trial.moves(self.reservation.banks, self._align)
        try:
            self._ttnn.copy_host_to_device_tensor(given, scratch)
            self._over([given])
            self._run(one, address)  # compiles
            took = [min(self._timed(moves, address) for _ in range(3)) for moves in (one, small, large)]
        except DeviceReset:
            self._stuck.append(scratch)  # the chip may write there yet
            raise
        index = chips(self._device).index(self._chip)
        there = api.shard_bytes(self._ttnn.from_device(scratch), index)
        wrong = trial.wrong(content, there, (one, small, large))
        if wrong is not None:
            raise HawkMemoryError(
                "the chip does not move what it is told to",
                field=f"chip {self._chip}",
                got=f"other bytes at {wrong[1]} of bank {wrong[0]}",
                expected=f"a trial of {nbytes} bytes of each bank",
            )
        self.cost, self.row_cost, self.call_cost = trial.costs(took, len(small), len(large))

    def _timed(self, moves: Moves, address: int) -> float:
        began = time.perf_counter()
        self._run(moves, address)
        return time.perf_counter() - began

    def close(self) -> None:
        """Gives the table back, at the end of the moves that are under way; nothing else is moved then."""
        self._table = None


def _library() -> Any:
    found = api.library()
    lacking = [name for name in NEEDED if not hasattr(found, name)]
    if lacking:
        raise MissingDependency(
            "this ttnn runs no programs of others",
            field="ttnn",
            got=f"no {', '.join(lacking)}",
            hint=api.HINT,
        )
    return found


def _place(device: Any, reservation: Reservation) -> tuple[int, list[int]]:
    """Number of the chip that is reserved, and its coordinate in the mesh."""
    if len(reservation.chips) != 1:
        raise InvalidArgument(
            "a mover is of one chip",
            field="reservation.chips",
            got=list(reservation.chips),
            expected="one of them: Reservation.of_chip, and a mover for each",
        )
    there, chip = chips(device), reservation.chips[0]
    if chip not in there:
        raise InvalidArgument(
            "the mesh has no such chip", field="reservation.chips", got=chip, expected=f"one of {list(there)}"
        )
    if reservation.banks != banks_of(device):
        raise InvalidArgument(
            "the chip has other banks",
            field="reservation.banks",
            got=reservation.banks,
            expected=banks_of(device),
        )
    if reservation.end > 1 << 32:
        raise InvalidArgument(
            "the program's addresses have 32 bits", field="reservation.nbytes", got=hex(reservation.end)
        )
    shape = [int(n) for n in list(device.shape)]
    return chip, [int(n) for n in np.unravel_index(there.index(chip), shape)]


def _cores(device: Any, coordinate: Any, banks: int, each: int) -> list[list[Any]]:
    """Cores that work for each bank: the one that ttnn says is best for it, and those that are nearest to that."""
    ttnn = api.library()
    best = device.get_optimal_dram_bank_to_logical_worker_assignment(ttnn.NOC.NOC_0, coordinate)
    grid = device.compute_with_storage_grid_size()
    free = {(x, y) for y in range(grid.y) for x in range(grid.x)}
    if len(free) < banks * each:
        raise InvalidArgument(
            "the chip has not that many cores",
            field="cores",
            got=each,
            expected=f"1..{len(free) // banks} for each of {banks} banks",
        )
    chosen: list[list[tuple[int, int]]] = [[] for _ in range(banks)]
    for _ in range(each):
        for bank, line in enumerate(chosen):
            x, y = int(best[bank].x), int(best[bank].y)
            near = min(free, key=lambda c: (abs(c[0] - x) + abs(c[1] - y), c))
            free.remove(near)
            line.append(near)
    return [[ttnn.CoreCoord(*core) for core in line] for line in chosen]


def _on_host(device: Any, table: np.ndarray[Any, np.dtype[np.uint32]]) -> Any:
    """A host tensor of these rows, the same for every chip of the mesh."""
    ttnn = api.library()
    mapper = {}
    if api.mesh_size(list(device.shape)) > 1:
        mapper = {"mesh_mapper": ttnn.replicate_tensor_to_mesh_mapper(device)}
    return ttnn.Tensor(table, ttnn.uint32, layout=ttnn.ROW_MAJOR_LAYOUT, **mapper)


def _limited(name: str, value: int, least: int, most: int, *, multiple: int = 1) -> None:
    if not least <= whole(value, name) <= most or value % multiple:
        expected = f"{least}..{most}" + (f", a multiple of {multiple}" if multiple > 1 else "")
        raise InvalidArgument("no such program", field=name, got=value, expected=expected)
