"""An engine of `hawk.bench.ttft` as a process that is asked, stopped, and let go on."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hawk
from hawk.errors import InternalError

if TYPE_CHECKING:
    from types import TracebackType

ROOT = Path(hawk.__file__).resolve().parents[1]

START = 600.0
"""Seconds that an engine may take to start."""

ANSWER = 120.0
"""Seconds that a request may take."""


def surroundings(folder: Path, processors: frozenset[int]) -> dict[str, str]:
    """An engine's environment: files in `folder`, threads that compute on `processors`, nothing asked of the net."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TMPDIR": str(folder),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(processors))),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }


@dataclass
class Process:
    """An engine in a process group of its own."""

    name: str
    python: Path
    folder: Path
    spec: dict[str, Any]
    processors: frozenset[int]
    environment: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Process:
        file = self.folder / f"{self.name}.json"
        file.write_text(json.dumps(self.spec))
        environment = {**surroundings(self.folder, self.processors), **self.environment}
        self.log = self.folder / f"{self.name}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [self.python, "-m", "hawk.bench.ttft_engine", file],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        self.go_on()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()

    def stop(self) -> None:
        """It takes no processor until `go_on`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """As before `stop`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)

    def send(self, key: str, prompt: Sequence[int], tokens: int, params: dict[str, Any] | None) -> None:
        """A question; `answer` waits for what it says."""
        assert self._process.stdin is not None
        question = {"key": key, "prompt": list(prompt), "tokens": tokens, "params": params}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def answer(self, limit: float = ANSWER) -> dict[str, Any]:
        """The next answer; raises `InternalError` with the end of its log where there is none."""
        assert self._process.stdout is not None
        # Lines come one a question, so that nothing is left in the stream's own buffer.
        came, _, _ = select.select([self._process.stdout], [], [], limit)
        line = self._process.stdout.readline() if came else ""
        otherwise = "the engine has ended" if came else f"no answer in {limit:.0f} s"
        answer: dict[str, Any] = json.loads(line) if line else {"error": otherwise}
        if "error" in answer:
            told = self.log.read_text(errors="replace")[-3000:]
            raise InternalError(answer["error"], engine=self.name, log=f"\n{told}")
        return answer
