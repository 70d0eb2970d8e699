"""`hawk keys`: the key pairs that agents know each other by."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def keys() -> None:
    """Makes the keys that control connections over tcp are secured with."""


@keys.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--name", default="agent", show_default=True, help="The agent's name, and the files'.")
def new(directory: Path, name: str) -> None:
    """Writes a new key pair, NAME.key and NAME.pub, into DIR; overwrites nothing."""
    from hawk.control.keys import new_pair

    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    private, public = new_pair(directory, name)
    click.echo(f"{private}  this agent's own: name it as security.key_file")
    click.echo(f"{public}  for its peers: add its line to the file that they name as security.peers_file")
