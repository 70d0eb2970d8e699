"""`kind = "tenstorrent"`: the DRAM banks of one chip as channels, and the way by which bytes get there."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import os
import threading
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakSet

from hawk.errors import (
    DeviceDenied,
    DeviceReset,
    HawkError,
    HawkMemoryError,
    InvalidArgument,
    MissingDependency,
)
from hawk.memory.base import MoveSupport
from hawk.memory.channels import Channels, settle
from hawk.memory.region import ByteRanges
from hawk.memory.tenstorrent import kmd, umd
from hawk.memory.tenstorrent.claim import Claim
from hawk.memory.tenstorrent.direct import DirectWay
from hawk.memory.tenstorrent.driver import Driver
from hawk.memory.tenstorrent.options import TenstorrentConfig
from hawk.memory.tenstorrent.reverse import READ_COST, Pinned
from hawk.memory.tenstorrent.staged import StagedWay
from hawk.memory.tenstorrent.survey import SHUT, no_chip, survey
from hawk.memory.tenstorrent.windows import budget
from hawk.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from hawk.memory.region import Moves, Region
    from hawk.memory.tenstorrent.chip import Bank, Chip
    from hawk.memory.tenstorrent.programs import Mover, Pusher
    from hawk.memory.tenstorrent.reservation import Reservation


_over: WeakSet[Tenstorrent] = WeakSet()
"""The memories of this process that are over chips, and not over a test's or a simulator's."""

_over_lock = threading.Lock()


class Tenstorrent(Channels):
    """The reserved range of one chip's DRAM banks; one of these for each chip of a mesh.

    name         unique in its agent; regions are called `name/channelN`
    reservation  of one chip: what the allocator's owner has set aside (`Reservation.of_chip`)
    config       how it is reached; its own figures of the reservation are not looked at
    chip         what is known of the chip; asked of its driver if None
    mover        moves bytes on the chip, for staged plans; without one, only a shadow can be moved in.  Its costs are
                 read here, so measure them first (`hawk.integrations.ttnn.BankMover.measure`)
    pusher       writes the chip's memory into the host's, for caches that are sources
    calls, open_device   the seams to the kernel and to tt-umd, for tests

    way          `dma-buf` or `host`: the way that was taken
    why_not      the ways that are better or were not wanted, each with the reason
    back         how sources are read: `chip` (it writes into pinned memory), `tt-umd`, or `window`
    said         one line of all that

    The constructor blocks while windows are taken or the shadow is filled.  Raises `InvalidArgument` where another
    memory of this process or another process of this machine has a part of the reservation (`Claim`), and what the way
    that was asked for raises, the last one's where none goes; nothing stays open then.
    """

    kind: ClassVar[str] = "tenstorrent"
    Config: ClassVar[type[TenstorrentConfig]] = TenstorrentConfig
    survey = staticmethod(survey)

    def __init__(
        self,
        name: str,
        reservation: Reservation,
        config: TenstorrentConfig | None = None,
        *,
        chip: Chip | None = None,
        mover: Mover | None = None,
        pusher: Pusher | None = None,
        calls: kmd.Calls | None = None,
        open_device: Callable[[], umd.Device] | None = None,
    ) -> None:
        if len(reservation.chips) != 1:
            raise InvalidArgument(
                "a memory is of one chip",
                field="reservation.chips",
                got=list(reservation.chips),
                expected="one of them: Reservation.of_chip, and a memory for each",
            )
        number = reservation.chips[0]
        config = config or TenstorrentConfig(
            reservation.address, reservation.nbytes, reservation.banks, number
        )
        self._config = config
        self._calls = calls or kmd.Kernel()
        self._open = open_device or _opener(config, number)
        self.reservation = reservation
        self.why_not: dict[str, str] = {}
        self._moves_there = mover
        self._lost = ""
        self._claim: Claim | None = None
        self.name = name
        with contextlib.ExitStack() as undo:
            if calls is None and open_device is None and not config.simulator:
                self._alone()
                undo.callback(_over.discard, self)
                self._claim = Claim(kmd.path_of(number), reservation, name)
                undo.callback(self._claim.close)
            way = self._taken(name, chip)
            undo.callback(way.close)
            super().__init__(
                name,
                channels=reservation.banks,
                channel_bytes=way.covered,
                alignment=reservation.alignment or self.chip.alignment,
            )
            self._way = way
            self._regions = way.regions
            self.way = way.name
            if mover is not None and self.way != "host":  # the shadow is moved in by the host's cores
                self.move_cost, self.move_row_cost = mover.cost, mover.row_cost
                self.move_call_cost = getattr(mover, "call_cost", 0.0)
            self._pusher = pusher
            self._pinned: Pinned | None = None
            self.back = self._way_back(name)
            self.refreshes = self.back != "window"
            self.said = self._told()
            undo.pop_all()

    @classmethod
    def from_config(cls, name: str, config: TenstorrentConfig) -> Tenstorrent:
        """The memory that a config table describes."""
        return cls(name, config.reservation(), config)

    @staticmethod
    def obstacle(config: TenstorrentConfig) -> None:
        """Raises what a look at files says would stop it, the chip first; opens nothing."""
        path = config.simulator or kmd.path_of(config.chip)
        field = "simulator" if config.simulator else "chip"
        if not os.path.exists(path):
            raise HawkMemoryError(
                "there is no such file" if config.simulator else "there is no such chip",
                field=field,
                got=path,
                hint="Name the library of a simulator, or none" if config.simulator else no_chip(config.chip),
            )
        if not os.access(path, os.R_OK if config.simulator else os.R_OK | os.W_OK):
            raise DeviceDenied("this user may not open it", field=field, got=path, hint=SHUT)
        if importlib.util.find_spec("tt_umd") is None:
            raise MissingDependency("the package tt-umd is not installed", field="tt_umd", hint=umd.EXTRA)

    def _alone(self) -> None:
        """Keeps other memories of this process off the range; raises `InvalidArgument` where one has a part of it."""
        with _over_lock:
            for other in _over:
                if other.reservation.meets(self.reservation):
                    raise InvalidArgument(
                        "another memory has a part of this reservation",
                        field=f"memory.{self.name}.address",
                        got=f"{self.reservation.address:#x} to {self.reservation.end:#x}",
                        expected=f"none of {other.reservation.address:#x} to {other.reservation.end:#x}, which "
                        f"memory {other.name} has of chip {other.reservation.chips[0]}",
                    )
            _over.add(self)

    # -- the way that is taken -------------------------------------------------------------------------------

    def _taken(self, name: str, chip: Chip | None) -> DirectWay | StagedWay:
        """The best way there is, or the one that was asked for."""
        asked = self._config.way
        device: umd.Device | None = None
        with contextlib.ExitStack() as undo:
            if chip is None or asked == "host":
                device = self._open()
                undo.callback(device.close)
            if chip is None:
                assert device is not None
                chip = device.chip
            self.chip = chip
            banks = self.chip.check(self.reservation)
            if asked != "host":
                try:
                    return self._direct(name, banks)
                except HawkError as error:
                    if asked == "dma-buf":
                        raise
                    self.why_not["dma-buf"] = _short(error)
            else:
                self.why_not["dma-buf"] = 'the config says way = "host"'
            if device is None:
                device = self._open()
            undo.pop_all()
            return StagedWay(
                name,
                device,
                banks,
                self.reservation,
                piece=self._config.piece,
                huge_pages=self._config.huge_pages,
            )

    def _direct(self, name: str, banks: Sequence[Bank]) -> DirectWay:
        config = self._config
        if config.simulator:
            raise HawkMemoryError("a simulator has no windows", field=f"memory.{name}.simulator")
        driver = Driver(self.chip.number, f"memory.{name}", self._calls)
        everything = self.reservation.nbytes
        alignment = self.reservation.alignment or self.chip.alignment
        least = config.least or (everything if config.way == "auto" else alignment)
        return DirectWay(
            name,
            driver,
            banks,
            self.reservation,
            free=budget(kmd.WINDOWS.get(self.chip.arch, ()), config.window_share, config.large_window_share),
            least=least,
            ordering=config.ordering,
            adopter=config.adopter,
        )

    def _way_back(self, name: str) -> str:
        """How sources are read; the shadow is pinned already where the chip writes it."""
        plain = "tt-umd" if self.way == "host" else "window"
        if self._pusher is None:
            return plain
        if self._pusher.cost >= READ_COST:
            self.why_not["writes of the chip"] = (
                f"they take {self._pusher.cost:.3g} s a byte, reads {READ_COST:.3g}"
            )
            return plain
        try:
            driver = Driver(self.chip.number, f"memory.{name}", self._calls)
            shadow = self._regions if self.way == "host" else None
            self._pinned = Pinned(name, driver, self.reservation, shadow)
        except HawkMemoryError as error:
            self.why_not["writes of the chip"] = _short(error)
            return plain
        return "chip"

    def _told(self) -> str:
        way, chip = self._way, self.chip
        head = f"chip {chip.number} ({chip.arch}): {self.channels} banks, "
        head += f"{approximate_size(self.channel_bytes)} of each from {self.reservation.address:#x} on"
        if isinstance(way, DirectWay):
            text = f"{head}, straight through {way.windows} windows"
            lacking = self.reservation.nbytes - self.channel_bytes
            if lacking:
                text += f"; windows are short, so {approximate_size(lacking)} of each bank are left out"
        else:
            text = f"{head}, staged in the host's memory and written by tt-umd"
        text += {
            "chip": "; sources are written by the chip into pinned memory of the host",
            "tt-umd": "; sources are read by tt-umd",
            "window": "; sources are read through the windows, slowly",
        }[self.back]
        if self.way != "host":
            text += f"; {self._told_of_moves()}"
        return text + "".join(f"; not by {name}: {why}" for name, why in self.why_not.items())

    def _told_of_moves(self) -> str:
        if self._moves_there is None:
            return "nothing moves bytes inside its banks, so plans are direct"
        if self.move_cost == math.inf:
            return "the chip's moves inside its banks were not measured, so plans are direct"
        return f"the chip moves bytes inside its banks, {self.move_cost:.2g} s a byte"

    # -- what every memory does ------------------------------------------------------------------------------

    async def flush(self, ranges: ByteRanges) -> None:
        """Makes what was written readable by the chip: see `DirectWay.flush` and `StagedWay.flush`."""
        self._check_ranges(ranges)
        if self._lost:
            raise DeviceReset(
                "a program of the chip's did not end, and may still write",
                field=f"memory.{self.name}",
                got=self._lost,
                hint="Reset the chip, and start engine and agent anew",
            )
        if len(ranges):
            await self._apart(self._way.flush, ranges if self.way == "host" else ranges.spans())

    @property
    def readable(self) -> Sequence[Region]:
        """The shadow where there is one; the windows otherwise."""
        return self._pinned.regions if self._pinned is not None else self.regions

    async def refresh(self, ranges: ByteRanges) -> None:
        """Makes what the chip has written readable: by the chip or by tt-umd; through windows it is at once."""
        self._check_ranges(ranges)
        if not len(ranges):
            return
        if self._pinned is not None:
            assert self._pusher is not None
            await _to_its_end(self._pusher(ranges, self._pinned.noc))
        elif isinstance(self._way, StagedWay):
            await self._apart(self._way.refresh, ranges)

    async def _apart(self, what: Callable[[ByteRanges], None], ranges: ByteRanges) -> None:
        """In a thread; whoever is cancelled waits until it has ended."""
        await _to_its_end(asyncio.get_running_loop().run_in_executor(None, what, ranges))

    @property
    def move_support(self) -> MoveSupport:
        """The chip where it was given programs, the host's cores in a shadow, else nobody: windows read slowly."""
        if self._moves_there is not None and self.way != "host":
            return MoveSupport.DEVICE
        return MoveSupport.HOST if self.way == "host" else MoveSupport.NONE

    async def move(self, moves: Moves) -> None:
        """See `Memory.move`; before the chip moves bytes, what was written there is flushed.

        After a program that did not end, which may write whenever it goes on, no flush succeeds any more.
        """
        if self.move_support is not MoveSupport.DEVICE:
            await super().move(moves)
            return
        self._check("moves", moves.channel, moves.source, moves.nbytes)
        self._check("moves", moves.channel, moves.target, moves.nbytes)
        if len(moves):
            await self.flush(_sources(moves))
            await _to_its_end(self._by_the_chip(moves))

    async def _by_the_chip(self, moves: Moves) -> None:
        """The program, whose end is known here also where whoever waited for it was cancelled."""
        assert self._moves_there is not None
        try:
            await self._moves_there(moves)
        except DeviceReset as error:
            self._lost = str(error)
            raise

    @property
    def counts(self) -> dict[str, int]:
        """What was done so far: windows, reads behind writes; or pieces written and read, bytes, words confirmed."""
        way = self._way
        if isinstance(way, DirectWay):
            return {"windows": way.windows, "flushed_windows": way.flushes}
        return {
            "writes": way.writes,
            "written_bytes": way.written_bytes,
            "confirmed": way.confirmed,
            "reads": way.reads,
            "read_bytes": way.read_bytes,
        }

    def close(self) -> None:
        """Gives windows, shadow and chip back, see `DirectWay.close` and `StagedWay.close`."""
        super().close()
        if self._pinned is not None:
            self._pinned.close()
        self._way.close()
        if self._claim is not None:
            self._claim.close()
        _over.discard(self)


async def _to_its_end(what: Awaitable[None]) -> None:
    """Awaits it; whoever is cancelled waits until it has ended.

    Until then the chip may write where it was told to, and what lies there may be neither freed nor unpinned.
    """
    work = asyncio.ensure_future(what)
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await settle(work)
        raise


def _opener(config: TenstorrentConfig, number: int) -> Callable[[], umd.Device]:
    if config.simulator:
        return lambda: umd.open_simulator(config.simulator, number=number)
    return lambda: umd.open_chip(number, dma=config.dma)


def _short(error: HawkError) -> str:
    """The error in the middle of a line: without its field, which is this memory, and without its hint."""
    text = error.message
    if error.got is not None:
        text += f" ({error.got}"
        text += f", needs {error.expected})" if error.expected is not None else ")"
    return text


def _sources(moves: Moves) -> ByteRanges:
    return ByteRanges(moves.channel, moves.source, moves.nbytes)
