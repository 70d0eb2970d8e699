"""One direction of a control connection, where a test says what becomes of each frame."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from hawk.control.messages import Accepted, PeerMessage

Faults = dict[tuple[str, int], str]


def apart(message: PeerMessage) -> tuple[PeerMessage, ...]:
    """What is said in its place to who did not ask for both together."""
    if isinstance(message, Accepted) and message.prepared is not None:
        return msgspec.structs.replace(message, prepared=None), message.prepared
    return (message,)


class Wire:
    """One direction.  `faults` says for (kind of frame, how manieth of that kind) what happens to it.

    together    a frame that says what two can is left so; else it is taken apart, and each has its own fate
    """

    together = False

    def __init__(self, faults: Faults, seen: list[str]) -> None:
        self._faults = faults
        self._count: Counter[str] = Counter()
        self._seen = seen
        self._late: list[PeerMessage] = []
        self.deliver: Callable[[PeerMessage], None] = lambda message: None
        self.change: Callable[[PeerMessage], Iterable[PeerMessage]] = lambda message: (message,)

    def send(self, message: PeerMessage) -> None:
        for part in (message,) if self.together else apart(message):
            self._send(part)

    def _send(self, message: PeerMessage) -> None:
        for frame in self.change(message):
            kind = type(frame).__name__.lower()
            number = self._count[kind]
            self._count[kind] += 1
            fault = self._faults.get((kind, number))
            self._seen.append(f"{kind}{'' if fault is None else ' ' + fault}")
            late, self._late = self._late, []
            if fault == "late":
                self._late = [frame]
            elif fault != "drop":
                self._put(frame)
            if fault == "twice":
                self._put(frame)
            for delayed in late:
                self._put(delayed)

    def _put(self, frame: PeerMessage) -> None:
        asyncio.get_running_loop().call_soon(self.deliver, frame)
