"""Completion queues of fake devices."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from hawk.transports.verbs._device import Completion, VerbsError

if TYPE_CHECKING:
    from collections.abc import Callable


class FakeCompletions:
    """See `Completions`.  `polled`, where a queue pair set it, is told of each completion that was taken."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._lock = threading.Lock()
        self._entries: deque[tuple[Completion, Callable[[int], None]]] = deque()
        self._armed = False
        self.overrun = False
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)

    def push(self, completion: Completion, polled: Callable[[int], None]) -> bool:
        """Adds one; False where there is no room, after which the queue is of no more use."""
        with self._lock:
            if len(self._entries) >= self._depth:
                self.overrun = True
            if self.overrun or self.fd < 0:
                return False
            self._entries.append((completion, polled))
            if self._armed:
                self._armed = False
                os.eventfd_write(self.fd, 1)
            return True

    def poll(self, most: int) -> list[Completion]:
        """See `Completions.poll`."""
        with self._lock:
            if self.overrun:
                raise VerbsError(errno.EOVERFLOW, "ibv_poll_cq")
            taken = [self._entries.popleft() for _ in range(min(most, len(self._entries)))]
        for completion, polled in taken:
            polled(completion.wr_id)
        return [completion for completion, _ in taken]

    def purge(self, polled: Callable[[int], None]) -> None:
        """Takes out what a queue pair that is destroyed has left here."""
        with self._lock:
            self._entries = deque(entry for entry in self._entries if entry[1] != polled)

    def arm(self) -> None:
        """See `Completions.arm`: what is already there gives no event."""
        with self._lock:
            self._armed = True

    def take_event(self) -> bool:
        """See `Completions.take_event`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
            return True
        return False

    def close(self) -> None:
        """See `Completions.close`."""
        with self._lock:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
