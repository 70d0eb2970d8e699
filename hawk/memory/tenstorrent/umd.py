"""The user-mode driver: what describes a chip, and writes to its DRAM where nothing better is there.

`tt_umd` is imported when a chip is opened, never before.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any, Protocol

from hawk.errors import DeviceDenied, DeviceReset, HawkMemoryError, MissingDependency
from hawk.extras import install
from hawk.memory.tenstorrent.chip import Chip

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.memory.region import U8
    from hawk.memory.tenstorrent.chip import Core

EXTRA = install("tenstorrent")


class Device(Protocol):
    """A chip that was opened.  Methods block, may be called from any thread, and raise `HawkMemoryError`."""

    @property
    def chip(self) -> Chip:
        """What the driver says of it."""

    def write(self, core: Core, address: int, data: U8) -> None:
        """Writes bytes to DRAM; posted, so that they may be under way when this returns."""

    def read(self, core: Core, address: int, into: U8) -> None:
        """Fills an array from DRAM, behind all that this process wrote to it before."""

    def close(self) -> None:
        """Lets go of the chip.  Safe to call twice."""


class UmdDevice:
    """A `tt_umd.TTDevice`.

    number   the chip's
    device   the device, initialised
    dma      whether large pieces go by the chip's DMA engine, which falls back to writes where there is none
    """

    def __init__(self, umd: Any, number: int, device: Any, *, dma: bool = False) -> None:
        self._device: Any = device
        self._dma = dma
        self._one = threading.Lock()  # two calls at a time would move each other's window
        self._number = number
        try:
            self.chip = described(umd, number, device)
        except Exception as error:
            raise told(error, "says nothing about itself", number) from error

    def write(self, core: Core, address: int, data: U8) -> None:
        """See `Device.write`."""
        with self._one:
            device = self._opened()
            put = device.dma_write_to_device if self._dma and data.nbytes >= DMA_BYTES else device.noc_write
            try:
                put(core[0], core[1], address, data.data)
            except Exception as error:
                raise told(error, "takes no writes", self._number) from error

    def read(self, core: Core, address: int, into: U8) -> None:
        """See `Device.read`."""
        with self._one:
            device = self._opened()
            get = device.dma_read_from_device if self._dma and into.nbytes >= DMA_BYTES else device.noc_read
            try:
                get(0, core[0], core[1], address, into.data)
            except Exception as error:
                raise told(error, "answers no reads", self._number) from error

    def _opened(self) -> Any:
        if self._device is None:
            raise HawkMemoryError("the memory is closed", field=f"chip {self._number}")
        return self._device

    def close(self) -> None:
        """See `Device.close`."""
        with self._one:
            self._device = None


DMA_BYTES = 64 << 10
"""Pieces smaller than this are written, DMA or not: setting a transfer up takes longer."""


def load() -> Any:
    """The module `tt_umd`.  Raises `MissingDependency` naming the extra."""
    try:
        return importlib.import_module("tt_umd")
    except ImportError as error:
        raise MissingDependency(
            "writing to the chip's memory, and asking for its bank map, takes the package tt-umd",
            field="tt_umd",
            got=str(error),
            hint=EXTRA,
        ) from error


def open_chip(number: int, *, dma: bool = False, umd: Callable[[], Any] = load) -> UmdDevice:
    """Opens `/dev/tenstorrent/N`.

    Raises `MissingDependency`, `DeviceDenied`, or `HawkMemoryError` saying what the driver said.
    """
    module = umd()
    try:
        device = module.TTDevice.create(number)
        device.init_tt_device()
    except Exception as error:
        raise told(error, "cannot be opened", number) from error
    return UmdDevice(module, number, device, dma=dma)


def open_simulator(path: str, *, number: int = 0, umd: Callable[[], Any] = load) -> UmdDevice:
    """Opens a simulator's library, beside which its `soc_descriptor.yaml` lies; one of them in a process."""
    module = umd()
    try:
        device = module.create_simulation_tt_device(path)
        device.init_tt_device()
    except Exception as error:
        raise told(error, f"cannot be simulated by {path}", number) from error
    return UmdDevice(module, number, device)


def described(umd: Any, number: int, device: Any) -> Chip:
    """What the driver's own description of the chip says, harvested channels left out."""
    soc = device.get_soc_descriptor()
    cores: dict[int, list[tuple[int, int, int]]] = {}
    for core in soc.get_cores(umd.CoreType.DRAM, umd.CoordSystem.LOGICAL):
        there = soc.translate_coord_to(core, umd.CoordSystem.TRANSLATED)
        cores.setdefault(core.x, []).append((core.y, there.x, there.y))
    arch = device.get_arch()
    return Chip(
        number=number,
        arch=arch.name.lower(),
        channels=tuple(tuple((x, y) for _, x, y in sorted(cores[c])) for c in sorted(cores)),
        channel_bytes=int(umd.SocArchDescriptor(arch).dram_bank_size),
    )


def told(error: Exception, what: str, number: int) -> HawkMemoryError:
    """An error of the driver's as one of ours; it has few types and tells by text."""
    if isinstance(error, HawkMemoryError):
        return error
    text = next(iter(str(error).splitlines()), "") or repr(error)
    low = text.lower()
    field = f"chip {number}"
    if isinstance(error, PermissionError) or "permission" in low:
        return DeviceDenied(
            "this user may not open the chip",
            field=field,
            got=text,
            hint="Give the agent's user the device, by its group or a udev rule (docs/tenstorrent.md)",
        )
    if "no such device" in low or "hung" in low or type(error).__name__ == "SigbusError":
        return DeviceReset(
            "the chip was reset or hangs",
            field=field,
            got=text,
            hint="Start the agent anew once the chip is up",
        )
    return HawkMemoryError(f"the chip {what}", field=field, got=text)
