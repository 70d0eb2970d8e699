"""A transfer engine without HAWK: one process lends its memory, this one moves bytes out of it, or has them written.

    python -m hawk.bench.engine_alone FD NBYTES WAY SETTINGS

The process registers the shared buffer, prints one JSON line with what the other side needs, and does what it is told
on standard input, with which it ends:

    g, s                          to work its engine, and to stop
    m, length u32, description    to meet who will have bytes written
    w, rows u32, rows             to write them: offset, target address and bytes, i64 each; `DONE` is the notice
"""

from __future__ import annotations

import contextlib
import json
import queue
import struct
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import InternalError
from hawk.memory import shared
from hawk.transports import registry
from hawk.transports._engine._transport import EngineTransport

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from hawk.memory.region import I64, U8
    from hawk.memory.shared import SharedBuffer
    from hawk.transports._engine._seam import Engine


DONE = b"done"
_LENGTH = struct.Struct("<I")
_LOOKS = 1024
"""Looks for a notice between two at whether the other process is still there."""


def open_engine(way: str, settings: Mapping[str, str]) -> Engine:
    """The engine of a transport that stands on one, called as in `hawk.bench.serving`."""
    name = way.partition("+")[0]
    made = registry.make(name, registry.configure(name, settings) if settings else None)
    assert isinstance(made, EngineTransport)
    return made.engine()


def stands_on_one(name: str) -> bool:
    """Whether a transport leaves the bytes to an engine that can be measured alone."""
    return issubclass(registry.transport_class(name), EngineTransport)


class Alone:
    """One way's engine, with its peer in a process of its own: `with Alone(...) as alone`.

    write    the other process WRITEs the bytes when it is asked to, and says so by a notice; else this one READs them
    """

    def __init__(
        self, source: SharedBuffer, target: U8, way: str, settings: Mapping[str, str], *, write: bool
    ) -> None:
        self._target, self._write = target, write
        arguments = [str(source.fd), str(source.nbytes), way, json.dumps(dict(settings))]
        self._stack = contextlib.ExitStack()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hawk.bench.engine_alone", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[source.fd],
        )
        try:
            self._meet(way, settings)
        except BaseException:
            self.close()
            raise

    def _meet(self, way: str, settings: Mapping[str, str]) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise InternalError("the engine's process did not start", got=f"status {self._process.wait()}")
        told = json.loads(line)
        self._engine = open_engine(way, settings)
        self._stack.callback(self._engine.close)
        self._engine.register(int(self._target.ctypes.data), self._target.nbytes)
        if self._write:
            ours = self._engine.description
            self._say(b"m" + _LENGTH.pack(len(ours)) + ours)
        else:
            self._peer = self._engine.meet(bytes.fromhex(told["description"]))
        self._base = int(told["address"])

    def _say(self, what: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(what)
        self._process.stdin.flush()

    def move(self, local: I64, remote: I64, nbytes: I64) -> None:
        """Moves rows out of the other process' memory into the target, all handed over at once."""
        here = local + int(self._target.ctypes.data)
        if self._write:
            rows = np.stack((remote, here, nbytes), axis=1).astype("<i8")
            self._say(b"w" + _LENGTH.pack(len(rows)) + rows.tobytes())
            self._wait()
            self._say(b"s")
            return
        self._say(b"g")
        try:
            handle = self._engine.post(self._peer, False, here, remote + self._base, nbytes)
            while not self._engine.poll(handle):
                pass
        finally:
            self._say(b"s")

    def _wait(self) -> None:
        looks = 0
        while DONE not in self._engine.notices():
            looks += 1
            if looks % _LOOKS == 0 and (status := self._process.poll()) is not None:
                raise InternalError("the engine's process has ended", got=f"status {status}")

    def close(self) -> None:
        """Ends the engine and the process."""
        self._stack.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def __enter__(self) -> Alone:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> None:
    """The other process."""
    fd, nbytes, way, settings = sys.argv[1:]
    with shared.map_fd(int(fd), int(nbytes), name="bench") as buffer:
        base = int(buffer.array.ctypes.data)
        engine = open_engine(way, json.loads(settings))
        engine.register(base, buffer.nbytes)
        print(json.dumps({"description": engine.description.hex(), "address": base}), flush=True)
        wanted, ended = threading.Event(), threading.Event()
        orders: queue.SimpleQueue[I64] = queue.SimpleQueue()
        met: list[bytes] = []

        def listen() -> None:
            said = sys.stdin.buffer
            while word := said.read(1):
                if word in (b"m", b"w"):
                    count = _LENGTH.unpack(said.read(_LENGTH.size))[0]
                    if word == b"m":
                        met.append(said.read(count))
                        continue
                    orders.put(np.frombuffer(said.read(24 * count), "<i8").reshape(count, 3))
                (wanted.clear if word == b"s" else wanted.set)()
            ended.set()
            wanted.set()

        threading.Thread(target=listen, daemon=True).start()
        peer: object = None
        while not ended.is_set():
            wanted.wait()
            while not orders.empty():
                rows = orders.get()
                peer = peer or engine.meet(met[0])
                handle = engine.post(peer, True, rows[:, 0] + base, rows[:, 1], rows[:, 2], DONE)
                while not engine.poll(handle):
                    pass
            engine.notices()
        engine.close()


if __name__ == "__main__":
    main()
