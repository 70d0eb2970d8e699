"""Caches that a memory cannot hold: what the user is told names what the user said."""

from __future__ import annotations

import pytest

from hawk.agent.sessions import Session, allocate_cache
from hawk.cache import CacheSpec
from hawk.errors import LayoutError, OutOfMemory
from hawk.memory.npu import EmulatedNpu

SPEC = CacheSpec(layers=2, heads=2, dim=64, block_size=32, blocks=8, layout="tenstorrent/kv")


def test_what_a_memory_cannot_hold_is_told_in_the_users_words() -> None:
    memory = EmulatedNpu("npu0", capacity=1 << 20, channels=8)
    session = Session(b"s" * 16, None)  # type: ignore[arg-type]
    try:
        with pytest.raises(LayoutError, match="vllm/nhd lies in one channel") as refused:
            allocate_cache(session, SPEC.replace(layout="vllm/nhd").descr(), memory)
        assert (refused.value.field, refused.value.got) == ("memory", "npu0, 8 channels")
        with pytest.raises(OutOfMemory, match=r"has 128 KiB: see \[memory\.npu0\] capacity"):
            allocate_cache(session, SPEC.replace(blocks=1024).descr(), memory)
        allocate_cache(session, SPEC.descr(), memory).on_close()
    finally:
        memory.close()
