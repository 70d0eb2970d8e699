"""`hawk status`, `peers`, `jobs`, `job` and `drain`: a live agent, asked through its local socket."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from hawk.operator import Operator

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def asks(command: F) -> F:
    """The options that say which agent is meant, and how its answer is printed."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Prints one JSON value instead of tables."),
        click.option(
            "--config",
            "file",
            type=click.Path(path_type=Path, dir_okay=False),
            help="The agent's TOML file, for its agent.local.",
        ),
        click.option(
            "--local",
            metavar="ADDRESS",
            help="The agent's local socket, ipc://PATH.  [default: of --config, HAWK_LOCAL, or the default one]",
        ),
    ):
        command = option(command)
    return command


def _address(local: str | None, file: Path | None) -> str:
    from hawk.config import load_config

    if local:
        return local if "://" in local else f"ipc://{Path(local).absolute()}"
    if file is None and (named := os.environ.get("HAWK_LOCAL")):
        return named
    return load_config(file, complete=False)[0].agent.local


def ask(local: str | None, file: Path | None, question: Callable[[Operator], Awaitable[T]]) -> T:
    """The answer of the agent that is meant; raises `PeerUnreachable` where none runs."""
    from hawk.operator import Operator

    async def asked() -> T:
        async with Operator(_address(local, file), quiet=True) as agent:
            return await question(agent)

    return asyncio.run(asked())


def print_json(value: Any) -> None:
    """The one value that `--json` asks for."""
    import msgspec

    click.echo(json.dumps(msgspec.to_builtins(value), indent=2))


def _views() -> Any:
    from hawk.cli import views

    return views


@click.command()
@asks
def status(local: str | None, file: Path | None, as_json: bool) -> None:
    """Shows what an agent is and holds: its pools, counts and transports, and whether it is ready."""
    answer = ask(local, file, lambda agent: agent.status())
    if as_json:
        print_json(answer)
    else:
        _views().status(answer)


@click.command()
@asks
def peers(local: str | None, file: Path | None, as_json: bool) -> None:
    """Lists the agents that an agent knows or talks with."""
    answer = ask(local, file, lambda agent: agent.peers())
    if as_json:
        print_json(answer)
    else:
        _views().peers(answer)


@click.command()
@click.option("--live", is_flag=True, help="Only jobs under way, without those that ended lately.")
@click.option(
    "--most", type=click.IntRange(1, 1000), default=50, show_default=True, help="Jobs shown at most."
)
@asks
def jobs(local: str | None, file: Path | None, as_json: bool, live: bool, most: int) -> None:
    """Lists an agent's jobs: those under way, then the latest ended ones."""
    answer = ask(local, file, lambda agent: agent.jobs(ended=not live, most=most))
    if as_json:
        print_json(answer)
    else:
        _views().jobs(answer)


@click.command()
@click.argument("job", metavar="ID")
@asks
def job(job: str, local: str | None, file: Path | None, as_json: bool) -> None:
    """Shows one job.  ID is its id on either side, or how that begins, or its request, of which it is the latest."""
    answer = ask(local, file, lambda agent: agent.job(job))
    if as_json:
        print_json(answer)
    else:
        _views().job(answer)


def seconds(_context: click.Context, option: click.Parameter, value: str | None) -> float | None:
    """A duration that was given as an option, in seconds."""
    from hawk.errors import InvalidArgument
    from hawk.units import parse_duration

    try:
        return None if value is None else parse_duration(value)
    except InvalidArgument as error:
        raise click.BadParameter(str(error), param=option) from None


@click.command()
@click.option("--wait", is_flag=True, help="Returns once nothing that was promised is left.")
@click.option(
    "--timeout",
    callback=seconds,
    help="With --wait: how long at most, such as 5min; ends with 1 if that was too short.",
)
@click.option("--resume", is_flag=True, help="Takes the draining back: the agent takes new work again.")
@asks
def drain(
    local: str | None, file: Path | None, as_json: bool, wait: bool, timeout: float | None, resume: bool
) -> int:
    """Makes an agent take no new work and finish what it promised.

    Jobs under way go on, and offers that are open may still be fetched until they end.  The agent goes on
    running; end its process afterwards.
    """
    if resume and (wait or timeout is not None):
        raise click.UsageError("--resume waits for nothing")
    if timeout is not None and not wait:
        raise click.UsageError("--timeout needs --wait")

    async def asked(agent: Operator) -> Any:
        if resume:
            return await agent.resume()
        if not wait:
            return await agent.drain()
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        while True:
            left = 600.0 if end is None else max(end - loop.time(), 0.0)
            answer = await agent.drain(timeout=min(left, 600.0))
            if answer.done or (end is not None and loop.time() >= end):
                return answer

    answer = ask(local, file, asked)
    if as_json:
        print_json(answer)
    else:
        _views().drained(answer)
    sys.stdout.flush()
    return 1 if wait and not answer.done else 0
