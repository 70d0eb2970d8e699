"""What `hawk doctor` says of Tenstorrent chips: read from files, nothing opened and no device library imported.

What an agent says of a chip that is not there is looked up in the same files.
"""

from __future__ import annotations

import importlib.util
import os
import re
from typing import TYPE_CHECKING, Protocol

from hawk.extras import install
from hawk.memory.tenstorrent.kmd import DEVICES, EXPORT_KERNEL, EXPORT_SINCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MODULE = "tenstorrent"
NAME = "Tenstorrent"

SHUT = (
    "Run the agent as a user of the devices' group, or change the group by a udev rule (docs/tenstorrent.md)"
)
"""What to do where a device file is another user's."""

Line = tuple[str, bool, str, str]


class Files(Protocol):
    """What is asked of `hawk.doctor.Machine`."""

    def path(self, name: str) -> Path:
        """A file by its absolute name."""

    def read(self, name: str) -> str:
        """What it says; empty where it cannot be read."""

    def names(self, folder: str) -> list[str]:
        """What lies in a folder."""

    def loaded(self, module: str) -> bool:
        """Whether a kernel module is there."""

    @property
    def release_numbers(self) -> tuple[int, int]:
        """The kernel's version."""


def no_chip(number: int) -> str:
    """What to do where `/dev/tenstorrent/N` is not there: by whether the driver is, and other chips are."""
    if not os.path.isdir(f"/sys/module/{MODULE}"):
        return "Put a card in and load its driver tt-kmd (docs/tenstorrent.md)"
    there = sorted((n for n in _listed(DEVICES) if n.isdecimal()), key=int)
    if there:
        return f"Set chip to one that is there: {', '.join(there)}"
    return (
        f"The driver tt-kmd is loaded, but has no chip {number}: put a card in; `dmesg` says why none came up"
    )


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def survey(
    machine: Files, known: Callable[[str], object] = importlib.util.find_spec, *, lacking: bool = False
) -> Iterator[Line]:
    """The chips, their driver, and the way that a memory of theirs would be reached.

    `lacking` says that the configuration at hand names such a memory, and that it could not be opened.
    """
    chips = [name for name in machine.names(DEVICES) if name.isdecimal()]
    if not chips:
        if machine.loaded(MODULE):
            yield NAME, False, "the driver is loaded, but there is no chip", "`dmesg` says why none came up"
        else:
            what = "Put a card in and load its driver tt-kmd (docs/tenstorrent.md)" if lacking else ""
            yield NAME, not lacking, "no chip, and its driver tt-kmd is not loaded", what
        return
    version = machine.read(f"/sys/module/{MODULE}/version")
    listed = ", ".join(f"{DEVICES}/{chip}" for chip in chips)
    shut = [c for c in chips if not os.access(machine.path(f"{DEVICES}/{c}"), os.R_OK | os.W_OK)]
    if shut:
        yield (
            NAME,
            False,
            f"this user may not open {', '.join(f'{DEVICES}/{c}' for c in shut)}",
            SHUT,
        )
    else:
        yield NAME, True, f"{listed}; driver {version or 'of unknown version'}, {_iommu(machine)}", ""
    old = _old(version, machine.release_numbers)
    if old:
        yield (
            f"{NAME} windows",
            False,
            f"{old}: memory is staged in the host",
            "Update it to have windows for cards",
        )
    else:
        yield f"{NAME} windows", True, "the driver exports them as dma-bufs: memory is reached straight", ""
    if known("tt_umd") is None:
        remedy = f"{install('tenstorrent')}; it is what knows the bank map of a chip"
        yield "tt-umd", False, "not installed: memories of kind `tenstorrent` need it, by every way", remedy
    else:
        yield "tt-umd", True, "installed", ""


def _old(version: str, kernel: tuple[int, int]) -> str:
    """Why windows are not exported, as far as versions tell; empty where they are."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < EXPORT_SINCE:
        since = ".".join(map(str, EXPORT_SINCE))
        return f"driver {version or 'of unknown version'} exports no windows, {since} and later do"
    if kernel < EXPORT_KERNEL:
        return f"on Linux before {'.'.join(map(str, EXPORT_KERNEL))} the driver exports no windows"
    return ""


def _iommu(machine: Files) -> str:
    if machine.names("/sys/kernel/iommu_groups"):
        return "behind an IOMMU"
    pages = machine.read("/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages") or "0"
    return f"no IOMMU ({pages} huge pages of 1 GiB, which the chip's own software then takes)"
