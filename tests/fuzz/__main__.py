"""`scripts/fuzz`: see `tests.fuzz.run`."""

from __future__ import annotations

import asyncio
import resource
import secrets

import click

from tests.fuzz.run import run


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--frames", type=click.IntRange(min=1), default=1_000_000, show_default=True)
@click.option(
    "--connections",
    type=click.IntRange(min=0),
    default=10_000,
    show_default=True,
    help="At a time, by strangers.",
)
@click.option("--seed", type=int, help="What everything is drawn from; a random one if it is not given.")
def fuzz(frames: int, connections: int, seed: int | None) -> None:
    """Broken control frames by a peer with a good key, then handshakes that never end, against an agent that has
    good jobs with another meanwhile: exits 0 if nothing was the worse for it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    drawn = secrets.randbits(31) if seed is None else seed
    click.echo(f"seed {drawn}")
    click.echo(str(asyncio.run(run(frames, connections, drawn))))


if __name__ == "__main__":
    fuzz()
