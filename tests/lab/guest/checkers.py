"""What a guest's kernel checks of itself: Debian's nothing; HAWK_LAB_KERNEL names one that does (docs/lab.md)."""

from __future__ import annotations

import re
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
    """Asserts that kmemleak, where it is there, finds nothing that a module lost, now or in a load that is over.

    A search takes a minute, and what is lost stands only if two find it: once in a suite, at its end.
    """
    if not KMEMLEAK.exists():
        return
    for _ in range(2):
        KMEMLEAK.write_text("scan")
        time.sleep(UNSUSPECTED)
    # Who allocated it; code that was unloaded since has no name any more.
    ours = re.compile(rf"\[{module}\]|\] 0x[0-9a-f]+$", re.MULTILINE)
    found = [lost for lost in KMEMLEAK.read_text().split("unreferenced object") if ours.search(lost)]
    assert not found, "\n".join(found)
