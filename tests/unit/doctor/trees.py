"""Trees of files that stand for machines."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

from hawk.doctor import Finding, Machine

PORT = "/sys/class/infiniband/mlx5_0/ports/1"
EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe00:0001"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a4d:0001"

ROCE = {
    f"{PORT}/state": "4: ACTIVE",
    f"{PORT}/link_layer": "Ethernet",
    f"{PORT}/rate": "100 Gb/sec (4X EDR)",
    f"{PORT}/gids/0": LINK_LOCAL,
    f"{PORT}/gid_attrs/types/0": "IB/RoCE v1",
    f"{PORT}/gid_attrs/ndevs/0": "eth1",
    f"{PORT}/gids/1": LINK_LOCAL,
    f"{PORT}/gid_attrs/types/1": "RoCE v2",
    f"{PORT}/gid_attrs/ndevs/1": "eth1",
    f"{PORT}/gids/2": MAPPED,
    f"{PORT}/gid_attrs/types/2": "IB/RoCE v1",
    f"{PORT}/gid_attrs/ndevs/2": "eth1",
    f"{PORT}/gids/10": MAPPED,
    f"{PORT}/gid_attrs/types/10": "RoCE v2",
    f"{PORT}/gid_attrs/ndevs/10": "eth1",
    f"{PORT}/gids/3": EMPTY_GID,
    "/sys/class/net/eth1/mtu": "4200",
}
"""A RoCE card whose only good address stands at index 10."""

LINUX = {
    "/proc/sys/kernel/osrelease": "6.1.0-40-amd64",
    "/boot/config-6.1.0-40-amd64": "CONFIG_DMA_SHARED_BUFFER=y\n",
}


def tree(
    root: Path, files: dict[str, str], memlock: int = resource.RLIM_INFINITY, nofile: int = 65536
) -> Machine:
    """A machine with those files; the names begin with `/`."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def limit(which: int) -> tuple[int, int]:
        both = memlock if which == resource.RLIMIT_MEMLOCK else nofile
        return both, both

    return Machine(root, limit)


def levels(check: Callable[[Machine], object], machine: Machine) -> dict[str, str]:
    """The level of each line of a check, by the name of the line."""
    return {found.name: found.level.value for found in _found(check, machine)}


def only(check: Callable[[Machine], object], machine: Machine) -> Finding:
    """The one line of a check."""
    (found,) = _found(check, machine)
    return found


def _found(check: Callable[[Machine], object], machine: Machine) -> list[Finding]:
    return list(check(machine))  # type: ignore[call-overload, no-any-return]
