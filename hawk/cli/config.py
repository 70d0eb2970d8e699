"""`hawk config`: what is configured, and what could be."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def config() -> None:
    """Shows the configuration, and documents it."""


@config.command()
@click.option(
    "--config", "file", type=click.Path(path_type=Path, dir_okay=False), help="The agent's TOML file."
)
def show(file: Path | None) -> int:
    """Prints every value and where it came from.

    Ends with 2 if an agent would refuse to start with this file.
    """
    from hawk.config import load_config, missing
    from hawk.config_text import rows

    loaded, sources = load_config(file, complete=False)
    table = [(f"{row.path} = {row.value}", row.source) for row in rows(loaded, sources)]
    width = min(60, max(len(text) for text, _ in table))
    for text, source in table:
        click.echo(f"{text:<{width}}  # {source}")
    absent = missing(loaded)
    for line in absent:
        click.echo(f"hawk: an agent would not start with this: {line}", err=True)
    return 2 if absent and file is not None else 0


@config.command()
def doc() -> None:
    """Prints the reference page, docs/config.md."""
    from hawk.config_text import reference

    click.echo(reference(), nl=False)
