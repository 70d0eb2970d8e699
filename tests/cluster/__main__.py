"""`scripts/cluster`: see `tests.cluster.director`."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tests.cluster.director import CUT, DECODE, DIRECTORY, PREFILL, Broken, Director
from tests.cluster.network import Network, NoNetwork, enter
from tests.cluster.nodes import Cluster
from tests.end_to_end.harness import Site
from tests.etcd import EtcdServer

_PORT = 2379


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--plain", is_flag=True, help="Lines instead of a table that is drawn anew.")
@click.option(
    "--break",
    "broken",
    type=click.Choice(["drain"]),
    help="Restarts agents without draining, to see that it shows.",
)
def cluster(plain: bool, broken: str | None) -> None:
    """Two prefill and three decode agents and etcd, each in a network namespace of its own: they find each other and
    share the work, are restarted in turn, and one is cut off and comes back.  Exits 0 if no promise was broken.
    Needs no rights, but iproute2, etcd-server and user namespaces."""
    try:
        enter("tests.cluster", sys.argv[1:])
        network = Network([DIRECTORY, *PREFILL, *DECODE])
    except NoNetwork as lack:
        raise click.ClickException(str(lack)) from lack
    sys.exit(asyncio.run(_run(network, plain or not sys.stdout.isatty(), broken == "drain")))


async def _run(network: Network, plain: bool, hasty: bool) -> int:
    console = Console()
    with tempfile.TemporaryDirectory(prefix="hawk-cluster-") as folder:
        site = Site()
        directory = EtcdServer(
            Path(folder), within=network.within(DIRECTORY), host=network.address(DIRECTORY), port=_PORT
        )
        try:
            directory.start()
            director = Director(Cluster(site, network, directory.url, hasty=hasty), network, console.print)

            async def restart() -> None:
                directory.stop()
                directory.start()

            director.restart_directory = restart  # type: ignore[method-assign]
            if plain:
                await _guarded(director)
            else:
                with Live(get_renderable=lambda: _table(director), console=console, refresh_per_second=4):
                    await _guarded(director)
            if plain:
                console.print(_agents(director))
        finally:
            site.close()
            directory.stop()
    for problem in director.problems:
        console.print(Text(f"BROKEN: {problem}", style="red"))
    if not director.problems:
        console.print(f"every promise held; what failed were jobs with {CUT} while it was cut off")
    return 1 if director.problems else 0


async def _guarded(director: Director) -> None:
    try:
        await director.run()
    except Broken as broken:
        director.problems.append(str(broken))


def _table(director: Director) -> Group:
    return Group(Text(director.now), _agents(director))


def _agents(director: Director) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("agent", "role", "state", "run", "under way", "ready", "not taken", "failed", "ms a job"):
        table.add_column(name, justify="left" if name in ("agent", "role", "state") else "right")
    for node in director.nodes.values():
        counts = node.counts
        mean = f"{counts.seconds / counts.ready * 1e3:.0f}" if counts.ready else ""
        numbers = (node.runs, node.running, counts.ready, counts.refused, counts.failed)
        style = "" if node.state == "up" else "yellow"
        table.add_row(node.name, node.role, node.state, *map(str, numbers), mean, style=style)
    return table


if __name__ == "__main__":
    cluster(prog_name="scripts/cluster")
