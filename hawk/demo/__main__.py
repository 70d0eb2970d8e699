"""`python -m hawk.demo`, which `hawk demo` and `scripts/demo` run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from typing import cast

import click
import uvloop
from rich.console import Console

from hawk.demo.agents import AgentFailed
from hawk.demo.scenario import DEFAULT_TOKENS
from hawk.demo.story import Damage, Options, Report, tell
from hawk.errors import HawkError

_LOG_LINES = 30


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--tokens",
    type=click.IntRange(1, 1 << 20),
    default=DEFAULT_TOKENS,
    show_default=True,
    help="Length of the request; 4096 are 512 MiB. Less is moved, and said so, where memory is short.",
)
@click.option(
    "--transport",
    "transports",
    type=click.Choice(["shm", "tcp", "nixl", "mooncake"]),
    multiple=True,
    help="Transport to allow; may be given again, best first.  [default: shm, then tcp]",
)
@click.option("--channels", type=click.IntRange(1, 64), help="Memory channels of the device.  [default: 8]")
@click.option(
    "--codec",
    type=click.Choice(["bf16", "bfp8_b"]),
    help="How the device stores elements.  [default: bf16]",
)
@click.option(
    "--break",
    "damage",
    type=click.Choice(["swap-channels", "flip-bit"]),
    help="Damages the result before the check, to see that the check fails.",
)
@click.option("--json", "as_json", is_flag=True, help="Prints one JSON object instead of the story.")
def main(
    tokens: int,
    transports: tuple[str, ...],
    channels: int | None,
    codec: str | None,
    damage: str | None,
    as_json: bool,
) -> int:
    """Moves a KV cache between two agents on this machine and checks every byte.

    A prefill and a decode agent run as processes of their own.  The cache of a model goes from an engine's
    pages in shared memory into the channels of an emulated device, in the device's own layout; then a third
    process works out what every byte has to be.  The last line is "verified", or the exit status is 1.
    """
    options = Options(
        tokens=tokens,
        transports=tuple(dict.fromkeys(transports)) or Options.transports,
        channels=channels,
        codec=codec,
        damage=cast("Damage | None", damage),
    )
    console = Console(quiet=as_json, highlight=False, soft_wrap=True)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(_run(options, console))
    except AgentFailed as error:
        lines = error.log.splitlines()
        for line in lines[-_LOG_LINES:]:
            click.echo(f"  | {line}", err=True)
        return _failed(str(error))
    except HawkError as error:
        return _failed(" ".join(str(error).split()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo("hawk demo: interrupted; the agents are ended, their files removed", err=True)
        return 130
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report), indent=2))
    return 0 if report.verified else 1


async def _run(options: Options, console: Console) -> Report:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    return await tell(options, console)


def _failed(text: str) -> int:
    if os.environ.get("HAWK_DEBUG") == "1":
        raise
    click.echo(f"hawk demo: {text}", err=True)
    return 1


if __name__ == "__main__":
    status = 1
    try:
        status = main.main(prog_name="hawk demo", standalone_mode=False) or 0
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except click.Abort:
        status = 130
    except BrokenPipeError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
