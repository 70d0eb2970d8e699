"""What a directory costs an agent, by how many others are registered in it.

A process of its own holds one agent's directory, as the agent has it, and nothing else; the others are records that
this process writes into the same etcd.  For each number of them:

    learned    until the agent knew all, from a standing start, milliseconds
    cpu        processor time of that, milliseconds
    memory     what it grew by, KiB
    idle       processor time while nothing changes, milliseconds a minute: the lease's renewals
    change     processor time for one agent that comes, moves or goes, microseconds
    heard      from the last of a burst of changes until the agent knew, milliseconds

The burst is as many changes as fit into a second; all are counted by what the agent knows in the end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from hawk.control.discovery import Registration
from hawk.control.etcd import EtcdPeers
from hawk.control.etcd_client import Etcd
from hawk.errors import DeadlineExceeded, InvalidArgument, PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from rich.console import Console

PEERS = (10, 100, 1000)
_PREFIX = "/hawk-bench/"
_BURST = 1.0
_LIMIT = 60.0
"""Seconds that any one thing may take."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One row; units as in the module's text."""

    peers: int
    learned_ms: float
    cpu_ms: float
    memory_kib: int
    idle_ms_a_minute: float
    changes: int
    change_us: float
    heard_ms: float


@dataclass(frozen=True, slots=True)
class DirectoryResult:
    """All rows, and the lease that the agent had."""

    lease: float
    rows: tuple[Cost, ...]

    def to_dict(self) -> dict[str, object]:
        """For --json."""
        return dataclasses.asdict(self)


def run(
    etcd: Sequence[str], peers: Sequence[int] = PEERS, seconds: float = 10.0, lease: float = 15.0
) -> DirectoryResult:
    """Measures at the etcd whose members `etcd` names, below a prefix of its own, which is empty again afterwards.

    Raises `InvalidArgument`, `MissingDependency`, and `EtcdFault` where etcd does not answer.
    """
    if not etcd:
        raise InvalidArgument(
            "no directory to measure", field="etcd", got="none", expected="http://HOST:PORT"
        )
    for count in peers:
        if count < 1:
            raise InvalidArgument("too few", field="peers", got=count, expected="1 or more")
    return DirectoryResult(
        lease, tuple(asyncio.run(_measure(tuple(etcd), count, seconds, lease)) for count in peers)
    )


async def _measure(urls: tuple[str, ...], count: int, seconds: float, lease: float) -> Cost:
    """One row: the others come first, then the agent, then changes."""
    etcd = Etcd(urls)
    held = 0
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=_agent, args=(there, urls, count, seconds, lease), daemon=True
    )
    try:
        held, _ = await etcd.lease(600)
        for number in range(count):
            await _write(etcd, held, number, 0)
        child.start()
        there.close()
        first = await _said(here)
        began, changes = time.monotonic(), 0
        while time.monotonic() - began < _BURST:
            changes += 1
            await _write(etcd, held, changes % count, changes)
        here.send((changes % count, changes, time.monotonic()))
        change, heard = await _said(here)
        learned, cpu, memory, idle = first
        return Cost(
            count,
            learned * 1e3,
            cpu * 1e3,
            int(memory),
            idle * 1e3 * 60,
            changes,
            change / changes * 1e6,
            heard * 1e3,
        )
    finally:
        try:
            if held:
                await etcd.revoke(held)
        finally:
            await etcd.close()
            here.close()
            there.close()
            if child.pid is not None:
                child.join(5)
                child.kill()
                child.join()


async def _write(etcd: Etcd, lease: int, number: int, change: int) -> None:
    """One of the others registers, anew from the second time on."""
    record = Registration(
        address=f"tcp://10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}:7400",
        generation=f"{change:016x}",
        role="prefill",
        transports=["verbs", "tcp"],
        layouts=[f"engine/layout-{i}" for i in range(30)],
    )
    key, over = f"{_PREFIX}agents/other-{number}", None
    while (found := await etcd.put(key, msgspec.json.encode(record), lease, over=over)) is not None:
        over = found if found.value is not None else None


async def _said(pipe: Connection) -> tuple[float, ...]:
    """What the agent's process says next."""
    loop = asyncio.get_running_loop()
    if not await loop.run_in_executor(None, pipe.poll, _LIMIT):
        raise DeadlineExceeded("the agent's process has not answered", seconds=_LIMIT)
    try:
        answer: tuple[float, ...] = pipe.recv()
    except EOFError:
        raise PeerLost("the agent's process has ended before its time") from None
    return answer


def _agent(pipe: Connection, urls: tuple[str, ...], count: int, seconds: float, lease: float) -> None:
    asyncio.run(_as_agent(pipe, urls, count, seconds, lease))


async def _as_agent(
    pipe: Connection, urls: tuple[str, ...], count: int, seconds: float, lease: float
) -> None:
    """In the other process."""
    own = Registration(address="tcp://127.0.0.1:7400", generation="0" * 16)
    changed = asyncio.Event()
    directory = EtcdPeers(
        {},
        etcd=Etcd(urls),
        prefix=_PREFIX,
        name="measured",
        own=lambda: own,
        lease=lease,
        on_change=changed.set,
    )

    async def until(good: Callable[[], bool]) -> None:
        async with asyncio.timeout(_LIMIT):
            while not good():
                changed.clear()
                await changed.wait()

    memory, began, cpu = _resident(), time.monotonic(), time.process_time()
    await directory.start()
    try:
        await until(lambda: len(directory.registered()) >= count)
        learned, used, grown = time.monotonic() - began, time.process_time() - cpu, _resident() - memory
        cpu = time.process_time()
        await asyncio.sleep(seconds)
        idle = (time.process_time() - cpu) / seconds
        cpu = time.process_time()
        pipe.send((learned, used, grown, idle))
        number, change, when = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        wanted = f"{change:016x}"
        await until(lambda: directory.registered()[f"other-{number}"].generation == wanted)
        pipe.send((time.process_time() - cpu, time.monotonic() - when))
    finally:
        await directory.close()


def _resident() -> int:
    """KiB at the most so far, of this program: what `getrusage` says is no less than its parent had."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


def render(result: DirectoryResult, console: Console) -> None:
    """The table."""
    table = Table(box=None, pad_edge=False)
    for name in (
        "agents",
        "learned ms",
        "cpu ms",
        "memory KiB",
        "idle ms/min",
        "changes",
        "us a change",
        "heard ms",
    ):
        table.add_column(name, justify="right")
    for row in result.rows:
        table.add_row(
            f"{row.peers:,}",
            f"{row.learned_ms:.0f}",
            f"{row.cpu_ms:.0f}",
            f"{row.memory_kib:,}",
            f"{row.idle_ms_a_minute:.0f}",
            f"{row.changes:,}",
            f"{row.change_us:.0f}",
            f"{row.heard_ms:.1f}",
        )
    console.print(table)
    console.print(f"one agent's directory, its lease {result.lease:g} s; see hawk.bench.directory")
