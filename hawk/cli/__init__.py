"""The two commands: `hawk`, for people, and `hawk-agent`, the daemon.

An error of HAWK's is told on stderr and ends the process with 1; a bad configuration or usage with 2.  A
traceback is shown only where HAWK_DEBUG=1 asks for it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

import click

from hawk._version import __version__
from hawk.cli.agent import agent
from hawk.cli.bench import bench
from hawk.cli.config import config
from hawk.cli.demo import demo
from hawk.cli.doctor import doctor
from hawk.cli.evaluate import evaluate
from hawk.cli.keys import keys
from hawk.cli.layout import layout
from hawk.cli.operate import drain, job, jobs, peers, status
from hawk.cli.proxy import serve_proxy
from hawk.cli.what_if import what_if
from hawk.errors import ConfigError, HawkError

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="hawk")
def cli() -> None:
    """Moves KV caches between accelerators that disagree about memory layout."""


for _command in (
    bench,
    config,
    demo,
    doctor,
    drain,
    evaluate,
    job,
    jobs,
    keys,
    layout,
    peers,
    serve_proxy,
    status,
):
    cli.add_command(_command)
evaluate.add_command(what_if)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """`hawk`."""
    _run(cli, "hawk", arguments)


def agent_main(arguments: Sequence[str] | None = None) -> NoReturn:
    """`hawk-agent`."""
    _run(agent, "hawk-agent", arguments)


def _run(command: click.Command, name: str, arguments: Sequence[str] | None) -> NoReturn:
    """Runs a command and turns what it raises into a line and an exit status."""
    try:
        sys.exit(_status(command, name, arguments))
    except BrokenPipeError:  # whoever read our output has enough; say nothing more, at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _status(command: click.Command, name: str, arguments: Sequence[str] | None) -> int:
    args = None if arguments is None else list(arguments)
    try:
        status: object = command.main(args, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _say(name, "interrupted", 130)
    except BrokenPipeError:
        raise
    except ConfigError as error:
        return _failed(name, error, str(error), 2)
    except HawkError as error:
        return _failed(name, error, " ".join(str(error).split()), 1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _failed(name, error, f"{where}{error.strerror or error}", 1)
    except Exception as error:  # noqa: BLE001  # the last line of defence: a bug, told as one line
        text = f"a bug in HAWK: {type(error).__name__}: {' '.join(str(error).split())}"
        return _failed(name, error, f"{text} (HAWK_DEBUG=1 shows where)", 1)
    return status if isinstance(status, int) else 0


def _failed(name: str, error: Exception, text: str, status: int) -> int:
    if os.environ.get("HAWK_DEBUG") == "1":
        raise error
    return _say(name, text, status)


def _say(name: str, text: str, status: int) -> int:
    click.echo(f"{name}: {text}", err=True)
    return status
