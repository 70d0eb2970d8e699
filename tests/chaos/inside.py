"""An agent with faults in it: `python -m tests.chaos.inside WEATHER SEED BREAK [hawk-agent's arguments]`.

The program is `hawk-agent` itself.  Before it starts, this module wraps the one function through which frames
leave (`Endpoint.send`), so that frames between agents are dropped, delayed and repeated below everything that has
to stand it and above the encryption; it slows threads that move bytes; and on request it breaks one promise, to
show that the chaos run sees that.  HAWK itself has no switch for any of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from hawk.control import channel, server
from hawk.control.messages import Release
from hawk.control.sockets import Endpoint
from hawk.errors import HawkError
from hawk.jobs.dialogue import Dialogue
from hawk.jobs.receive import Receiver
from hawk.jobs.states import Lease
from hawk.retile.cpu import Retiler
from hawk.transports.shm import ShmTransport
from hawk.transports.shm import _client as shm_reads
from hawk.transports.tcp import TcpTransport
from tests.chaos import weather
from tests.chaos.memory import HeldBackMemory
from tests.chaos.weather import Weather

_LAST_WORDS = (b"release", b"abort", b"ended")
_TAG = 24
"""Bytes of a body within which its tag stands."""


def _replace(owner: type[Any], name: str, by: Callable[..., Any]) -> None:
    """Puts a function in the place of a method."""
    setattr(owner, name, by)


class Faults:
    """Wraps what an agent does with the weather's chances."""

    def __init__(self, sky: Weather, dice: random.Random) -> None:
        self._sky = sky
        self._dice = dice
        self._pokes: WeakKeyDictionary[Endpoint, Callable[[], None]] = WeakKeyDictionary()

    def install(self) -> None:
        """From now on."""
        self._remember_loops()
        self._wrap_send()
        self._wrap_steps()
        self._wrap_retile()
        # All reads are small here.  Half of the agents ask before each, as for large ones, which can be slow.
        if self._dice.random() < 0.5:
            ask_before_reads()

    def _remember_loops(self) -> None:
        """Whoever sends on a socket has to poke its receive loop; a late frame is sent by nobody else."""
        for end in (channel.Channel, server.Server):
            made: Any = end.__init__

            def init(this: Any, endpoint: Endpoint, *args: Any, _made: Any = made, **kw: Any) -> None:
                _made(this, endpoint, *args, **kw)
                self._pokes[endpoint] = this._receive.poke

            _replace(end, "__init__", init)

    def _wrap_send(self) -> None:
        send, sky, dice = Endpoint.send, self._sky, self._dice

        def faulty(end: Endpoint, frames: Sequence[bytes], identity: bytes | None = None) -> None:
            if not end.address.startswith("tcp://"):
                send(end, frames, identity)
                return
            sky.frames += 1
            chance = sky.drop
            if any(word in frames[-1][:_TAG] for word in _LAST_WORDS):
                chance = max(chance, sky.last)
            if dice.random() < chance:
                sky.dropped += 1
                return
            if dice.random() < sky.repeat:
                sky.repeated += 1
                later(end, frames, identity, dice.uniform(0, sky.longest))
            if dice.random() < sky.delay:
                sky.delayed += 1
                later(end, frames, identity, dice.uniform(0, sky.longest))
                return
            send(end, frames, identity)

        def later(end: Endpoint, frames: Sequence[bytes], identity: bytes | None, seconds: float) -> None:
            kept = [bytes(frame) for frame in frames]

            def arrive() -> None:
                if end.raw.closed:
                    return
                with contextlib.suppress(HawkError):
                    send(end, kept, identity)
                poke = self._pokes.get(end)
                if poke is not None:
                    poke()

            asyncio.get_running_loop().call_later(seconds, arrive)

        _replace(Endpoint, "send", faulty)

    def _pause(self) -> float:
        if self._dice.random() >= self._sky.slow:
            return 0.0
        self._sky.slowed += 1
        return self._dice.uniform(0, self._sky.slowest)

    def _wrap_steps(self) -> None:
        for transport in (TcpTransport, ShmTransport):
            made: Any = transport.__init__

            def init(this: Any, *args: Any, _made: Any = made, **kw: Any) -> None:
                _made(this, *args, **kw)
                this.on_step = lambda done: time.sleep(self._pause())

            _replace(transport, "__init__", init)

    def _wrap_retile(self) -> None:
        run = Retiler.run_steps

        async def slow(this: Retiler, *args: Any, **kw: Any) -> None:
            await run(this, *args, **kw)
            await asyncio.sleep(self._pause())

        _replace(Retiler, "run_steps", slow)


def ask_before_reads() -> None:
    """No read over shm is small enough to be carried out at once."""
    shm_reads.MOST_BYTES = 0


# -- promises to break -----------------------------------------------------------------------------------


def break_flush() -> None:
    """*Ready* without a flush."""

    async def flush(this: HeldBackMemory, ranges: object) -> None:
        del this, ranges

    _replace(HeldBackMemory, "flush", flush)


def break_lease() -> None:
    """A lease that does not end: what a silent consumer holds is never taken back."""

    def renew(this: Lease, since: float | None = None) -> bool:
        del this, since
        return True

    _replace(Lease, "_check", lambda this: None)
    _replace(Lease, "renew", renew)


def break_abort() -> None:
    """Blocks go back at once when a fetch ends early, and not when its reads have ended."""

    async def stop(this: Receiver) -> None:
        if this._staging is not None:
            await this._staging.free(scrub=False)
            this._staging = None

    def pause(this: Faults) -> float:
        this._sky.slowed += 1
        return this._dice.uniform(0, 0.1)

    # A read that is over at once has nothing to interrupt, and most are by now.
    ask_before_reads()
    _replace(Faults, "_pause", pause)
    _replace(Receiver, "stop", stop)


def break_release() -> None:
    """*Ready* as soon as Release is on its way, and not when it was answered."""

    async def release(this: Dialogue) -> None:
        this._asked_release = True
        this._send(Release(this.id))

    _replace(Dialogue, "release", release)


BREAKS: dict[str, Callable[[], None]] = {
    "flush": break_flush,
    "lease": break_lease,
    "abort": break_abort,
    "release": break_release,
}


def main() -> None:
    """Runs the agent."""
    path, seed, broken, *arguments = sys.argv[1:]
    Faults(weather.load(Path(path)), random.Random(seed)).install()
    if broken:
        BREAKS[broken]()
    from hawk.cli import agent_main

    agent_main(arguments)


if __name__ == "__main__":
    main()
