"""A fetch makes do with the staging that there is room for."""

from __future__ import annotations

from typing import Any

import pytest

from hawk.errors import OutOfMemory
from hawk.jobs.receive import DEPTH
from tests.unit.jobs.rig import Rig, rig


def room_for(made: Rig, slots: int) -> list[tuple[str, bool]]:
    """From now on the memory has room for so many slots; answers with who asks, and whether it stays."""
    asked: list[tuple[str, bool]] = []
    real = made.npu.allocate

    def allocate(nbytes: int, owner: str, *, brief: bool = False, **options: Any) -> Any:
        asked.append((owner, brief))
        if len(asked) > slots:
            raise OutOfMemory("no free piece is large enough", field="npu0/channel0", asked=nbytes)
        return real(nbytes, owner, brief=brief, **options)

    made.npu.allocate = allocate  # type: ignore[method-assign]
    return asked


@pytest.mark.parametrize("slots", range(1, DEPTH + 1))
async def test_chunks_take_turns_where_one_slot_fits(slots: int) -> None:
    async with rig(mode="staged") as made:
        free = made.npu.free_bytes()
        asked = room_for(made, slots)
        job = made.fetch(made.offer().claim)
        await job.run()
        made.check_bytes()
        assert job.result.mode == "staged"
        assert asked == [(f"{job.request.job}/staging", True)] * DEPTH
        await made.serving.idle()
        assert made.npu.free_bytes() == free


async def test_none_fits_and_staged_is_wanted() -> None:
    async with rig(mode="staged") as made:
        free = made.npu.free_bytes()
        room_for(made, 0)
        with pytest.raises(OutOfMemory):
            await made.fetch(made.offer().claim).run()
        assert made.npu.free_bytes() == free
