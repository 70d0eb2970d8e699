"""`hawk bench`: measurements that anyone can repeat.

Each benchmark is a module of `hawk.bench` with `run(...)`, which returns a result that has `to_dict()`, and
`render(result, console)`, which prints it as tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import click

from hawk.cli.ended import put_away

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def bench() -> None:
    """Measures what this machine does; figures of one run compare with each other only."""


def _json(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Prints one JSON object instead of tables.")(
        command
    )


def _size(_context: click.Context, option: click.Parameter, value: Any) -> Any:
    """A click callback: one size or several, as bytes."""
    from hawk.errors import InvalidArgument
    from hawk.units import parse_size

    try:
        return tuple(parse_size(v) for v in value) if isinstance(value, tuple) else parse_size(value)
    except InvalidArgument as error:
        raise click.BadParameter(str(error), param=option) from None


def _rate(_context: click.Context, option: click.Parameter, value: str | None) -> float | None:
    """A click callback: bytes a second."""
    from hawk.errors import InvalidArgument
    from hawk.units import parse_rate

    try:
        return None if value is None else parse_rate(value)
    except InvalidArgument as error:
        raise click.BadParameter(str(error), param=option) from None


_sizes = click.option(
    "--size",
    "sizes",
    multiple=True,
    callback=_size,
    help="Size of a cache, such as 80MB; may be given again.",
)
_transports = click.option(
    "--transport", "transports", multiple=True, help="Transport to measure; may be given again."
)
_transports_or_all = click.option(
    "--transport",
    "transports",
    multiple=True,
    help='Transport to measure; may be given again. "all": the bytes alone over every one that can be used here, '
    "beside the engines that some stand on.",
)
_five_runs = click.option(
    "--runs", type=click.IntRange(1, 1000), help="Measured runs of everything.  [default: 5]"
)


def _bench(module: str, as_json: bool, **options: Any) -> None:
    """Runs one benchmark with the options that were given; the others keep the module's own defaults."""
    from rich.console import Console

    from hawk.bench.samples import stamped

    benchmark = import_module(f"hawk.bench.{module}")
    with put_away():
        result = benchmark.run(**{key: value for key, value in options.items() if value not in (None, ())})
    if as_json:
        click.echo(json.dumps(stamped(module, result.to_dict()), indent=2))
    else:
        benchmark.render(result, Console())


@bench.command()
@_sizes
@_transports_or_all
@_five_runs
@click.option("--quick", is_flag=True, help="One run of the first size: does it work, not how fast is it.")
@click.option(
    "--devices",
    help='Two GPUs, such as "cuda:0,cuda:1": into pages or channels of the other, by way of the host or straight; '
    '"host,host": memory of the host stands in for them.',
)
@click.option("--pace", callback=_rate, help="With --devices: rate of the slower link.  [default: 25GB/s]")
@_json
def transfer(
    as_json: bool,
    sizes: tuple[int, ...],
    transports: tuple[str, ...],
    devices: str | None,
    pace: float | None,
    **options: Any,
) -> None:
    """Whole transfers and the bytes alone, beside plain sockets and a memcpy of the same bytes."""
    if devices is None:
        if pace is not None:
            raise click.UsageError("--pace is for --devices")
        if "all" not in transports:
            _bench("transfer", as_json, sizes=sizes, transports=transports, **options)
        elif len(transports) == 1:
            _bench("engines", as_json, sizes=sizes, **options)
        else:
            raise click.UsageError('"all" has every transport in it; leave the others out')
    elif transports:
        raise click.UsageError(
            "--devices measures the transports that its configurations have; leave --transport out"
        )
    else:
        _bench("between", as_json, sizes=sizes, devices=devices, pace=pace, **options)


@bench.command()
@click.option(
    "--channels",
    type=click.IntRange(2, 1024),
    default=8,
    show_default=True,
    help="Memory channels of the device.",
)
@click.option(
    "--capacity",
    default="32GiB",
    callback=_size,
    show_default=True,
    help="Bytes in all channels together; none are touched.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sequence of requests.")
@_json
def fragmentation(as_json: bool, channels: int, capacity: int, seed: int) -> None:
    """One contiguous receive buffer per tensor, against one region per channel: which fails first, and why."""
    _bench("fragmentation", as_json, channels=channels, capacity=capacity, seed=seed)


