"""`hawk-agent`: one agent in this process."""

from __future__ import annotations

from pathlib import Path

import click

from hawk._version import __version__


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The agent's TOML file; without one, defaults and HAWK_TABLE__KEY variables hold.",
)
@click.option(
    "--ready-fd",
    type=click.IntRange(min=0),
    help="An open descriptor to which one line is written once the agent answers: its control address.",
)
@click.version_option(__version__, prog_name="hawk-agent")
def agent(file: Path | None, ready_fd: int | None) -> int:
    """Runs an agent until SIGTERM, which lets running jobs end first; a second one does not wait for them.

    SIGHUP reads the configuration again and takes over peers, their keys and the log level; SIGUSR1 writes jobs and
    tasks to the log.
    """
    import asyncio
    import os

    import uvloop

    from hawk.agent import Agent, run
    from hawk.config import load_config
    from hawk.observe.log import configure

    config, _ = load_config(file)
    configure(config.agent.log_level, config.agent.log_format)

    def up(started: Agent) -> None:
        if ready_fd is not None:
            os.write(ready_fd, f"{started.control_address}\n".encode())
            os.close(ready_fd)

    _raise_descriptor_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(config, on_up=up, read=lambda: load_config(file)[0]))


def _raise_descriptor_limit() -> None:
    """Lets this process open as many files as it may.

    Clients, peers, strangers and caches each cost descriptors, and ZeroMQ ends the whole process where a local
    client cannot be accepted for want of one; the usual soft limit of 1024 is for programs that use select().
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
