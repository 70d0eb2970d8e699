"""`hawk doctor`: whether this machine, and the way to a peer, are as HAWK needs them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hawk.cli.operate import ask, asks, print_json, seconds

if TYPE_CHECKING:
    from hawk.config import Config
    from hawk.control.messages import TransportTry
    from hawk.doctor import Finding
    from hawk.operator import Operator


@click.command()
@click.option(
    "--peer", metavar="NODE", help="Also has the agent read a few bytes of another one by every transport."
)
@click.option(
    "--timeout",
    callback=seconds,
    default="10s",
    show_default=True,
    help="With --peer: how long that may take, such as 5s.",
)
@asks
def doctor(
    local: str | None, file: Path | None, as_json: bool, peer: str | None, timeout: float | None
) -> int:
    """Looks whether this machine has what HAWK needs, and says what to do where it has not.

    Every line is ok, warn (something is slower, or not to be had) or fail; ends with 1 if any is fail.  With
    --config the file is checked as well.  With --peer a running agent, named as for `hawk status`, tries the way to
    another agent by a handful of bytes.
    """
    from hawk.doctor import Level, Machine, examine

    config, said = _config(file) if file is not None else (None, [])
    findings = examine(Machine(), config) + said
    if peer is not None:
        findings += _peer(local, file, peer, timeout or 10.0)
    if as_json:
        print_json(findings)
    else:
        from hawk.cli import views

        views.findings(findings)
    return 1 if any(finding.level is Level.FAIL for finding in findings) else 0


def _config(file: Path) -> tuple[Config | None, list[Finding]]:
    """The configuration, unless it cannot be read, and what there is to say of it."""
    from hawk.config import load_config
    from hawk.doctor import Machine
    from hawk.doctor.configured import configured
    from hawk.doctor.findings import fail, ok
    from hawk.errors import ConfigError

    try:
        config, _ = load_config(file)
    except ConfigError as error:
        what = "; ".join(error.message.splitlines())
        remedy = "Mend these; `hawk config doc` has every key and what may stand there"
        return None, [fail("config", what, remedy)]
    return config, [
        ok("config", f"{file}: {config.agent.name}, {config.agent.role}"),
        *configured(Machine(), config),
    ]


def _peer(local: str | None, file: Path | None, peer: str, timeout: float) -> list[Finding]:
    """What came of every transport; a fault where no byte came by any."""
    from hawk.doctor.findings import fail
    from hawk.errors import HawkError

    name, reached = f"peer {peer}", False

    async def tried(agent: Operator) -> tuple[list[TransportTry], set[str]]:
        nonlocal reached
        reached = True
        in_use = set((await agent.status()).transports)
        return await agent.try_peer(peer, timeout=timeout), in_use

    try:
        tries, in_use = ask(local, file, tried)
    except HawkError as error:
        if not reached:  # it is not the peer that is at fault
            remedy = error.hint or "Name a running agent, by --local or --config"
            error.hint = None
            return [fail("own agent", str(error), f"It is this agent that tries {name}. {remedy}")]
        hint = error.hint or "`hawk peers` shows whom the agent knows"
        return [fail(name, error.message if error.hint else str(error), hint)]
    found = [_way(name, way, in_use) for way in tries]
    if not any(way.ok for way in tries):
        found.append(fail(name, "no byte came by any transport", "See the reason of each"))
    return found


def _way(name: str, way: TransportTry, in_use: set[str]) -> Finding:
    from hawk.doctor.findings import ok, warn

    if way.ok:
        return ok(
            f"{name} by {way.transport}",
            f"a few bytes came in {way.seconds * 1000:.2f} ms, and were the right ones",
        )
    if way.transport not in in_use:  # a choice, or told under the name of the transport
        return ok(f"{name} by {way.transport}", "not tried: the peer has it, this agent does not use it")
    return warn(f"{name} by {way.transport}", way.text, "Without it the others are used")
