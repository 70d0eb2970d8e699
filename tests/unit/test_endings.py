"""How several ends are waited for."""

import asyncio

import pytest

from hawk.endings import all_ended, outlast


async def test_a_cancellation_waits_for_the_slowest() -> None:
    """One hears of it at once, the other ends what it has begun."""
    begun, go, ended = asyncio.Event(), asyncio.Event(), list[str]()

    async def quick() -> None:
        await asyncio.Event().wait()

    async def slow() -> None:
        begun.set()
        await outlast(asyncio.ensure_future(go.wait()))  # type: ignore[arg-type]
        ended.append("slow")

    waiting = asyncio.ensure_future(all_ended(quick(), slow()))
    await begun.wait()
    waiting.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_failure_waits_for_the_others_and_is_raised() -> None:
    go, ended = asyncio.Event(), list[str]()

    async def failing() -> None:
        raise OSError("the first")

    async def slow() -> None:
        await go.wait()
        ended.append("slow")

    waiting = asyncio.ensure_future(all_ended(failing(), slow()))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    go.set()
    with pytest.raises(OSError, match="the first"):
        await waiting
    assert ended == ["slow"]
