"""Agents as real processes, and what their counts and descriptors are.  Every wait here is for an event."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hawk.client import Client, connect
from hawk.control.keys import load_pair, new_pair

NAMES = ("p0", "p1", "p2", "p3", "d0", "d1", "d2", "d3", "mallory")
"""Agents that know each other's keys.  "mallory" is one of them who misbehaves."""

COMMAND = (sys.executable, "-c", "from hawk.cli import agent_main; agent_main()")
LIMIT = float(os.environ.get("HAWK_TEST_LIMIT", "30"))
"""Seconds that any one thing may take to happen; emulated machines set more."""


@dataclass(frozen=True)
class Counts:
    """What an agent holds: pools as (name, free, owned, quarantined), and how many of everything else."""

    pools: tuple[tuple[str, int, int, int], ...]
    offers: int
    serving: int
    fetching: int
    caches: int
    blocks_owned: int
    blocks_quarantined: int


class AgentProcess:
    """One `hawk-agent`; `control` is its address for peers, `local` the one for clients."""

    def __init__(self, name: str, local: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.local = local
        self.process = process
        self.log_file = log
        self.control = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def alive(self) -> bool:
        return self.process.poll() is None

    def descriptors(self) -> dict[str, str]:
        """What the process has open, by number."""
        found = {}
        for name in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found[name] = os.readlink(f"/proc/{self.pid}/fd/{name}")
        return found

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stopped(self) -> None:
        """Returns once a SIGSTOP has taken effect in every thread."""
        self.send(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        """Kills it and waits until it is gone."""
        self.process.kill()
        self.process.wait(LIMIT)

    async def ended(self) -> int:
        """Its exit status, once it has ended."""
        loop = asyncio.get_running_loop()
        return await asyncio.wait_for(loop.run_in_executor(None, self.process.wait), LIMIT)


class Site:
    """A folder with keys and configs, and the agents that were started from it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hawk-e2e-"))
        for name in NAMES:
            new_pair(self.folder, name)
        self.keys = {name: load_pair(self.folder / f"{name}.key") for name in NAMES}
        lines = [f'{name} = "{pair.public}"' for name, pair in self.keys.items()]
        (self.folder / "peers.toml").write_text("[peers]\n" + "\n".join(lines) + "\n")
        self.agents: list[AgentProcess] = []

    def write_config(self, name: str, tables: dict[str, dict[str, Any] | None], **agent: Any) -> Path:
        """A config file for `name`: secure, on loopback, and what `tables` (None drops one) and `agent` say."""
        merged: dict[str, dict[str, Any]] = {
            "agent": {
                "name": name,
                "local": f"ipc://{self.folder}/{name}.sock",
                "log_format": "json",
                **agent,
            },
            "security": {
                "key_file": str(self.folder / f"{name}.key"),
                "peers_file": str(self.folder / "peers.toml"),
            },
            "arena": {"size": "16MiB"},
            "staging": {"size": "4MiB"},
            "jobs": {"chunk": "64KiB"},
        }
        for table, values in tables.items():
            if values is None:
                merged.pop(table, None)
            else:
                merged[table] = {**merged.get(table, {}), **values}
        path = self.folder / f"{name}.toml"
        path.write_text("\n".join(_toml(table, values) for table, values in merged.items()))
        return path

    def start(
        self,
        name: str,
        tables: dict[str, dict[str, Any] | None] | None = None,
        *,
        ready: bool = True,
        command: Sequence[str] | None = None,
        **agent: Any,
    ) -> AgentProcess:
        """Starts an agent; returns once it answers (or at once, unless `ready`)."""
        config = self.write_config(name, tables or {}, **agent)
        log = self.folder / f"{name}.{len(self.agents)}.log"
        reading, writing = os.pipe()
        try:
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [*(command or COMMAND), "--config", str(config), "--ready-fd", str(writing)],
                    pass_fds=[writing],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            os.close(writing)
            made = AgentProcess(name, f"ipc://{self.folder}/{name}.sock", process, log)
            self.agents.append(made)
            if ready:
                # The line comes when it is up; end of file, when it died before.
                line = os.read(reading, 4096).decode()
                assert line, f"{name} did not start:\n{made.log()}"
                made.control = line.strip()
        finally:
            os.close(reading)
        return made

    def close(self) -> None:
        """Ends every agent and removes the folder."""
        for agent in self.agents:
            if agent.alive():
                agent.send(signal.SIGCONT)
                agent.send(signal.SIGTERM)
        for agent in self.agents:
            try:
                agent.process.wait(5)
            except subprocess.TimeoutExpired:
                agent.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def npu(channels: int, capacity: str = "6MiB") -> dict[str, Any]:
    """The table of an emulated device."""
    return {"kind": "emulated-npu", "channels": channels, "capacity": capacity}


def _toml(table: str, values: dict[str, Any]) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(shown, value)) + "]"
        return f'"{value}"' if isinstance(value, str) else str(value)

    return f"[{table}]\n" + "".join(f"{key} = {shown(value)}\n" for key, value in values.items())


@contextlib.asynccontextmanager
async def clients(*agents: AgentProcess) -> AsyncIterator[list[Client]]:
    """One client of each agent."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(connect(agent.local)) for agent in agents]


async def counts(client: Client) -> Counts:
    """What the client's agent holds now."""
    status = await client.status()
    return Counts(
        tuple((p.name, p.free, p.owned, p.quarantined) for p in status.pools),
        status.offers,
        status.serving,
        status.fetching,
        status.caches,
        status.blocks_owned,
        status.blocks_quarantined,
    )


T = TypeVar("T")


async def becomes(
    ask: Callable[[], T | Awaitable[T]], good: Callable[[T], bool], what: str, limit: float = LIMIT
) -> T:
    """Asks until the answer is good, for what has no event: another process' files, counts, log."""
    end = time.monotonic() + limit
    while True:
        answer = ask()
        now: T = await answer if inspect.isawaitable(answer) else answer
        if good(now):
            return now
        assert time.monotonic() < end, f"never {what}; at the end: {now}"
        await asyncio.sleep(0.02)


async def until(client: Client, good: Callable[[Counts], bool], what: str, limit: float = LIMIT) -> Counts:
    """Asks the agent until its counts are as wanted.  It has no event for that, and needs none elsewhere."""
    return await becomes(lambda: counts(client), good, f"{what} at {client.name}", limit)


async def back_to(before: Counts, client: Client, limit: float = LIMIT) -> None:
    """Asserts that the agent comes back to what it held before."""
    await until(client, lambda now: now == before, f"again {before}", limit)


async def descriptors_back_to(
    before: dict[str, str], agent: AgentProcess, *, more: int = 0, limit: float = LIMIT
) -> None:
    """Asserts that the agent comes back to as many descriptors as before, or fewer; `more` are allowed to stay."""
    fewer = len(before) + more
    await becomes(
        agent.descriptors, lambda now: len(now) <= fewer, f"{fewer} descriptors at {agent.name}", limit
    )