@bench.command()
@click.option(
    "--nodes",
    "nodes",
    type=click.IntRange(2),
    multiple=True,
    help="Nodes of a cluster; may be given again.  [default: 10, 100, 1000]",
)
@click.option("--requests", type=click.IntRange(1), help="Requests on each.  [default: 20000]")
@click.option("--seed", type=click.IntRange(0), help="Of all that is random.  [default: 0]")
@_json
def simulator(as_json: bool, **options: Any) -> None:
    """What simulating serving costs: events a request and time an event, as a cluster grows."""
    _bench("simulator", as_json, **options)


@bench.command()
@click.option(
    "--tokens",
    multiple=True,
    type=click.IntRange(1, 1 << 20),
    help="Tokens of a request; may be given again.  [default: 64, 2048, 8192]",
)
@click.option("--runs", type=click.IntRange(1, 1000), help="Measured jobs of each size.  [default: 15]")
@click.option(
    "--chunk",
    callback=lambda c, o, v: None if v is None else _size(c, o, v),
    help="Bytes of a chunk at most.  [default: 64MiB]",
)
@click.option("--quick", is_flag=True, help="One job of the first size: does it work, not how fast is it.")
@_json
def chunks(as_json: bool, **options: Any) -> None:
    """What a chunk of a GPU costs the processors, over a driver that does nothing; needs no GPU."""
    _bench("chunks", as_json, **options)


@bench.command()
@click.option("--device", help='The GPU.  [default: "cuda:0"]')
@click.option(
    "--tokens",
    multiple=True,
    type=click.IntRange(1, 1 << 20),
    help="Tokens of the request; may be given again.  [default: 2048, 8192]",
)
@click.option("--runs", type=click.IntRange(1, 1000), help="Rounds, each of every way.  [default: 7]")
@click.option(
    "--chunk",
    callback=lambda c, o, v: None if v is None else _size(c, o, v),
    help="Bytes of a chunk at most.  [default: 64MiB]",
)
@click.option(
    "--agent",
    multiple=True,
    type=click.Choice(("embedded", "apart")),
    help="In the engine's process, or in one of its own; both by default.",
)
@click.option(
    "--into", help="A GPU that requests go to, over a link of 25 GB/s; by default they go over shm."
)
@click.option("--quick", is_flag=True, help="One round of 64 tokens: does it work, not how fast is it.")
@_json
def overlap(as_json: bool, **options: Any) -> None:
    """What a transfer from a GPU costs the prefill beside it, and what of it is left then; needs CuPy and torch."""
    _bench("overlap", as_json, **options)


@bench.command()
@click.option(
    "--size-mb",
    type=click.IntRange(1, 1 << 20),
    help="Size of K or V in bf16, MiB; up to ten times that is used.  [default: 128]",
)
@click.option(
    "--repeats", type=click.IntRange(1, 1000), help="How often each thing is measured.  [default: 7]"
)
@click.option("--pair", help="Only pairs or groups that hold this text, or match it as a pattern.")
@click.option("--quick", is_flag=True, help="16 MiB, three times.")
@click.option(
    "--device", help='A GPU instead of one core, such as "cuda:0": the pairs that have goals there.'
)
@_json
def retile(as_json: bool, device: str | None, **options: Any) -> None:
    """Conversion between layouts on one core, every pair that real use has, beside a plain copy."""
    if device is None:
        _bench("retile", as_json, **options)
    else:
        _bench("retile_cuda", as_json, device=device, **options)


@bench.command()
@_transports
@click.option("--runs", type=click.IntRange(1, 100_000), help="Single jobs.  [default: 200]")
@click.option("--at-once", type=click.IntRange(1, 100_000), help="Concurrent jobs.  [default: 1000]")
@click.option(
    "--queued",
    multiple=True,
    type=click.IntRange(1, 100_000),
    help="Jobs in line; may be given again.  [default: 100, 1000, 10000]",
)
@click.option("--quick", is_flag=True, help="A little of each: does it work, not how fast is it.")
@_json
def jobs(as_json: bool, **options: Any) -> None:
    """Many small jobs: first byte beside the agents' own round trip, jobs a second, the cost of one more in line."""
    _bench("jobs", as_json, **options)


@bench.command()
@click.option("--size", callback=_size, default="80MB", show_default=True, help="Size of a cache.")
@click.option(
    "--way", "ways", multiple=True, help='A whole job to measure, such as "shm, full"; may be given again.'
)
@_five_runs
@click.option("--quick", is_flag=True, help="One run of 8 MB: does it work, not how fast is it.")
@_json
def integrity(as_json: bool, **options: Any) -> None:
    """What checks, scrubbing and TLS cost: jobs and bytes with and without, in turn."""
    _bench("integrity", as_json, **options)


