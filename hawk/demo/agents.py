"""A prefill and a decode agent as processes of their own, on loopback, with keys made for the occasion."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hawk.agent import Agent
from hawk.client import Client, connect
from hawk.config import load_config
from hawk.control.keys import load_peers, new_pair
from hawk.errors import HawkError, PeerUnreachable
from hawk.folders import TemporaryFolder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

PREFILL, DECODE, INSIDE, MEMORY = "prefill", "decode", "inside", "npu0"

_MAIN = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: however the parent ends, this process does, too
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("the parent is gone")
from hawk.cli import agent_main
agent_main()
"""

_LONGEST_FOLDER = 60
"""Characters: the path of a Unix socket, which has names of its own to add, ends at 107."""

_PATIENCE = 60.0
"""Seconds that an agent may take until it answers, besides what touching its memory takes."""

_TOUCHED_A_SECOND = 50 << 20
"""Bytes of fresh memory that the slowest machine fills in a second."""


class AgentFailed(HawkError):
    """An agent's process ended or never answered; `log` is what it wrote."""

    code = "agent-failed"

    def __init__(self, message: str, *, log: str) -> None:
        self.log = log
        super().__init__(message)


@dataclass(frozen=True)
class Settings:
    """Both agents' configuration, as far as it is not the default; sizes in bytes.

    capacity    of the emulated device on the decode side, all channels together
    jobs        further settings of `[jobs]`
    inside      a second decode agent lives in this process
    tables      further tables of both, in TOML
    embedded    the prefill agent lives in this process
    outside     the prefill agent is started by somebody else, from the file `Pair.config`
    prefill     address by which the decode agents reach the prefill agent, where it is not the agent's own
    """

    capacity: int
    channels: int
    alignment: int
    transports: tuple[str, ...] = ("shm", "tcp")
    mode: str = "auto"
    arena: int = 64 << 20
    chunk: int = 16 << 20
    jobs: Mapping[str, int] = field(default_factory=dict)
    inside: bool = False
    embedded: bool = False
    outside: bool = False
    tables: str = ""
    prefill: str = ""

    @property
    def arenas(self) -> int:
        """Bytes of both agents' arenas; the decode side sends nothing, its own is as small as it may be."""
        return self.arena + self.chunk


