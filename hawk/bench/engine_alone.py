"""A transfer engine without HAWK: one process lends its memory, this one moves bytes out of it (or into it).

    python -m hawk.bench.engine_alone FD NBYTES WAY SETTINGS WRITE

The process registers the shared buffer, or memory of its own where it is written to, prints one JSON line with what
the other side needs, works its engine while it is told to ("g" on standard input, "s" to stop), and ends with that.
"""

from __future__ import annotations

import contextlib
import json
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

    write    it moves bytes into the other process, not out of it
    """

    def __init__(
        self, source: SharedBuffer, target: U8, way: str, settings: Mapping[str, str], *, write: bool
    ) -> None:
        self._target, self._write = target, write
        arguments = [str(source.fd), str(source.nbytes), way, json.dumps(dict(settings)), str(int(write))]
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
        self._peer = self._engine.meet(bytes.fromhex(told["description"]))
        self._base = int(told["address"])

    def move(self, local: I64, remote: I64, nbytes: I64) -> None:
        """Moves rows between the target and the other process' memory, all handed over at once."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"g")
        self._process.stdin.flush()
        try:
            here = local + int(self._target.ctypes.data)
            handle = self._engine.post(self._peer, self._write, here, remote + self._base, nbytes)
            while not self._engine.poll(handle):
                pass
        finally:
            self._process.stdin.write(b"s")
            self._process.stdin.flush()

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
    fd, nbytes, way, settings, write = sys.argv[1:]
    with shared.map_fd(int(fd), int(nbytes), name="bench") as buffer:
        memory = np.zeros(int(nbytes), np.uint8) if write == "1" else buffer.array
        engine = open_engine(way, json.loads(settings))
        engine.register(int(memory.ctypes.data), memory.nbytes)
        told = {"description": engine.description.hex(), "address": int(memory.ctypes.data)}
        print(json.dumps(told), flush=True)
        wanted, ended = threading.Event(), threading.Event()

        def listen() -> None:
            while word := sys.stdin.buffer.read(1):
                (wanted.set if word == b"g" else wanted.clear)()
            ended.set()
            wanted.set()

        threading.Thread(target=listen, daemon=True).start()
        while not ended.is_set():
            wanted.wait()
            engine.notices()
        engine.close()


if __name__ == "__main__":
    main()