@bench.command()
@click.option("--tokens", type=click.IntRange(8), help="Tokens of a request.  [default: 8192]")
@click.option("--layers", type=click.IntRange(2), help="Layers of the model.  [default: 80]")
@click.option("--runs", type=click.IntRange(1, 10000), help="Plans of every size.  [default: 25]")
@_json
def plan(as_json: bool, **options: Any) -> None:
    """Planning with fresh block tables: shapes never seen, shapes seen before, and how it grows with the segments."""
    _bench("plan", as_json, **options)


@bench.command()
@click.option(
    "--segments", type=click.IntRange(64, 10_000_000), default=160_000, show_default=True, help="In a batch."
)
@click.option("--runs", type=click.IntRange(1, 1000), default=5, show_default=True, help="Measured runs.")
@click.option(
    "--mebibytes",
    type=click.IntRange(1, 65536),
    default=64,
    show_default=True,
    help="MiB that are read at each size, where there is an RDMA device.",
)
@_json
def verbs(as_json: bool, segments: int, runs: int, mebibytes: int) -> None:
    """RDMA work requests: what building and handing over costs, and READs where there is a device."""
    _bench("verbs", as_json, segments=segments, runs=runs, mebibytes=mebibytes)


@bench.command()
@click.option("--etcd", multiple=True, required=True, help="Member of an etcd cluster; may be given again.")
@click.option(
    "--peers",
    multiple=True,
    type=click.IntRange(1, 10_000),
    help="Agents that are registered; may be given again.  [default: 10, 100, 1000]",
)
@click.option("--seconds", type=click.FloatRange(0.1, 600), help="How long it stays idle.  [default: 10]")
@_json
def directory(as_json: bool, **options: Any) -> None:
    """What being registered in etcd beside many other agents costs one agent: time, processor, memory."""
    _bench("directory", as_json, **options)


@bench.command()
@click.option("--device", default="cuda:0", show_default=True, help="The GPU.")
@_sizes
@_transports
@_five_runs
@click.option("--quick", is_flag=True, help="One run of the first size over the first transport.")
@_json
def gpu(as_json: bool, **options: Any) -> None:
    """Whole jobs from a GPU into the emulated device, beside plain copies, and while the GPU computes."""
    _bench("gpu", as_json, **options)


@bench.command()
@click.option("--python", help="Python with vLLM.  [default: HAWK_VLLM_PYTHON, or .venv-vllm of the clone]")
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(2, 8192),
    multiple=True,
    help="Tokens of a prompt; may be given again.  [default: 64, 512, 2048]",
)
@click.option(
    "--way",
    "ways",
    multiple=True,
    help="alone, hawk, hawk-early, example or nixl; may be given again.  [default: all]",
)
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float32"]), help="Of the model.  [default: bfloat16]"
)
@_five_runs
@click.option("--quick", is_flag=True, help="One run of the first length: does it work, not how fast is it.")
@_json
def vllm(as_json: bool, **options: Any) -> None:
    """Time to the first token of pairs of vLLM engines on CPUs: HAWK, vLLM's own connectors, and one engine alone."""
    _bench("ttft", as_json, **options)


@bench.command()
@click.option("--python", help="Python with vLLM.  [default: HAWK_VLLM_PYTHON, or .venv-vllm of the clone]")
@click.option(
    "--fraction",
    "fractions",
    type=float,
    multiple=True,
    help="Load, as a part of what the prefill engine can do; may be given again.  [default: 0.2, 0.4, 0.6, 0.8]",
)
@click.option(
    "--requests",
    type=click.IntRange(10, 100_000),
    help="Requests at each load; a tenth of them counts for nothing.  [default: 160]",
)
@click.option("--runs", type=click.IntRange(1, 1000), help="Single requests of each length.  [default: 5]")
@click.option("--seed", type=click.IntRange(0), help="Of prompts, lengths and arrivals.  [default: 11]")
@click.option(
    "--again",
    type=click.Path(exists=True, dir_okay=False),
    help="JSON of an earlier run: nothing is measured, the simulator is asked anew.",
)
@click.option(
    "--quick", is_flag=True, help="16 requests at two loads: does it work, not how well is it foretold."
)
@_json
def serving(as_json: bool, **options: Any) -> None:
    """A pair of vLLM engines on CPUs under Poisson load, beside what the simulator says of it from single requests."""
    _bench("load", as_json, **options)
