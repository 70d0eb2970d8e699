"""The demonstration from its first line to `verified`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hawk.cache import KVCache
from hawk.demo import agents, engine, scenario
from hawk.demo.scenario import ALIGNMENT, DEFAULT_TOKENS
from hawk.errors import UnknownRequest
from hawk.memory.available import available_memory
from hawk.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rich.console import Console

    from hawk.demo.check import Verdict
    from hawk.handles import DeviceCache, Fetch, Ready

Damage = Literal["swap-channels", "flip-bit"]

_SPARE = 48 << 20
"""Bytes of the device beyond the cache: room for staging, should the plan prefer it."""

_TIMEOUT = 120.0

_PHASES = {
    "connect": "reaching the prefill agent: handshake, the transport's link",
    "accept": "asking, until the prefill side said yes",
    "plan": "planning, on the decode side",
    "retile": "retiling, on the prefill side",
    "read": "reading the bytes into the channels",
    "finish": "moves inside the channels",
    "flush": "flushing the device's memory",
    "release": "the last word: the lease held until now",
}


@dataclass(frozen=True)
class Options:
    """What the command line asks for; None leaves it to the scenario."""

    tokens: int = DEFAULT_TOKENS
    transports: tuple[str, ...] = ("shm", "tcp")
    channels: int | None = None
    codec: str | None = None
    damage: Damage | None = None


@dataclass
class Report:
    """What happened; `--json` prints these fields.

    asked, tokens     tokens asked for and moved; fewer where memory is short
    bytes             what landed in the device's channels, `per_channel` of it in each
    seconds           wall time by step: agents, fill, transfer, check
    phases            the agents' own account of the transfer, seconds, chunks added up; phases and chunks overlap
    gb_per_s          `bytes` by the transfer's wall time, 10**9 bytes a second
    checked           bytes that the checker compared, per channel: the request's and those that had to stay
    mismatch          what the checker found, or ""
    """

    summary: str
    asked: int
    tokens: int
    codec: str
    source_layout: str
    target_layout: str
    transport: str = ""
    mode: str = ""
    bytes: int = 0
    per_channel: list[int] = field(default_factory=list)
    gb_per_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    checked: list[int] = field(default_factory=list)
    mismatch: str = ""
    verified: bool = False


async def tell(options: Options, console: Console) -> Report:
    """Runs the demonstration and prints a line for each step.

    Raises `OutOfMemory`, `agents.AgentFailed`, and whatever the transfer ends with.
    """
    arenas = agents.Settings(0, 1, ALIGNMENT).arenas
    scene = scenario.fit(options.tokens, arenas, codec=options.codec, channels=options.channels)
    source, target = scene.source, scene.target
    report = Report(
        summary=scene.summary,
        asked=options.tokens,
        tokens=scene.tokens,
        codec=target.codec or "",
        source_layout=source.resolve().name,
        target_layout=target.resolve().name,
    )
    console.print(
        f"{scene.summary}, {_tokens(scene.tokens)}: {approximate_size(scene.payload)} of keys and values in bf16"
    )
    _tell_memory(scene, arenas, options, console)
    settings = agents.Settings(
        capacity=scene.target_bytes + _SPARE,
        channels=scene.channels,
        alignment=ALIGNMENT,
        transports=options.transports,
    )
    async with contextlib.AsyncExitStack() as stack:
        async with _timed(report, "agents"):
            pair = await stack.enter_async_context(agents.Pair(settings))
        console.print(
            f"Two agents are up, prefill (process {pair.pids[0]}) and decode (process {pair.pids[1]}), "
            f"with CURVE keys made for this run, in {report.seconds['agents']:.1f} s."
        )
        cache = stack.enter_context(contextlib.closing(KVCache.alloc(source)))
        await _move(pair, cache, scene, options, report, console)
    return report


async def _move(
    pair: agents.Pair,
    cache: KVCache,
    scene: scenario.Scenario,
    options: Options,
    report: Report,
    console: Console,
) -> None:
    source, target = scene.source, scene.target
    async with _timed(report, "fill"):
        await engine.fill_in_threads(cache, scene)
    console.print(
        f"The engine's cache lies in shared memory as {report.source_layout}, {source.blocks} blocks of "
        f"{source.block_size} tokens, the request's in random order; filled in {report.seconds['fill']:.1f} s."
    )
    registered = await pair.prefill.register(cache)
    device = await pair.decode.allocate(target, memory=agents.MEMORY)
    await asyncio.to_thread(engine.mark, device)
    console.print(
        f"The device's cache lies in {scene.channels} channels as {report.target_layout} in {report.codec}, "
        f"{target.blocks} blocks of {target.block_size} tokens; every byte of it holds a mark."
    )
    offer = await pair.prefill.offer(
        "demo", registered, scene.source_blocks(), tokens=scene.tokens, ttl=_TIMEOUT, note=b"first token"
    )
    async with _timed(report, "transfer"):
        async with pair.decode.fetch(
            offer, into=device, blocks=scene.target_blocks(), timeout=_TIMEOUT
        ) as fetch:
            ready = await _shown(fetch, console)
    with contextlib.suppress(UnknownRequest):  # it may be over before we ask
        await offer.ended()
    _tell_transfer(ready, report, console)
    if options.damage:
        _damage(device, options.damage)
        console.print(f"As asked, the result is damaged before the check: {options.damage}.")
    console.print("Another process, which knows numpy and nothing of HAWK, compares every byte ...")
    async with _timed(report, "check"):
        verdict = await engine.verify(engine.job(device, scene))
    _tell_verdict(verdict, report, console)
    await registered.release()
    await device.release()


def _tokens(number: int) -> str:
    return f"{number:,} token" + ("" if number == 1 else "s")


def _tell_memory(scene: scenario.Scenario, arenas: int, options: Options, console: Console) -> None:
    need, there = scenario.needed(scene, arenas), available_memory()
    text = f"It takes {approximate_size(need)} of memory; {approximate_size(there)} are available."
    if scene.tokens < options.tokens:
        text = f"Memory is short ({approximate_size(there)} available): {_tokens(scene.tokens)} instead of "
        left = approximate_size(max(0, there - need))
        text += f"{options.tokens:,}, which takes {approximate_size(need)} and leaves {left}."
    console.print(text)


def _tell_transfer(ready: Ready, report: Report, console: Console) -> None:
    took = report.seconds["transfer"]
    report.transport, report.mode, report.bytes = ready.transport, ready.mode, ready.nbytes
    report.per_channel, report.phases = list(ready.channels), dict(ready.phases)
    report.gb_per_s = ready.nbytes / took / 1e9
    console.print(
        f"Moved {approximate_size(ready.nbytes)} over {ready.transport}, {ready.mode}, in {took:.3f} s: "
        f"{report.gb_per_s:.2f} GB/s."
    )
    console.print(
        "Seconds by phase, chunks added up; chunks and phases overlap, so a phase may exceed the whole:"
    )
    for name, seconds in ready.phases.items():
        if name != "total":
            console.print(f"  {name:<8} {seconds:7.3f}   {_PHASES.get(name, '')}".rstrip())
    channels = report.per_channel
    if min(channels) == max(channels):
        console.print(f"Bytes per channel: {channels[0]:,} in each of {len(channels)}.")
    else:
        console.print("Bytes per channel: " + ", ".join(f"{n:,}" for n in channels) + ".")


def _tell_verdict(verdict: Verdict, report: Report, console: Console) -> None:
    report.checked, report.mismatch = verdict.checked, verdict.mismatch
    report.verified = not verdict.mismatch
    if report.mismatch:
        console.print(f"WRONG: {report.mismatch}")
        return
    kept = sum(report.checked) - report.bytes
    console.print(
        f"It compared {sum(report.checked):,} bytes in {verdict.seconds:.1f} s: {report.bytes:,} that had to come "
        f"and {kept:,} that had to stay as they were."
    )
    console.print("verified")


async def _shown(fetch: Fetch, console: Console) -> Ready:
    """The fetch's result, with a bar on a terminal while it runs."""
    if not console.is_terminal or console.quiet:
        return await fetch
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description:<10}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        async for step in fetch.progress():
            bar.update(task, description=step.state, completed=step.nbytes, total=step.total or None)
        return await fetch


@contextlib.asynccontextmanager
async def _timed(report: Report, name: str) -> AsyncIterator[None]:
    began = time.perf_counter()
    yield
    report.seconds[name] = time.perf_counter() - began


def _swap_channels(device: DeviceCache) -> None:
    if len(device.channels) < 2:
        _flip_bit(device)
        return
    one, other = device.channels[:2]
    kept = one.copy()
    one[:] = other
    other[:] = kept


def _flip_bit(device: DeviceCache) -> None:
    layout = device.layout
    device.channels[-1][device.offsets[-1] + layout.channel_bytes // 2] ^= 1


_DAMAGES: dict[str, Callable[[DeviceCache], None]] = {
    "swap-channels": _swap_channels,
    "flip-bit": _flip_bit,
}


def _damage(device: DeviceCache, damage: Damage) -> None:
    _DAMAGES[damage](device)
