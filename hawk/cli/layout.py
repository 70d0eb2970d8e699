"""`hawk layout`: the layouts that this installation knows."""

from __future__ import annotations

import click


@click.group()
def layout() -> None:
    """Lists layouts, and shows what one does."""


@layout.command(name="list")
def list_() -> None:
    """Prints the name of each layout and what it is."""
    from hawk.layouts.library import load, names

    known = names()
    width = max(len(name) for name in known)
    for name in known:
        click.echo(f"{name:<{width}}  {load(name).summary}".rstrip())


@layout.command()
@click.argument("name")
def show(name: str) -> None:
    """Prints a layout, by its name or by the path of a .toml file, and where its elements land."""
    from hawk.layouts.describe import describe
    from hawk.layouts.library import load

    click.echo(describe(load(name)))
