"""What a fetch into a cache leaves behind: no reference to that, without the help of a garbage collection."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hawk.errors import Aborted, HawkError, PeerLost, TransferFailed
from hawk.jobs.states import forget_frames
from hawk.jobs.verify import Verifier
from tests.unit.jobs.clock import without_threads
from tests.unit.jobs.rig import Rig, rig


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Reads:
    """Reads that wait to be told how they end."""

    def __init__(self, made: Rig) -> None:
        self.begun = asyncio.Event()
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.fault: str | None = None
        self.at_cancel = False
        made.transport.hold = self.hold

    async def hold(self) -> None:
        self.begun.set()
        try:
            await asyncio.shield(self.end)
            if self.fault is not None:
                raise TransferFailed(self.fault)
        except asyncio.CancelledError:
            if self.at_cancel:
                raise TransferFailed("stopped") from None
            raise

    def fail(self) -> None:
        """Every read fails, each with an error of its own."""
        self.fault = "broken"
        self.end.set_result(None)


async def bring(made: Rig, ending: str) -> str:
    """One fetch to its ending, as an agent runs it; returns how it ended."""
    reads = Reads(made)
    job = made.fetch(made.offer().claim, timeout=0.05 if ending == "late" else 20.0)
    task = asyncio.get_running_loop().create_task(job.run())
    begun = asyncio.get_running_loop().create_task(reads.begun.wait())
    await asyncio.wait({task, begun}, return_when=asyncio.FIRST_COMPLETED)
    begun.cancel()  # where the deadline came before
    match ending:
        case "ready":
            reads.end.set_result(None)
        case "aborted":
            job.stop(Aborted("enough"))
        case "aborted, the read breaks":
            reads.at_cancel = True
            job.stop(Aborted("enough"))
        case "aborted, the read had broken":
            reads.fail()
            for _ in range(2):
                await asyncio.sleep(0)
            job.stop(Aborted("enough"))
        case "failed":
            reads.fail()
        case "cut off":
            made.peer.lose(PeerLost("gone"))
            reads.fail()
        case "cancelled":
            task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return "cancelled"
    except HawkError as error:
        forget_frames(error)
        return error.code
    return "ready"


ENDINGS = {
    "ready": {"ready"},
    "aborted": {"aborted"},
    "aborted, the read breaks": {"aborted"},
    "aborted, the read had broken": {"aborted", "transfer-failed"},
    "failed": {"transfer-failed"},
    "cut off": {"peer-lost", "transfer-failed"},
    "late": {"deadline-exceeded"},
    "cancelled": {"cancelled"},
}


@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_an_ended_fetch_refers_to_its_cache_no_more(ending: str, checked: bool, mode: str) -> None:
    async with rig(mode=mode) as made:
        without_threads(made)  # a thread keeps what it has done for another moment
        verifier = Verifier("full" if checked else "off")
        made.context = replace(made.context, verifier=verifier)
        kept, made.target = made.target, replace(made.target)
        entry: weakref.ref[Any] = weakref.ref(made.target)
        assert await bring(made, ending) in ENDINGS[ending]
        made.target = kept
        await made.serving.idle()
        verifier.close()
        # What was cancelled has ended, and goes in the turn of the loop in which it is told so.
        for _ in range(3):
            await asyncio.sleep(0)
        assert entry() is None, gc.get_referrers(entry())
