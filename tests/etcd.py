"""An etcd server of a test's own, on loopback: Debian's package `etcd-server` has it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

LIMIT = 30.0
"""Seconds that it may take to start, or to end."""

MISSING = shutil.which("etcd") is None
"""Whether it is not here, and tests of it are skipped."""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class EtcdServer:
    """One member, with what it has written in `folder`; it comes back at the same port with the same data.

    within, host, port   what its command line begins with, and where it listens; a free port if it is 0
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str] = (),
        scheme: str = "http",
        *,
        within: Sequence[str] = (),
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._folder = folder
        self._within, self._host = within, host
        self._arguments = arguments
        self._scheme = scheme
        self._port = port
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"{self._scheme}://{self._host}:{self._port}"

    def start(self) -> None:
        """Returns once it serves clients."""
        # Its gateway connects to the port that it was told, so 0 will not do; somebody may take the port before it.
        again = bool(self._port)
        for _ in range(1 if again else 5):
            self._port = self._port if again else _free_port()
            said = self._try()
            if not said:
                return
        raise AssertionError("etcd did not start:\n" + said)

    def _try(self) -> str:
        """Nothing once it serves clients; else what it said before it ended."""
        here = f"{self._scheme}://{self._host}:{self._port}"
        process = subprocess.Popen(
            [
                *(
                    *self._within,
                    "etcd",
                    "--data-dir",
                    self._folder / "data",
                    "--logger",
                    "zap",
                    "--log-outputs",
                    "stderr",
                ),
                *("--listen-client-urls", here, "--advertise-client-urls", here),
                *("--listen-peer-urls", "http://127.0.0.1:0", *self._arguments),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stderr is not None
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if '"serving client traffic' in line:
                break
        else:
            process.stderr.close()
            process.wait(LIMIT)
            return "".join(said[-20:]) or "nothing"
        self._process = process
        # What else it says goes unread; a pipe that is full would stop it.
        self._reader = threading.Thread(target=self._read_on, args=(process.stderr,))
        self._reader.start()
        return ""

    @staticmethod
    def _read_on(stderr: IO[str]) -> None:
        with stderr:
            for _ in stderr:
                pass

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """Ends it, at once; what it had said stays in its folder."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(LIMIT)
            self._reader.join()


@contextlib.contextmanager
def etcd(folder: Path, arguments: Sequence[str] = (), scheme: str = "http") -> Iterator[EtcdServer]:
    """A server that runs for as long as the block lasts."""
    server = EtcdServer(folder, arguments, scheme)
    server.start()
    try:
        yield server
    finally:
        server.stop()
