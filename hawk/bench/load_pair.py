"""Two of vLLM's HTTP servers with HAWK between them, and the proxy in front, for `hawk bench serving`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import msgspec

from hawk.bench.ttft_process import START, surroundings
from hawk.errors import HawkError, InternalError
from hawk.integrations import http
from hawk.integrations.http import Server
from hawk.integrations.proxy import Proxy

if TYPE_CHECKING:
    from hawk.bench.load_result import Setting

LIMIT = 300.0
"""Seconds that a request may take, however long the line is."""

_LOOK = 0.01
_PATIENCE = 10.0

_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Has vLLM compute in the process that schedules.

Where a worker is a process of its own, both ask a shared page for each other's word without a pause, an idle worker for
a second after each word.  Where processors are few, that is taken from whatever else is at work.
"""


@dataclass
class Spoken:
    """What a client got of a stream: when its first word was sent, and when each token came, on the loop's clock."""

    sent: float
    times: list[float] = field(default_factory=list)


class Pair(Protocol):
    """What the benchmark asks of a pair: streams by three ways, and what the engines have counted."""

    async def stream(self, way: str, prompt: Sequence[int], tokens: int, spoken: Spoken) -> None:
        """Asks `proxy`, `prefill` or `decode` for so many tokens; `spoken` fills as they come.

        Raises `HawkError` where the answer is an error or has another number of tokens.
        """

    async def counts(self, side: str, names: Sequence[str]) -> dict[str, float]:
        """Sums of vLLM's metrics of `prefill` or `decode`, by name without `vllm:`."""


async def settled(pair: Pair, side: str, count: str, least: float) -> None:
    """Returns when a counter has come so far: an engine counts a request a moment after its last token."""
    try:
        async with asyncio.timeout(_PATIENCE):
            while (await pair.counts(side, [count]))[count] < least:
                await asyncio.sleep(_LOOK)
    except TimeoutError:
        raise InternalError("the engine has not counted a request", field=count, engine=side) from None


