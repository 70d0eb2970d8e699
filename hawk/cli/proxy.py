"""`hawk serve-proxy`: one address in front of engines that prefill and engines that decode."""

from __future__ import annotations

import click

_URL = "http://HOST:PORT"


@click.command(name="serve-proxy")
@click.option(
    "--listen", default="127.0.0.1:8000", show_default=True, help="HOST:PORT for clients; port 0: any."
)
@click.option(
    "--prefill",
    multiple=True,
    required=True,
    metavar=_URL,
    help="An engine that prefills; of several each takes its turn.",
)
@click.option(
    "--decode", multiple=True, required=True, metavar=_URL, help="An engine that decodes; the same."
)
@click.option(
    "--sequential",
    is_flag=True,
    help="Decode only after prefill: nothing overlaps but chunks of the transfer.",
)
def serve_proxy(listen: str, prefill: tuple[str, ...], decode: tuple[str, ...], sequential: bool) -> None:
    """Sends each request to an engine that prefills and one that decodes, both at once, until SIGINT or SIGTERM.

    The engines are vLLM's servers with HawkConnector.  Answers stream through; a client that leaves ends both sides.
    """
    import asyncio

    import uvloop

    from hawk.integrations.http import Server
    from hawk.integrations.proxy import Proxy, silent
    from hawk.observe.log import configure

    configure()
    here = Server.parse(listen, "--listen", "HOST:PORT")
    prefills = [Server.parse(address, "--prefill") for address in prefill]
    decodes = [Server.parse(address, "--decode") for address in decode]

    async def serve() -> None:
        import signal

        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        proxy = Proxy(prefills, decodes, early=not sequential)
        port = await proxy.start(here.host, here.port)
        click.echo(str(Server(here.host, port)))
        for server in await silent([*prefills, *decodes]):
            click.echo(f"hawk: no server answers yet at {server}", err=True)
        await stop.wait()
        await proxy.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
