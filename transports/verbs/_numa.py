"""How far memory is from a network card: the NUMA nodes of both, as the kernel tells them.

A card's node is `/sys/class/infiniband/DEV/device/numa_node`, that of a page what `get_mempolicy(2)` says with
`MPOL_F_NODE | MPOL_F_ADDR`, and how far nodes are from each other `/sys/devices/system/node/nodeN/distance` (10 is a
node from itself).  Whatever is not known counts as near.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

NODES = Path("/sys/devices/system/node")

UNKNOWN = -1

_HERE, _ELSEWHERE = 10, 20
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_NODE_OF_ADDRESS = 3  # MPOL_F_NODE | MPOL_F_ADDR


@dataclass(frozen=True, slots=True)
class Distances:
    """Of each node to each other, as the kernel has them; `known[a][b]`."""

    known: Mapping[int, tuple[int, ...]]

    @classmethod
    def read(cls, folder: Path = NODES) -> Distances:
        """Those of this machine; none where the kernel shows none."""
        known = {}
        for node in folder.glob("node[0-9]*"):
            try:
                known[int(node.name[4:])] = tuple(map(int, (node / "distance").read_text("ascii").split()))
            except (OSError, ValueError):
                continue
        return cls(known)

    def of(self, a: int, b: int) -> int:
        """From a card on node `a` to memory on node `b`; that of a node to itself where either is not known."""
        if a < 0 or b < 0 or a == b:
            return _HERE
        row = self.known.get(a, ())
        return row[b] if b < len(row) else _ELSEWHERE


def node_of(address: int) -> int:
    """The node of the page at an address, which has to be there; `UNKNOWN` where the kernel does not say."""
    number = _GET_MEMPOLICY.get(platform.machine())
    if number is None:
        return UNKNOWN
    node = ctypes.c_int(UNKNOWN)
    asked = ctypes.CDLL(None, use_errno=True).syscall(
        ctypes.c_long(number),
        ctypes.byref(node),
        None,
        ctypes.c_ulong(0),
        ctypes.c_void_p(address),
        ctypes.c_ulong(_NODE_OF_ADDRESS),
    )
    return node.value if asked == 0 else UNKNOWN
