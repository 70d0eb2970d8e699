"""Moves inside banks with ttnn itself: the program's descriptors, and the program on a simulated chip."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np

from hawk.errors import HawkMemoryError
from hawk.integrations.ttnn import BankMover, api, reserve
from hawk.integrations.ttnn.moves import PAGE_BYTES
from hawk.memory.region import Moves
from tests.ttnn import compiler
from tests.ttnn.checks import device, library

NBYTES = 1 << 18


def rows(banks: int, each: int, seed: int) -> Moves:
    """`each` rows of every bank, of any length and alignment, from its first half to its second."""
    random = np.random.default_rng(seed)
    step = NBYTES // 2 // each // 64 * 64
    number = np.arange(each)
    parts = []
    for bank in range(banks):
        nbytes = random.integers(1, step - 64, each)
        aligned = random.integers(0, 3, each) == 0
        nbytes = np.where(aligned, -(-nbytes // 64) * 64, nbytes)
        source, target = (
            places * step + np.where(aligned, 0, random.integers(0, 64, each))
            for places in (number, random.permutation(each))
        )
        parts.append((np.full(each, bank), source, NBYTES // 2 + target, nbytes))
    channel, source, target, nbytes = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Moves(channel.astype(np.int32), source, target, nbytes)


def described(chip: int) -> dict[str, Any]:
    """What ttnn says of a launch where it is to run it on a mock chip, and what the mover asked it about the chip."""
    ttnn = library()
    held = reserve(device(), NBYTES).of_chip(chip)
    mover = BankMover(device(), held, cores=2)
    moves = rows(held.banks, 12, 1)
    said = ""
    try:
        asyncio.run(mover(moves))
    except HawkMemoryError as refused:
        said = str(refused)
    mover.close()
    return {
        "said": said,
        "banks": held.banks,
        "cores": [[(core.x, core.y) for core in line] for line in mover._cores],
        "grid": (device().compute_with_storage_grid_size().x, device().compute_with_storage_grid_size().y),
        "align": int(ttnn.get_dram_alignment()),
        "bounds": (held.lowest, held.highest),
    }


def settle(simulator: str, folder: str) -> None:
    """Runs first in a process: ttnn drives the simulator, and compiles with what there is."""
    from importlib.util import find_spec

    found = find_spec("ttnn")
    assert found is not None
    assert found.origin is not None
    root = compiler.root(Path(found.origin).parent, Path(folder))
    os.environ.update(
        {
            "TT_METAL_SIMULATOR": simulator,
            "TT_METAL_SLOW_DISPATCH_MODE": "1",
            "TT_METAL_RUNTIME_ROOT": str(root),
            "TT_METAL_CACHE": folder,
            "TT_LOGGER_LEVEL": "FATAL",
            "LOGURU_LEVEL": "ERROR",
            "TMPDIR": folder,
            "OMPI_MCA_btl": "self",
        }
    )
    os.chdir(folder)


def moved(each: int, wrong: bool = False) -> dict[str, Any]:
    """Moves on the simulated chip, and what its banks hold then beside the plain model; `wrong` moves one row less."""
    import ttnn

    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 1))
    held = reserve(mesh, NBYTES)
    pages = NBYTES // PAGE_BYTES * held.banks
    numbers = np.random.default_rng(5).integers(0x3F80, 0x4000, (pages, 1, 32, 32), np.uint16)
    given = ttnn.Tensor(
        (numbers.astype(np.uint32) << 16).view(np.float32), ttnn.bfloat16, layout=ttnn.TILE_LAYOUT
    )
    ttnn.copy_host_to_device_tensor(given, held.holder)
    mover = BankMover(mesh, held, cores=2, slots=4, piece=512, timeout=500)
    moves = rows(held.banks, each, 7)
    wanted = by_bank(api.shard_bytes(given), held.banks)
    before = wanted.copy()
    for bank, source, target, nbytes in zip(*map(np.ndarray.tolist, columns(moves)), strict=True):
        wanted[bank, target : target + nbytes] = before[bank, source : source + nbytes]
    told = Moves(*(column[wrong:] for column in columns(moves)))
    asyncio.run(mover(told))
    got = by_bank(api.shard_bytes(ttnn.from_device(held.holder)), held.banks)
    found = {
        "differ": int((got != wanted).sum()),
        "moved": int((wanted != before).sum()),
        "launched": mover.launched,
        "arch": str(mesh.arch()),
    }
    mover.close()
    ttnn.close_mesh_device(mesh)
    return found


def columns(moves: Moves) -> tuple[Any, ...]:
    return moves.channel, moves.source, moves.target, moves.nbytes


def by_bank(pages: np.ndarray, banks: int) -> np.ndarray:
    return pages.reshape(-1, banks, PAGE_BYTES).transpose(1, 0, 2).reshape(banks, -1).copy()
