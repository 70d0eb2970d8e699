"""How answers of a live agent look on a terminal; `hawk.cli.operate` asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hawk.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.control.messages import Drained, JobInfo, PeerInfo, Status
    from hawk.doctor import Finding

_WIDE = 200
"""Columns where the output is no terminal: nothing is cut for whoever reads it with grep."""


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDE)


def _print(table: Table) -> None:
    """A table; where the output is no terminal, without the blanks that fill its lines."""
    console = _console()
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.print(line.rstrip(), markup=False, soft_wrap=True)


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _row(table: Table, *cells: object, style: str = "") -> None:
    # What others named is text, never markup.
    table.add_row(*(escape(str(cell)) for cell in cells), style=style)


def seconds(value: float | None) -> str:
    """A duration for people: `"12ms"`, `"3.4s"`, `"5m10s"`, `"2h05m"`; empty for None."""
    if value is None:
        return ""
    sign, value = "-" if value < 0 else "", abs(value)
    if value < 0.9995:
        return f"{sign}{value * 1000:.0f}ms"
    if value < 59.95:
        return f"{sign}{value:.1f}s"
    whole = round(value)
    if whole < 3600:
        return f"{sign}{whole // 60}m{whole % 60:02d}s"
    return f"{sign}{whole // 3600}h{whole % 3600 // 60:02d}m"


def status(answer: Status) -> None:
    """`hawk status`."""
    facts = _table("", "")
    state = f"not ready: {answer.not_ready}" if answer.not_ready else "ready"
    _row(facts, "agent", f"{answer.name}, {answer.role}, {answer.software or 'an earlier version'}")
    _row(facts, "state", state, style="" if state == "ready" else "yellow")
    if answer.pid:
        up = f"{seconds(answer.uptime)}, process {answer.pid}, generation {answer.generation}"
        _row(facts, "up for", up)
    _row(facts, "control", answer.control)
    if answer.directory:
        _row(facts, "directory", answer.directory)
    for name, endpoint in answer.transports.items():
        # An endpoint holds the token that admits a reader.
        shown = ", ".join(part for part in endpoint.split(", ") if not part.startswith("token="))
        _row(facts, name, shown)
    held = f"{answer.blocks_owned} blocks in use, {answer.blocks_quarantined} in quarantine"
    _row(facts, "clients", f"{answer.clients} with {answer.caches} caches; {held}")
    work = f"{answer.fetching} fetches, {answer.serving} serves, {answer.offers} open offers"
    _row(facts, "under way", work)
    endings = ", ".join(f"{count} {name}" for name, count in sorted(answer.endings.items()))
    _row(facts, "fetches ended", endings or "none")
    _row(facts, "loop lag", seconds(answer.loop_lag))
    facts.show_header = False
    _print(facts)
    _say("")
    pools = _table("pool", "total", "free", "in use", "quarantined", right=_SIZES)
    for pool in answer.pools:
        sizes = (pool.total, pool.free, pool.owned, pool.quarantined)
        _row(
            pools,
            pool.name,
            *(approximate_size(size) for size in sizes),
            style="yellow" if pool.quarantined else "",
        )
    _print(pools)
    for pool in answer.pools:
        if pool.note:
            _say(f"{pool.name}: {pool.note}")


_SIZES = ("total", "free", "in use", "quarantined", "bytes", "jobs", "age", "left", "ended")


def peers(answer: Sequence[PeerInfo]) -> None:
    """`hawk peers`."""
    if not answer:
        _say("no peers: none is configured, and none has come")
        return
    console = _console()
    table = _peers(answer)
    wide = console.options.update(width=1000)
    if console.measure(table, options=wide).maximum > console.width:
        # Folded into columns of a few letters nobody can read it.
        table = _peers(answer, briefly=True)
        _print(table)
        _say("software, role and transports need a wider terminal, or --json")
    else:
        _print(table)
    for peer in answer:
        if peer.trouble:
            _say(f"{peer.name}: {peer.trouble}")


def _peers(answer: Sequence[PeerInfo], *, briefly: bool = False) -> Table:
    more = () if briefly else ("software", "role", "transports")
    table = _table("peer", "direction", "state", "jobs", "protocol", *more, "address", right=_SIZES)
    for peer in answer:
        state = f"{peer.state}, draining" if peer.draining else peer.state
        style = "" if peer.state == "up" else "dim" if peer.state == "not-tried" else "yellow"
        _row(
            table,
            peer.name,
            peer.direction,
            state,
            peer.jobs,
            peer.version or "",
            *(() if briefly else (peer.software, peer.role, ", ".join(peer.transports))),
            peer.address,
            style=style,
        )
    return table


def _doing(info: JobInfo) -> str:
    if info.ending:
        return info.ending
    return f"{info.state} ({info.phase})" if info.phase and info.phase != info.state else info.state


def _moved(info: JobInfo) -> str:
    done = approximate_size(info.nbytes)
    return f"{done} of {approximate_size(info.total)}" if info.total > info.nbytes else done


def jobs(answer: Sequence[JobInfo]) -> None:
    """`hawk jobs`."""
    if not answer:
        _say("no jobs")
        return
    columns = ("job", "role", "state", "peer", "request", "bytes", "age", "left", "ended")
    table = _table(*columns, right=_SIZES)
    for info in answer:
        bad = info.ending and info.ending not in ("ready", "released")
        _row(
            table,
            info.job[:12],
            info.role,
            _doing(info),
            info.peer,
            info.request,
            _moved(info),
            seconds(info.age),
            seconds(info.deadline),
            f"{seconds(info.ended)} ago" if info.ended is not None else "",
            style="red" if bad else "dim" if info.ending else "",
        )
    _print(table)


def job(info: JobInfo) -> None:
    """`hawk job ID`."""
    table = _table("", "")
    table.show_header = False
    rows = {
        "job": info.job,
        "on the wire": info.attempt if info.attempt != info.job else "",
        "role": info.role,
        "request": info.request,
        "peer": info.peer,
        "state": _doing(info),
        "reason": info.reason,
        "transport": f"{info.transport} {info.mode}".strip(),
        "bytes": _moved(info),
        "took" if info.ended is not None else "age": seconds(info.age),
        "left": seconds(info.deadline),
        "ended": f"{seconds(info.ended)} ago" if info.ended is not None else "",
        **{f"  {name}": seconds(value) for name, value in info.phases.items()},
    }
    for name, value in rows.items():
        if value:
            _row(table, name, value)
    _print(table)


def drained(answer: Drained) -> None:
    """`hawk drain`."""
    if not answer.draining:
        _say("the agent takes new work")
    elif answer.done:
        _say("drained: nothing that was promised is left")
    else:
        left = f"{answer.fetching} fetches, {answer.serving} serves, {answer.offers} open offers"
        _say(f"draining: {left} are left")


_LEVELS = {"ok": "green", "warn": "yellow", "fail": "red"}


def findings(answer: Sequence[Finding]) -> None:
    """`hawk doctor`."""
    table = _table("", "", "")
    table.show_header = False
    for found in answer:
        remedy = f"\n  {found.remedy}" if found.remedy else ""
        _row(table, found.level, found.name, f"{found.text}{remedy}", style=_LEVELS[found.level])
    _print(table)
    bad = [f"{count} {level}" for level in _LEVELS if (count := sum(f.level == level for f in answer))]
    _say(", ".join(bad))


def _say(text: str) -> None:
    """One plain line."""
    _console().print(escape(text))
