"""What planning keeps of shapes it has seen, and how to forget it: for benchmarks."""

from __future__ import annotations

from hawk.plan import pattern, pieces, source, target, tensors, types, ways
from hawk.retile import build


def forget() -> None:
    """Empties every cache of the planner, so that the next plan is made as if its shape had never been seen."""
    for kept in (
        build.build_programs,
        pattern.fixed_terms,
        pattern.leads,
        pattern.pattern,
        pieces._dealt,
        pieces._template,
        pieces.bound,
        source._lines,
        target._frame,
        target.plane_runs,
        tensors.riding,
        types._buffers,
        ways.rows_layout,
        ways.through_rows,
        ways.ways,
    ):
        kept.cache_clear()
