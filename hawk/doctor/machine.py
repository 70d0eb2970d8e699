"""Where the doctor reads: the files of a machine, and the limits of this process."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import resource
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

CAP_IPC_LOCK = 14
"""The number of the capability whose owners may lock any amount of memory (capabilities(7))."""


@dataclass(frozen=True)
class Machine:
    """A machine as its files show it.

    root      what stands for `/`; tests put a tree of their own there
    limit     the soft and the hard limit of a resource, as `resource.getrlimit` tells them
    """

    root: Path = Path("/")
    limit: Callable[[int], tuple[int, int]] = field(default=resource.getrlimit)

    def path(self, name: str) -> Path:
        """A file by its absolute name."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """What a file says, without white space around it; empty where it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, folder: str) -> list[str]:
        """What lies in a folder, in the order in which people count; empty where there is none."""
        with contextlib.suppress(OSError):
            return sorted(os.listdir(self.path(folder)), key=_counted)
        return []

    def exists(self, name: str) -> bool:
        """Whether there is such a file, as far as this user may look."""
        with contextlib.suppress(OSError):
            return self.path(name).exists()
        return False

    @property
    def release(self) -> str:
        """The kernel's version, such as `6.1.0-40-amd64`."""
        return self.read("/proc/sys/kernel/osrelease")

    @property
    def release_numbers(self) -> tuple[int, int]:
        """Its first two numbers; (0, 0) where they cannot be read."""
        match = re.match(r"(\d+)\.(\d+)", self.release)
        return (int(match[1]), int(match[2])) if match else (0, 0)

    def loaded(self, module: str) -> bool:
        """Whether a kernel module is there, loaded or built in with parameters."""
        if self.exists(f"/sys/module/{module}"):
            return True
        return any(line.split(" ", 1)[0] == module for line in self.read("/proc/modules").splitlines())

    def configured(self, option: str) -> bool | None:
        """Whether the kernel was built with CONFIG_`option`; None where it does not say how it was built."""
        text = ""
        with contextlib.suppress(OSError, EOFError, zlib.error):
            text = gzip.decompress(self.path("/proc/config.gz").read_bytes()).decode(errors="replace")
        text = text or self.read(f"/boot/config-{self.release}")
        if not text:
            return None
        return re.search(rf"^CONFIG_{option}=[ym]$", text, re.MULTILINE) is not None

    def capable(self, capability: int) -> bool:
        """Whether this process has a capability in effect."""
        match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", self.read("/proc/self/status"), re.MULTILINE)
        return bool(match and int(match[1], 16) >> capability & 1)


def _counted(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]