class _Process:
    """One agent's process and its log."""

    def __init__(self, name: str, folder: Path, config: str) -> None:
        self.name = name
        self.local = f"ipc://{folder}/{name}.sock"
        self._log = folder / f"{name}.log"
        file = folder / f"{name}.toml"
        file.write_text(config)
        # Settings of the user's own agents are not meant for these two; what they leave behind goes with the folder.
        environment = {k: v for k, v in os.environ.items() if not (k.startswith("HAWK_") and "__" in k)}
        environment["TMPDIR"] = str(folder)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(os.getpid()), "--config", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the parent, which ends its agents in order
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def failed(self, message: str) -> AgentFailed:
        return AgentFailed(message, log=self._log.read_text(errors="replace"))

    async def client(self, timeout: float) -> Client:
        """A connection to it, once it answers."""
        deadline = asyncio.get_running_loop().time() + timeout
        while True:
            status = self._process.poll()
            if status is not None:
                raise self.failed(f"the {self.name} agent ended with status {status} before it answered")
            client = connect(self.local)
            try:
                await client.open()
                return client
            except PeerUnreachable:
                if asyncio.get_running_loop().time() > deadline:
                    raise self.failed(f"the {self.name} agent did not answer in {timeout:.0f} s") from None
                await asyncio.sleep(0.02)

    def end(self) -> None:
        """Asks it to end, insists after ten seconds."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class Pair:
    """Both agents, and a client of each: `async with Pair(settings) as pair`.

    prefill, decode    the clients
    pids               of the prefill and of the decode agent
    agent, inside      the agent in this process and its client, where the settings want one
    config             the prefill agent's file, where somebody else is to start it

    Leaving the block ends both processes and removes their files.  Raises `AgentFailed`.
    """

    prefill: Client
    decode: Client
    agent: Agent
    inside: Client
    config: Path

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._processes: list[_Process] = []
        self._stack = contextlib.AsyncExitStack()

    @property
    def pids(self) -> list[int]:
        """Process numbers, prefill first."""
        return [process.pid for process in self._processes]

    async def __aenter__(self) -> Pair:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _start(self) -> None:
        folder = self._stack.enter_context(_folder()).path
        self._stack.callback(self._end)
        for name in (PREFILL, DECODE, INSIDE):
            new_pair(folder, name)
        configs = configuration(folder, self.settings)
        started = (DECODE,) if self.settings.embedded or self.settings.outside else (PREFILL, DECODE)
        for name in started:
            self._processes.append(_Process(name, folder, configs[name]))
        memory = self.settings.capacity + self.settings.arenas
        timeout = _PATIENCE + memory / _TOUCHED_A_SECOND
        clients = []
        for process in self._processes:
            client = await process.client(timeout)
            self._stack.push_async_callback(client.close)
            clients.append(client)
        self.decode = clients[-1]
        if self.settings.embedded:
            self.prefill = await self._embedded(PREFILL, folder, configs)
        elif self.settings.outside:
            self.config = folder / f"{PREFILL}.toml"
            self.config.write_text(configs[PREFILL])
        else:
            self.prefill = clients[0]
        if self.settings.inside:
            self.inside = await self._embedded(INSIDE, folder, configs)

    async def _embedded(self, name: str, folder: Path, configs: Mapping[str, str]) -> Client:
        """A client of an agent in this process."""
        file = folder / f"{name}.toml"
        file.write_text(configs[name])
        config, _ = load_config(file, env={})
        self.agent = await self._stack.enter_async_context(Agent(config))
        return await self._stack.enter_async_context(connect(self.agent))

    def _end(self) -> None:
        for process in self._processes:
            process.end()

    async def _stop(self) -> None:
        """Carried through although the caller is being cancelled."""
        task = asyncio.get_running_loop().create_task(self._stack.aclose())
        cancelled = False
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                cancelled = True
        task.result()
        if cancelled:
            raise asyncio.CancelledError


def _folder() -> TemporaryFolder:
    made = TemporaryFolder("hawk-demo-")
    if len(str(made.path)) <= _LONGEST_FOLDER:
        return made
    made.close()
    return TemporaryFolder("hawk-demo-", "/tmp")


def configuration(folder: Path, settings: Settings) -> dict[str, str]:
    """The TOML file of each agent; the keys lie in `folder`."""
    memory = (
        f'[memory.{MEMORY}]\nkind = "emulated-npu"\ncapacity = {settings.capacity}\n'
        f"channels = {settings.channels}\nalignment = {settings.alignment}\n"
    )
    return {
        PREFILL: _config(PREFILL, "prefill", (DECODE, INSIDE), folder, settings.arena, settings),
        **{
            name: _config(name, "decode", (PREFILL,), folder, settings.chunk, settings) + memory
            for name in (DECODE, INSIDE)
        },
    }


def _config(
    name: str, role: str, others: tuple[str, ...], folder: Path, arena: int, settings: Settings
) -> str:
    peers = folder / f"{name}.peers"
    keys = [entry for other in others for entry in load_peers(folder / f"{other}.pub").items()]
    peers.write_text("[peers]\n" + "".join(f'{who} = "{key}"\n' for who, key in keys))
    jobs = "".join(f"{key} = {value}\n" for key, value in settings.jobs.items())
    far = f'[peers]\n{PREFILL} = "{settings.prefill}"\n' if settings.prefill and role == "decode" else ""
    prefer = ", ".join(f'"{transport}"' for transport in settings.transports)
    return f"""\
[agent]
name = "{name}"
role = "{role}"
control = "tcp://127.0.0.1:0"
local = "ipc://{folder}/{name}.sock"
[security]
key_file = "{folder}/{name}.key"
peers_file = "{peers}"
[transport]
prefer = [{prefer}]
mode = "{settings.mode}"
[arena]
size = {arena}
[jobs]
chunk = {settings.chunk}
{jobs}{settings.tables}
{far}"""
