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
    click.echo(
        f"{public}  for its peers: `hawk keys peers` adds it to the file that they name as security.peers_file"
    )


@keys.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option(
    "--days", type=click.IntRange(1, 36500), default=730, show_default=True, help="How long they are valid."
)
def tls(directory: Path, names: tuple[str, ...], days: int) -> None:
    """Writes a certificate for each agent NAME into DIR, for tcp with TLS, and the authority if there is none yet."""
    from hawk.control.certificates import AUTHORITY, new_certificates

    for pem in new_certificates(directory, names, days=days):
        click.echo(
            f"{pem}  and {pem.stem}-tls.key: name them as transport.tcp.tls_cert and tls_key of {pem.stem}"
        )
    click.echo(f"{directory / AUTHORITY}.pem  for all of them: name it as transport.tcp.tls_ca")


@keys.command()
@click.argument("file", metavar="OUT", type=click.Path(path_type=Path, dir_okay=False))
@click.argument(
    "public", metavar="NAME.pub...", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False)
)
def peers(file: Path, public: tuple[Path, ...]) -> None:
    """Adds public keys to the peers file OUT, which is made if it is not there; what stands in it stays."""
    from hawk.control.keys import load_peers, merge_peers

    new = merge_peers(file, public)
    known = len(load_peers(file))
    added = f"added {', '.join(new)}" if new else "nothing to add"
    click.echo(f"{file}: {added}; {known} peer{'' if known == 1 else 's'}")
