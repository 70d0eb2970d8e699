"""The processes of a chaos run: two prefill and two decode agents with faults in them, and their clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hawk.control.keys import load_pair, new_pair
from tests.chaos import content, weather
from tests.chaos.decode import MEMORY
from tests.chaos.proxy import DataProxy
from tests.chaos.weather import Sky, Weather

ROOT = Path(__file__).resolve().parents[2]

PREFILL, DECODE = ("p0", "p1"), ("d0", "d1")
AGENTS = (*PREFILL, *DECODE)
CLIENTS = {"p0": 1, "p1": 1, "d0": 2, "d1": 2}
"""Client processes of each agent, and"""
CACHES = {"p0": 2, "p1": 2, "d0": 1, "d1": 1}
"""how many caches each of them has."""

LEASE = 2.0
OWN, SEEN = "127.0.0.1", "127.0.0.2"
"""Where the agents' data ports are, and where the proxies in front of them are."""

MAX_JOBS, MAX_QUEUED, MAX_WAITING, MAX_OFFERS = 6, 10, 4, 24
START_LIMIT = 60.0


@dataclass(eq=False)
class AgentLife:
    """One process of an agent, from start to end.

    stopped    whether it got a SIGSTOP that no SIGCONT followed
    warm       descriptors, threads and resident MiB once it had done its first jobs, and nothing since
    """

    name: str
    number: int
    process: subprocess.Popen[bytes]
    log: Path
    weather: Weather
    stopped: bool = False
    ended: bool = False
    warm: tuple[int, int, float] | None = None

    @property
    def label(self) -> str:
        """Name and number of the life, as in the name of its log."""
        return f"{self.name}.{self.number}"

    def send(self, number: signal.Signals) -> None:
        """A signal."""
        self.process.send_signal(number)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self.stopped = number is signal.SIGSTOP

    def usage(self) -> tuple[int, int, float]:
        """Descriptors, threads, and MiB of private memory that is resident."""
        folder = Path(f"/proc/{self.process.pid}")
        status = dict(
            line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
        )
        return (
            len(os.listdir(folder / "fd")),
            int(status["Threads"]),
            int(status["RssAnon"].split()[0]) / 1024,
        )