class Servers:
    """The servers by name (`proxy`, `prefill`, `decode`), asked over HTTP; `logs` are files of those that write one."""

    def __init__(self, where: dict[str, Server], model: str, logs: Mapping[str, Path] | None = None) -> None:
        self._where, self._model, self.logs = where, model, logs or {}

    def told(self) -> dict[str, str]:
        """The end of each log."""
        return {side: _end(log) for side, log in self.logs.items()}

    async def stream(self, way: str, prompt: Sequence[int], tokens: int, spoken: Spoken) -> None:
        """See `Pair.stream`."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        kind = {"content-type": "application/json"}
        sent = http.request("POST", "/v1/completions", way, kind, json.dumps(body).encode())
        clock = asyncio.get_running_loop().time
        spoken.sent = clock()
        try:
            async with asyncio.timeout(LIMIT), http.asked(self._where[way], sent) as (head, reader):
                rest = b""
                async for piece in http.pieces(reader, head, answer=True):
                    now = clock()
                    *lines, rest = (rest + piece).split(b"\n")
                    if head.status == 200:
                        spoken.times += [now] * sum(map(_tokens, lines))
                if head.status != 200:
                    raise InternalError("a server answers with an error", server=way, got=head.status)
        except TimeoutError:
            raise InternalError("a request did not end", server=way, seconds=LIMIT) from None
        except (OSError, asyncio.IncompleteReadError) as fault:
            raise InternalError("the connection broke", server=way, reason=str(fault)) from fault
        if len(spoken.times) != tokens:
            raise InternalError(
                "another number of tokens", server=way, got=len(spoken.times), expected=str(tokens)
            )

    async def counts(self, side: str, names: Sequence[str]) -> dict[str, float]:
        """See `Pair.counts`."""
        sent = http.request("GET", "/metrics", side, {}, b"")
        async with asyncio.timeout(LIMIT), http.asked(self._where[side], sent) as (head, reader):
            text = (await http.read_body(reader, head, answer=True)).decode()
        found = dict.fromkeys(names, 0.0)
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removeprefix("vllm:")
            if name in found:
                found[name] += float(value)
        return found


def _tokens(line: bytes) -> int:
    """How many tokens a line of a stream of events brings; raises `InternalError` for an error in it, or no event."""
    if not line.startswith(b"data: ") or line[6:].strip() == b"[DONE]":
        return 0
    try:
        event: dict[str, Any] = json.loads(line[6:])
        if "error" not in event:
            return sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))
        reason = str(event["error"])
    except (ValueError, TypeError, AttributeError, RecursionError) as fault:
        raise InternalError("what an engine streams is no event", got=repr(line[:100])) from fault
    raise InternalError("an engine has failed", reason=reason[:500])


@contextlib.asynccontextmanager
async def started(
    python: Path, setting: Setting, processors: Sequence[frozenset[int]], longest: int
) -> AsyncIterator[Servers]:
    """Both engines and the proxy, until the block is left; requests have `longest` tokens at most.

    Each request is prefilled and then decoded: with both at once the engine that decodes waits in a loop, which takes
    processors from a prefill on the same machine.  Raises `InternalError` with the end of an engine's log.
    """
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="hawk-load-", dir=memory) as name:
        folder = Path(name)
        (folder / "shape.json").write_bytes(msgspec.json.encode(setting.shape))
        model = folder / "model"
        made = await asyncio.create_subprocess_exec(
            *(python, "-m", "hawk.bench.ttft_engine", "--model", model, folder / "shape.json"),
            env=surroundings(folder, processors[0]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        _, told = await made.communicate()
        if made.returncode:
            raise InternalError("no model was made", reason=told.decode(errors="replace")[-2000:])
        async with contextlib.AsyncExitStack() as stack:
            where = {}
            engines = []
            for side, mine in zip(("prefill", "decode"), processors, strict=True):
                engine = _Engine(python, folder, side, _options(setting, model, longest), mine)
                stack.callback(engine.close)
                engines.append(engine)
                where[side] = engine.server
            for engine in engines:
                stack.callback(engine.end)
            for engine in engines:
                await engine.ready()
            proxy = Proxy([where["prefill"]], [where["decode"]], early=False)
            stack.push_async_callback(proxy.close)
            where["proxy"] = Server("127.0.0.1", await proxy.start("127.0.0.1", 0))
            servers = Servers(where, str(model), {engine.side: engine.log for engine in engines})
            try:
                yield servers
            except HawkError as fault:
                logs = "".join(f"\nlog of {side}:\n{text}" for side, text in servers.told().items())
                raise InternalError(f"{fault}{logs}") from fault


def _options(setting: Setting, model: Path, longest: int) -> dict[str, str]:
    return {
        "--model": str(model),
        "--dtype": setting.dtype,
        "--block-size": str(setting.block),
        "--max-model-len": str(longest),
        "--max-num-batched-tokens": str(setting.budget),
        "--max-num-seqs": str(setting.batch),
    }


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


@contextlib.contextmanager
def _only(processors: frozenset[int]) -> Iterator[None]:
    """What is started inside may use these processors alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class _Engine:
    """One server, in a process group of its own."""

    def __init__(
        self, python: Path, folder: Path, side: str, options: dict[str, str], processors: frozenset[int]
    ) -> None:
        self.side = side
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.server = Server("127.0.0.1", probe.getsockname()[1])
        self.log = folder / f"{side}.log"
        transfer = {
            "kv_connector": "HawkConnector",
            "kv_connector_module_path": "hawk.integrations.vllm",
            "kv_role": "kv_producer" if side == "prefill" else "kv_consumer",
            "engine_id": f"load-{side[0]}",
            "kv_connector_extra_config": {"hawk": {"agent": {"local": f"ipc://{folder}/any.sock"}}},
        }
        options = {
            **options,
            "--host": self.server.host,
            "--port": str(self.server.port),
            "--kv-transfer-config": json.dumps(transfer),
        }
        flags = ["--enforce-eager", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
        log: IO[bytes]
        with self.log.open("wb") as log, _only(processors):
            self._process = subprocess.Popen(
                [str(python), "-m", "vllm.entrypoints.openai.api_server", *flags]
                + [word for pair in options.items() for word in pair],
                env={
                    **surroundings(folder, processors),
                    **_ONE_PROCESS,
                    "OMP_NUM_THREADS": str(len(processors)),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def ready(self) -> None:
        """Returns when it answers."""
        asks = http.request("GET", "/health", self.side, {}, b"")
        try:
            async with asyncio.timeout(START):
                while True:
                    with contextlib.suppress(HawkError):
                        async with http.asked(self.server, asks) as (head, _):
                            if head.status == 200:
                                return
                    if self._process.poll() is not None:
                        raise InternalError(
                            "the engine has ended", engine=self.side, log=f"\n{_end(self.log)}"
                        )
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise InternalError(
                "the engine did not start", engine=self.side, seconds=START, log=f"\n{_end(self.log)}"
            ) from None

    def end(self) -> None:
        """Tells it to."""
        self._process.terminate()

    def close(self) -> None:
        """After `end`: returns when it is over, in good order or else; the engine's core, a process of its own, too."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
