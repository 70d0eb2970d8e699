"""The client for threads and synchronous hooks: the same calls, each waiting for its answer.

    with hawk.blocking.connect("ipc:///run/hawk/d0.sock") as hk:
        cache = hk.allocate(spec, memory="npu0")
        ready = hk.fetch(ticket, into=cache, blocks=[4, 7], timeout="5s")

One thread with an event loop of its own stands behind each client; its methods may be called from any other
thread, several at a time.  `submit` starts a fetch without waiting for it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent import futures
from typing import TYPE_CHECKING, Any, TypeVar

from hawk import client as _client
from hawk.arguments import ticket_texts
from hawk.cache_gpu import set_mark
from hawk.errors import DeadlineExceeded, WrongContext

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from concurrent.futures import Future
    from types import TracebackType

    from hawk.cache import CacheSpec, KVCache
    from hawk.control.messages import Status
    from hawk.handles import Cache, DeviceCache, Fetch, OfferHandle, Ready

T = TypeVar("T")


class Offer:
    """An open offer; `str(offer)` is its ticket."""

    def __init__(self, owner: Client, handle: OfferHandle) -> None:
        self._owner = owner
        self._handle = handle
        self.request = handle.request
        self.ticket = handle.ticket

    def __str__(self) -> str:
        return self.ticket

    def __repr__(self) -> str:
        """Without the ticket: who reads one in a log could fetch."""
        return f"<{type(self).__name__} {self.request!r} of {self._owner.name}>"

    def layers_ready(self, layers: int, *, after: object = None) -> None:
        """Layers `[0, layers)` are written; `after` as for `hawk.handles.OfferHandle`, seen from this thread."""
        self._owner.wait(self._handle.layers_ready(layers, after=self._handle.mark(after)))

    def ended(self, timeout: float | None = None) -> str:
        """Waits until the offer has ended: `"consumed"`, `"expired"` or `"withdrawn"`."""
        return self._owner.wait(self._handle.ended(), timeout)

    def withdraw(self) -> None:
        """Ends the offer; returns when HAWK reads its blocks no more."""
        self._owner.wait(self._handle.withdraw())


class Job:
    """A fetch under way."""

    def __init__(self, owner: Client, fetch: Fetch, future: Future[Ready]) -> None:
        self._owner = owner
        self._fetch = fetch
        self._future = future

    def __repr__(self) -> str:
        state = "under way"
        if self._future.done():
            failed = self._future.cancelled() or self._future.exception() is not None
            state = "failed" if failed else "ready"
        return f"<{type(self).__name__} {self._fetch.job}: {state}>"

    def done(self) -> bool:
        """Whether it has ended, either way."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Ready:
        """Waits for the end; raises the error it ended with, or `DeadlineExceeded` after `timeout` seconds."""
        try:
            return self._future.result(timeout)
        except TimeoutError as error:
            if self._future.done():
                raise
            raise DeadlineExceeded(
                "the fetch has not ended yet", seconds=timeout, job=self._fetch.job
            ) from error

    def abort(self) -> None:
        """Ends it; returns when no byte of it can land any more."""
        self._owner.wait(self._fetch.abort())
        # The fetch has ended; its waiting coroutine tells the future in the loop's next turn.
        futures.wait([self._future])


class Client:
    """The blocking client; make it with `connect`, use it as a context manager."""

    def __init__(self, client: _client.Client) -> None:
        self._client = client
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hawk-client", daemon=True)
        self._closed = False
        self._thread.start()
        try:
            self.wait(client.open())
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The agent's name."""
        return self._client.name

    def wait(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Runs a coroutine of the client's on its loop; raises `DeadlineExceeded` after `timeout` seconds."""
        future = self._submit(coroutine)
        try:
            return future.result(timeout)
        except TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise DeadlineExceeded("no answer in time", seconds=timeout) from error
        except BaseException:
            future.cancel()
            raise

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        problem = None
        if os.getpid() != self._pid:
            problem = "the client belongs to the parent process; connect anew in the child"
        elif self._closed:
            problem = "the client is closed"
        elif threading.current_thread() is self._thread:
            problem = "the blocking client was called on its own event loop, which would wait for itself"
        if problem is not None:
            coroutine.close()
            raise WrongContext(problem, field="client")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Closes the connection and ends the thread.  Safe to call twice."""
        if self._closed or os.getpid() != self._pid:
            return
        try:
            self.wait(self._client.close())
        finally:
            self._stop()

    def _stop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def register(self, cache: KVCache) -> Cache:
        """See `hawk.Client.register`."""
        return self.wait(self._client.register(cache))

    def allocate(self, spec: CacheSpec, *, memory: str) -> DeviceCache:
        """See `hawk.Client.allocate`."""
        return self.wait(self._client.allocate(spec, memory=memory))

    def release(self, cache: Cache) -> None:
        """Gives a cache back; returns when HAWK touches none of its bytes any more."""
        self.wait(cache.release())

    def offer(self, request: str, cache: Cache, blocks: Any, **options: Any) -> Offer:
        """See `hawk.Client.offer`; on a GPU the current stream is this thread's."""
        if options.get("layers_ready") != 0 or options.get("after") is not None:
            options["after"] = set_mark(cache.local, options.get("after"))
        return Offer(self, self.wait(self._client.offer(request, cache, blocks, **options)))

    def fetch(self, ticket: str | Offer | Sequence[str | Offer] | None = None, **options: Any) -> Ready:
        """Fetches and waits until it is ready; see `hawk.Client.fetch` for the options."""
        job = self.submit(ticket, **options)
        try:
            return job.result()
        except BaseException:
            if not job.done():  # interrupted from the keyboard: nobody is left who could end it
                job.abort()
            raise

    def submit(self, ticket: str | Offer | Sequence[str | Offer] | None = None, **options: Any) -> Job:
        """Starts a fetch and returns at once with a `Job`."""

        async def start() -> Fetch:
            fetch = self._client.fetch(ticket_texts(ticket) or None, **options)
            await fetch.start()
            return fetch

        fetch = self.wait(start())
        return Job(self, fetch, self._submit(fetch.result()))

    def status(self) -> Status:
        """The agent's pools and counts."""
        return self.wait(self._client.status())


def connect(address: Any = None, *, timeout: float | str = "10s") -> Client:
    """A blocking client of the agent at `address`; see `hawk.connect`."""
    return Client(_client.connect(address, timeout=timeout))
