"""What a guest's kernel checks of itself: Debian's nothing; HAWK_LAB_KERNEL names one that does (docs/lab.md)."""

from __future__ import annotations

import time
from pathlib import Path

KMEMLEAK = Path("/sys/kernel/debug/kmemleak")
UNSUSPECTED = 6.0
"""Seconds for which kmemleak suspects nothing of what was allocated."""


def _has(symbol: str) -> bool:
    return any(line.split()[2] == symbol for line in Path("/proc/kallsyms").read_text().splitlines())


def present() -> dict[str, bool]:
    """Which checkers the kernel has, of those that its console tells of (`vmlab.guest.COMPLAINT`) or that are asked."""
    return {
        "lockdep": Path("/proc/lockdep").exists(),
        "KASAN": _has("kasan_report"),
        "kmemleak": KMEMLEAK.exists(),
        "DMA API debugging": Path("/sys/kernel/debug/dma-api").exists(),
    }


def assert_unleaked(module: str) -> None:
    """Asserts that kmemleak, where it is there, finds nothing that a loaded module has lost."""
    if not KMEMLEAK.exists():
        return
    for _ in range(2):
        KMEMLEAK.write_text("scan")
        time.sleep(UNSUSPECTED)
    found = [lost for lost in KMEMLEAK.read_text().split("unreferenced object") if f"[{module}]" in lost]
    assert not found, "\n".join(found)
