"""Threads that work for an event loop: how they tell it something, and how it waits for them to end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING

from hawk.endings import outlast

if TYPE_CHECKING:
    from collections.abc import Callable


class Latch:
    """A future of the running loop that any thread may set, once or often."""

    __slots__ = ("_loop", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def set(self) -> None:
        """Sets the future; without effect when its loop has been closed, since nobody waits any more."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._resolve)

    def _resolve(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


def shut(sock: socket.socket) -> None:
    """Makes whatever another thread waits for on `sock` return.

    By the plain socket's method also where the socket speaks TLS: its own would take the decryption away from the
    thread that is reading, which would then pass on what comes as it is.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Wake:
    """What ends another thread's wait in a selector: a descriptor, open between `open` and `close`, -1 otherwise."""

    __slots__ = ("_lock", "fd")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fd = -1

    def open(self) -> None:
        """Raises `OSError` where there is no descriptor to be had."""
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ring(self) -> None:
        """From any thread; without effect where it is closed, since its number may be another's by then."""
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Once nobody waits for it any more.  Safe to call twice."""
        with self._lock:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Crew:
    """Daemon threads that one owner started and can wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._latches: list[Latch] = []

    def __len__(self) -> int:
        with self._lock:
            return len(self._threads)

    def start(self, name: str, target: Callable[[], None]) -> None:
        """Starts a thread; raises `RuntimeError` when the system gives no more of them."""
        thread = threading.Thread(target=self._run, args=(target,), name=name, daemon=True)
        with self._lock:
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._leave(thread)
            raise

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        finally:
            self._leave(threading.current_thread())

    def _leave(self, thread: threading.Thread) -> None:
        with self._lock:
            self._threads.discard(thread)
            latches = self._latches if not self._threads else []
            if latches:
                self._latches = []
        for latch in latches:
            latch.set()

    async def join(self) -> None:
        """Returns when no thread is left.  The caller has made them leave whatever they wait in."""
        with self._lock:
            leaving = list(self._threads)
            if not leaving:
                return
            latch = Latch()
            self._latches.append(latch)
        await outlast(latch.future)
        for thread in leaving:
            thread.join()