@dataclass(eq=False)
class ClientLife:
    """A client process.  Answers to a command come through a queue of its own, by the command's number."""

    name: str
    agent: str
    process: asyncio.subprocess.Process
    attached: asyncio.Event = field(default_factory=asyncio.Event)
    heard: dict[int, asyncio.Queue[dict[str, Any]]] = field(default_factory=dict)
    dead: bool = False
    listening: asyncio.Task[None] | None = None

    def tell(self, number: int, **command: Any) -> asyncio.Queue[dict[str, Any]]:
        """Sends a command; what it answers comes into the queue, the last of it `over`."""
        queue = self.heard[number] = asyncio.Queue()
        if self.dead:
            queue.put_nowait({"id": number, "event": "over", "code": "client-died"})
        else:
            assert self.process.stdin is not None
            with contextlib.suppress(ConnectionError, RuntimeError):
                self.process.stdin.write(json.dumps({"id": number, **command}).encode() + b"\n")
        return queue

    async def listen(self) -> None:
        """Sorts what it says, until its end."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            said = json.loads(line)
            if said["event"] == "attached":
                self.attached.set()
            elif said["event"] == "detached":
                self.attached.clear()
            elif said["id"] in self.heard:
                self.heard[said["id"]].put_nowait(said)
        self.dead = True
        self.attached.clear()
        for number, queue in self.heard.items():
            queue.put_nowait({"id": number, "event": "over", "code": "client-died"})


class ChaosSite:
    """A folder with keys, configs, weather and logs; and everything that runs in it."""

    def __init__(self, seed: int, broken: str, folder: Path | None) -> None:
        self.seed = seed
        self.broken = broken
        # A promise that is broken shows with few clients as well, and sooner.
        self.counts = dict.fromkeys(AGENTS, 1) if broken else CLIENTS
        self.folder = folder or Path(tempfile.mkdtemp(prefix="hawk-chaos-"))
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.lives: list[AgentLife] = []
        self.agents: dict[str, AgentLife] = {}
        self.clients: dict[str, ClientLife] = {}
        self.proxies: dict[str, DataProxy] = {}
        self._control: dict[str, str] = {}
        self._numbers: dict[str, int] = dict.fromkeys(AGENTS, 0)
        for name in AGENTS:
            new_pair(self.folder, name)
        keys = {name: load_pair(self.folder / f"{name}.key").public for name in AGENTS}
        lines = [f'{name} = "{key}"' for name, key in keys.items()]
        (self.folder / "peers.toml").write_text("[peers]\n" + "\n".join(lines) + "\n")
        self._install_memory()

    def _install_memory(self) -> None:
        """Makes the memory known as any plug-in is: by an entry point of a distribution on the path."""
        info = self.folder / "plugins" / "hawk_chaos-1.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hawk-chaos\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            "[hawk.memories]\nheld-back = tests.chaos.memory:HeldBackMemory\n"
        )

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(map(str, (self.folder / "plugins", ROOT)))
        return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}

    def local(self, name: str) -> str:
        """An agent's address for clients."""
        return f"ipc://{self.folder}/{name}.sock"

    # -- agents ------------------------------------------------------------------------------------------

    def _config(self, name: str, dice: random.Random) -> str:
        """The file of a new life of an agent: pools of one or two chunks, and what else the dice say."""
        chunk = dice.choice([16, 32])
        lines = [
            "[agent]",
            f'name = "{name}"',
            f'role = "{"prefill" if name in PREFILL else "decode"}"',
            f'local = "{self.local(name)}"',
            f'control = "{self._control.get(name, f"tcp://{OWN}:0")}"',
            'drain = "1s"',
            'log_format = "json"',
            "[security]",
            f'key_file = "{self.folder / f"{name}.key"}"',
            f'peers_file = "{self.folder / "peers.toml"}"',
            "[jobs]",
            f'chunk = "{chunk}KiB"',
            f'in_flight_per_peer = "{chunk * dice.choice([1, 1, 2])}KiB"',
            f'lease = "{LEASE}s"',
            f"max_jobs = {MAX_JOBS}",
            f"max_queued = {MAX_QUEUED}",
            f"max_waiting = {MAX_WAITING}",
            f"max_offers = {MAX_OFFERS}",
            "[integrity]",
            f'verify = "{dice.choice(["off", "sample", "full"])}"',
            f"scrub = {dice.choice(['true', 'false'])}",
            f"scrub_targets = {dice.choice(['true', 'false'])}",
            "[arena]",
            f'size = "{dice.choice([32, 64, 128])}KiB"',
            "[transport.tcp]",
            "chunk = 4096",
            'stall_timeout = "4s"',
            'connect_timeout = "2s"',
        ]
        if name in PREFILL:
            lines += [f'host = "{OWN}"', f'advertise = "{SEEN}"', f"port = {self.proxies[name].port}"]
            return "\n".join(lines) + "\n"
        # The first lives of the decode agents take a transport each; later ones what comes.
        first = ["tcp"] if name == "d0" else ["shm"]
        prefer = first if not self._numbers[name] else dice.choice([["tcp"], ["shm"], ["shm", "tcp"]])
        # Room for its clients' caches, and for staging much or little.
        cache = 2 * content.LAYERS * content.CHANNELS * 48
        capacity = self.counts[name] * cache + dice.choice([256, 512, 2048])
        lines += [
            "[transport.shm]",
            "chunk = 4096",
            'grace = "0.5s"',
            "[transport]",
            f"prefer = {json.dumps(prefer)}",
            f'on_failure = "{dice.choice(["fail", "next"])}"',
            f'mode = "{dice.choice(["auto", "direct", "staged"])}"',
            "[staging]",
            f'size = "{dice.choice([64, 256, 1024])}KiB"',
            f"[memory.{MEMORY}]",
            'kind = "held-back"',
            f"channels = {content.CHANNELS}",
            f'capacity = "{capacity}KiB"',
            f'folder = "{self.folder / name}"',
            "[peers]",
            *(f'{peer} = "{self._control[peer]}"' for peer in PREFILL),
        ]
        return "\n".join(lines) + "\n"

    async def start(self, name: str) -> AgentLife:
        """A new life of an agent, at the address of the one before; returns once it answers."""
        number = self._numbers[name]
        dice = random.Random(f"{self.seed}/{name}/{number}")
        config = self.folder / f"{name}.{number}.toml"
        (self.folder / name).mkdir(exist_ok=True)
        config.write_text(self._config(name, dice))
        self._numbers[name] += 1
        log, sky = self.folder / f"{name}.{number}.log", self.folder / f"{name}.{number}.weather"
        made = weather.make(sky)
        reading, writing = os.pipe()
        command = [
            sys.executable,
            "-m",
            "tests.chaos.inside",
            str(sky),
            str(dice.getrandbits(32)),
            self.broken,
        ]
        try:
            with log.open("wb") as file:
                process = subprocess.Popen(  # noqa: ASYNC220 - it only forks
                    [*command, "--config", str(config), "--ready-fd", str(writing)],
                    pass_fds=[writing],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                    cwd=ROOT,
                    env=self._environment(),
                )
        finally:
            os.close(writing)
        life = AgentLife(name, number, process, log, made)
        self.lives.append(life)
        loop = asyncio.get_running_loop()
        try:
            line = await asyncio.wait_for(loop.run_in_executor(None, os.read, reading, 4096), START_LIMIT)
        finally:
            os.close(reading)
        if not line:
            raise RuntimeError(f"{life.label} did not start:\n{log.read_text()}")
        self._control[name] = line.decode().strip()
        self.agents[name] = life
        return life

    async def ended(self, life: AgentLife) -> int:
        """Its exit status, once it has ended."""
        loop = asyncio.get_running_loop()
        status = await asyncio.wait_for(loop.run_in_executor(None, life.process.wait), START_LIMIT)
        life.ended = True
        return status

    # -- clients -----------------------------------------------------------------------------------------

    async def start_client(self, name: str) -> ClientLife:
        """A client process, by a name such as `d0/1`; it attaches by itself."""
        agent = name.partition("/")[0]
        with (self.folder / f"client-{name.replace('/', '-')}.log").open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.chaos.worker"),
                *("prefill" if agent in PREFILL else "decode", self.local(agent), str(self.folder / agent)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=self._environment(),
                start_new_session=True,
            )
        life = ClientLife(name, agent, process)
        life.listening = asyncio.get_running_loop().create_task(life.listen())
        self.clients[name] = life
        return life

    def clients_of(self, agent: str) -> list[ClientLife]:
        """The clients of an agent."""
        return [client for client in self.clients.values() if client.agent == agent]

    # -- all ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Starts everything."""
        for name in PREFILL:
            self.proxies[name] = DataProxy(SEEN, OWN)
            await self.proxies[name].start()
        await asyncio.gather(*(self.start(name) for name in PREFILL))
        await asyncio.gather(*(self.start(name) for name in DECODE))
        names = [f"{agent}/{i}" for agent, many in self.counts.items() for i in range(many)]
        await asyncio.gather(*map(self.start_client, names))

    def set_weather(self, sky: Sky) -> None:
        """The same weather for every agent that lives."""
        for life in self.agents.values():
            sky.set(life.weather)

    async def close(self) -> None:
        """Ends everything."""
        for client in self.clients.values():
            if client.process.returncode is None:
                client.process.kill()
            await client.process.wait()
            if client.listening is not None:
                await client.listening
        for life in self.lives:
            if life.process.poll() is None:
                life.process.kill()
                await self.ended(life)
        for proxy in self.proxies.values():
            await proxy.close()

    def remove(self) -> None:
        """Removes the folder with its logs."""
        shutil.rmtree(self.folder, ignore_errors=True)
