"""`scripts/chaos`: see `tests.chaos.director`."""

from __future__ import annotations

import asyncio
import secrets
import sys
from pathlib import Path

import click

from tests.chaos.director import Director
from tests.chaos.inside import BREAKS
from tests.chaos.report import Report
from tests.chaos.site import ChaosSite


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--minutes", type=click.FloatRange(min=0.05), default=2.0, show_default=True, help="How long it storms."
)
@click.option("--seed", type=int, help="What everything is drawn from; a random one if it is not given.")
@click.option(
    "--break", "broken", type=click.Choice(sorted(BREAKS)), help="Breaks this promise, to see that it shows."
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder for configs and logs, which stay there; without it they stay only after a failure.",
)
def chaos(minutes: float, seed: int | None, broken: str | None, keep: Path | None) -> None:
    """Two prefill and two decode agents with pools of one or two chunks, their clients, and everything that can
    go wrong: exits 0 if every promise held, 1 if one was broken."""
    report = run(minutes, secrets.randbits(31) if seed is None else seed, broken or "", keep)
    sys.exit(1 if report.broken else 0)


def run(minutes: float, seed: int, broken: str = "", keep: Path | None = None) -> Report:
    """One run; prints its report and returns it."""
    report = Report(seed, minutes, broken)
    site = ChaosSite(seed, broken, keep)
    asyncio.run(Director(site, report).run())
    print(report.text(site.folder), flush=True)
    if not report.broken and keep is None:
        site.remove()
    return report


if __name__ == "__main__":
    chaos(prog_name="scripts/chaos")
