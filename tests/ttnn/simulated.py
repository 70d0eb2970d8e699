"""What is written to a simulated chip by HAWK's memory and read by the driver's own map; runs in a process of its own.

The driver's map is the description that lies beside the simulator's library (`soc_descriptor.yaml`, a part of ttnn):
for each bank the DRAM channel, which of its cores workers go by, and what is added to addresses.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np

from hawk.memory.region import ByteRanges
from hawk.memory.tenstorrent import Reservation, Tenstorrent, TenstorrentConfig, umd

GUARD = 256
PAGE = 2048
PIECE = 64 << 10
CANARY = 0xC5


def views(library: str) -> tuple[list[tuple[int, int, int]], int]:
    """Channel, core of the channel and address offset of each bank, and bytes of a bank."""
    text = (Path(library).parent / "soc_descriptor.yaml").read_text()
    found = re.findall(
        r"\{\s*channel:\s*(\d+),\s*eth_endpoint:[^\]]*\],\s*worker_endpoint:\s*\[\s*(\d+)[^\]]*\],"
        r"\s*address_offset:\s*(\d+)\s*,?\s*\}",
        text,
    )
    size = re.search(r"dram_view_size:\s*(\d+)", text)
    assert found, f"no dram_views beside {library}"
    assert size is not None
    return [(int(c), int(port), int(offset)) for c, port, offset in found], int(size[1])


class Kept:
    """The one simulated device of this process, which several memories use one after the other."""

    def __init__(self, device: umd.UmdDevice) -> None:
        self.chip, self.write, self.read = device.chip, device.write, device.read

    def close(self) -> None:
        return


def bank_map(library: str, first: int) -> dict[str, Any]:
    """Writes the first, the last and boundary pages of every bank, and reads them by the driver's own map.

    `first` is the first address that the allocator gives out.  Returns what was found; every list of faults is empty
    where all is well.
    """
    wanted, size = views(library)
    device = umd.open_simulator(library)
    chip = device.chip
    banks = chip.banks(len(wanted))
    faults = [
        f"bank {number}: {bank}, the driver says {view}"
        for number, (bank, view) in enumerate(zip(banks, wanted, strict=True))
        if bank.core not in chip.channels[view[0]] or bank.offset != view[2] or bank.nbytes < size
    ]
    counted = []
    places = {
        "first": first,
        "last": size - PAGE,
        "across a small window": (256 << 20) - PAGE,
        "across a large piece": (512 << 20) - PIECE // 2,
    }
    for number, (what, address) in enumerate(places.items()):
        nbytes = PIECE + PAGE if "piece" in what else 2 * PAGE if "window" in what else PAGE
        faults += _one(device, wanted, what, address, nbytes, number, counted)
    return {
        "arch": chip.arch,
        "channels": len(chip.channels),
        "banks": len(banks),
        "faults": faults,
        "counted": counted,
    }


def _one(
    device: umd.UmdDevice,
    wanted: list[tuple[int, int, int]],
    what: str,
    address: int,
    nbytes: int,
    number: int,
    counted: list[tuple[str, int, int]],
) -> list[str]:
    ports = [device.chip.channels[channel][port] for channel, port, _ in wanted]
    low, high = max(address - GUARD, 0), address + nbytes
    guard = np.full(GUARD, CANARY, np.uint8)
    for core, (_, _, offset) in zip(ports, wanted, strict=True):
        device.write(core, offset + low, guard[: address - low])
        if what != "last":
            device.write(core, offset + high, guard)
    reservation = Reservation((0,), address, nbytes, len(wanted))
    config = TenstorrentConfig(address, nbytes, len(wanted), way="host", piece=PIECE)
    memory = Tenstorrent("npu0", reservation, config, open_device=lambda: Kept(device))
    content = [
        np.random.default_rng([number, bank]).integers(0, 256, nbytes, np.uint8)
        for bank in range(len(wanted))
    ]
    for region, data in zip(memory.regions, content, strict=True):
        region.array[:] = data
    count = len(wanted)
    zeros = np.zeros(count, np.int64)
    asyncio.run(memory.flush(ByteRanges(np.arange(count, dtype=np.int32), zeros, zeros + nbytes)))
    counted.append((what, memory.counts["writes"], count * -(-nbytes // PIECE)))
    memory.close()
    faults = []
    for bank, (core, (_, _, offset)) in enumerate(zip(ports, wanted, strict=True)):
        there = np.empty(nbytes, np.uint8)
        device.read(core, offset + address, there)
        if not np.array_equal(there, content[bank]):
            faults.append(f"{what}: bank {bank} holds other bytes")
        for at in (low, high) if what != "last" else (low,):
            beside = np.empty(GUARD if at == high else address - low, np.uint8)
            device.read(core, offset + at, beside)
            if (beside != CANARY).any():
                faults.append(f"{what}: bank {bank} was written outside the reservation, at {at:#x}")
    return faults
