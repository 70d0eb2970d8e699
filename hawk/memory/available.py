"""How much memory this process may still take: the machine's and the control group's word together.

A container's limit does not show in /proc/meminfo, and going past it kills the process instead of failing the
allocation; hence the look at both.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

_UNLIMITED = 1 << 60
"""Version 1 control groups write "no limit" as the largest page-aligned int64; nothing real comes near this."""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be allocated now without swapping, by the tightest of all limits; never negative.

    That is the least of MemAvailable and, for the process's memory control group (version 1 or 2) and each
    group above it, its limit minus its usage, where file cache that the kernel can drop does not count as used.
    `root` stands for the file system's root; tests give another.  Where nothing can be read: `sys.maxsize`.
    """
    limits = [_machine(root)]
    with contextlib.suppress(OSError, ValueError):  # no /proc, or one that hides the groups
        limits += _control_groups(root)
    return max(0, min(limits))


def _machine(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            key, _, rest = line.partition(":")
            if key == "MemAvailable":
                return int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return sys.maxsize


def _control_groups(root: Path) -> list[int]:
    """What is left in every memory control group that this process is in."""
    left = []
    paths = _own_paths(root)
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2" and "" in paths:
            version, path = 2, paths[""]
        elif kind[0] == "cgroup" and "memory" in kind[2].split(",") and "memory" in paths:
            version, path = 1, paths["memory"]
        else:
            continue
        mount_root, mount_point = fields[3], root / fields[4].lstrip("/")
        # In a container the path may be the host's; the mount then shows a part of the tree, from mount_root on.
        inside = (
            path[len(mount_root.rstrip("/")) :]
            if (path + "/").startswith(mount_root.rstrip("/") + "/")
            else ""
        )
        group = mount_point / inside.lstrip("/")
        while True:
            rest = _left_in_group(group, version)
            if rest is not None:
                left.append(rest)
            if group == mount_point:
                break
            group = group.parent
    return left


def _own_paths(root: Path) -> dict[str, str]:
    """Path of this process by controller; version 2's is under the empty name."""
    paths = {}
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3 and ".." not in parts[2].split("/"):
            for controller in parts[1].split(","):
                paths[controller] = parts[2]
    return paths


def _left_in_group(group: Path, version: int) -> int | None:
    if version == 2:
        # memory.high counts too: past it the kernel only slows the process down, but to a crawl.
        limits = [_number(group / "memory.max"), _number(group / "memory.high")]
        usage = _number(group / "memory.current")
        keys = {"inactive_file", "active_file", "slab_reclaimable"}
    else:
        limits = [_number(group / "memory.limit_in_bytes")]
        usage = _number(group / "memory.usage_in_bytes")
        keys = {"total_inactive_file", "total_active_file"}
    bounds = [n for n in limits if n is not None and n < _UNLIMITED]
    if not bounds or usage is None:
        return None
    cache = 0
    try:
        for line in (group / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key in keys:
                cache += int(value)
    except (OSError, ValueError):
        cache = 0  # then all of the usage counts, which errs on the safe side
    return min(bounds) - max(0, usage - cache)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, unreadable, or "max"
        return None
