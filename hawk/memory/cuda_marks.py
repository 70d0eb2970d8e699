"""Marks: places in a GPU's streams, set where a client says that layers are written and found again by its agent.

Both live in one process.  What travels between them is a random number, so that no message names an address; whoever
`claim`s a mark owns its event from then on.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hawk.errors import HawkMemoryError, InvalidArgument
from hawk.memory.cuda import CudaDevice, device
from hawk.memory.cuda_driver import CudaFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.memory.cuda_arrays import CudaArray
    from hawk.memory.cuda_driver import Driver

MOST_WAITING = 65_536
"""Marks that were set and not claimed; a client that never tells its agent of them must not fill the process."""

_lock = threading.Lock()
_waiting: dict[int, Mark] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """An event that is reached when what was on a stream has been done."""

    number: int
    device: CudaDevice
    event: int

    def close(self) -> None:
        """Gives the event back; what waits for it already goes on waiting."""
        close_all([self])


def close_all(marks: Sequence[Mark]) -> None:
    """Gives the events of marks on one device back: that is made current once, on a loop that others share."""
    if not marks or marks[0].device.lost is not None:
        return
    with contextlib.suppress(HawkMemoryError), marks[0].device.current() as driver:
        for each in marks:
            try:
                driver.drop_event(each.event)
            except CudaFault as fault:
                if fault.sticky:
                    raise


def mark(where: CudaArray, after: object = None) -> Mark:
    """Marks what is to be waited for, now: from this thread, whose current stream counts.

    after    a stream: all that is on it now.  An event: what that was recorded behind.  Torch's, CuPy's, or the
             number of a stream; None: the current stream of torch for its tensors, else the default stream

    Raises `InvalidArgument` for anything else, `DeviceLost`.
    """
    there = device(where.device)
    with there.current() as driver:
        event = driver.event()
        try:
            _record(driver, event, where, after)
        except BaseException:
            driver.drop_event(event)
            raise
    made = Mark(secrets.randbits(47) + 1, there, event)
    with _lock:
        if len(_waiting) >= MOST_WAITING:
            oldest = _waiting.pop(next(iter(_waiting)))
            oldest.close()
        _waiting[made.number] = made
    return made


def _record(driver: Driver, event: int, where: CudaArray, after: object) -> None:
    if after is None:
        driver.record(event, where.current_stream())
        return
    kind, handle = _handle(after)
    if kind == "stream":
        driver.record(event, handle)
        return
    # An event of the caller's may be gone before the agent looks: ours stands behind it from now on.
    # Streams of one priority share a few queues of the GPU, in which what waits holds up what stands behind it: of the
    # kernels' priority these waits would keep chunks from being made until the last of the layers is written.
    between = driver.stream(low=False, high=True)
    try:
        driver.wait(between, handle)
        driver.record(event, between)
    finally:
        driver.drop_stream(between)


def _handle(after: object) -> tuple[str, int]:
    """Whether it is a stream or an event, and the driver's number for it."""
    if isinstance(after, int) and not isinstance(after, bool) and after >= 0:
        return "stream", after
    for kind in ("stream", "event"):
        found = getattr(after, f"cuda_{kind}", None)
        if found is None and type(after).__name__.lower().endswith(kind):
            found = getattr(after, "ptr", None)
        if found is not None and (kind == "stream" or found):
            return kind, int(found)
    raise InvalidArgument(
        "nothing that a GPU can wait for",
        field="after",
        got=f"{type(after).__name__} {after}"[:120],
        expected="a stream, or an event that was recorded",
    )


def claim(number: int, *, field: str = "mark") -> Mark:
    """The mark of that number, which is the caller's from here on; raises `InvalidArgument` where there is none."""
    with _lock:
        found = _waiting.pop(number, None)
    if found is None:
        raise InvalidArgument(
            "no mark of this process",
            field=field,
            got=number,
            hint="Marks are set by clients in the agent's own process",
        )
    return found


def drop(made: Mark) -> None:
    """Gives a mark back that nobody claimed; one that was is left alone."""
    with _lock:
        mine = _waiting.pop(made.number, None)
    if mine is not None:
        mine.close()
