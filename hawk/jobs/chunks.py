"""How a job is cut into chunks, and which setting is told when it cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hawk.errors import OutOfMemory
from hawk.plan.target import split

if TYPE_CHECKING:
    from hawk.layouts import CompiledLayout
    from hawk.plan.types import Chunk, Selection


def cut(target: CompiledLayout, selection: Selection, limit: int, setting: str) -> tuple[Chunk, ...]:
    """`split`, whose refusal names the `setting` that `limit` comes from instead of an argument."""
    try:
        return split(target, selection, max_bytes=limit)
    except OutOfMemory as fault:
        raise OutOfMemory(
            "one block of one layer does not fit into a chunk",
            field=setting,
            got=f"{limit} bytes",
            expected=fault.expected,
            hint="Raise it on the agent that names it here",
        ) from fault
