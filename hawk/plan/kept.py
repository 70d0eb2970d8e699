"""What planning keeps of shapes it has seen, and how to forget it: for benchmarks."""

from __future__ import annotations

from hawk.plan import bind, check, pattern, pieces, source, target, tensors, types, ways
from hawk.retile import build

_MODULES = (build, bind, check, pattern, pieces, source, target, tensors, types, ways)


def forget() -> None:
    """Empties every cache of the planner, so that the next plan is made as if its shape had never been seen."""
    for module in _MODULES:
        for found in vars(module).values():
            clear = getattr(found, "cache_clear", None)
            if clear is not None:
                clear()
