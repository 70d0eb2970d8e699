"""`hawk layout`: the layouts that this installation knows, what moving between two does, and doing it to files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hawk.cli.operate import print_json

if TYPE_CHECKING:
    from hawk.layouts import CacheShape


@click.group()
def layout() -> None:
    """Lists layouts, shows and explains what they do, converts files.

    A layout is named as `hawk layout list` names it, or by the path of a .toml file.
    """


@layout.command(name="list")
def list_() -> None:
    """Prints the name of each layout and what it is."""
    from hawk.layouts.library import load, names

    known = names()
    width = max(len(name) for name in known)
    for name in known:
        click.echo(f"{name:<{width}}  {load(name).summary}".rstrip())


@layout.command()
def models() -> None:
    """Prints the models that `explain --model` knows, and the config that each one's figures are from."""
    from hawk.models import load_model, model_names, model_source

    known = [load_model(name) for name in model_names()]
    width = max(len(m.name) for m in known)
    for m in known:
        windows = [k for k in m.kinds if k.window is not None]
        seen = "".join(f", {len(k.layers)} with a window of {k.window:,}" for k in windows)
        source, confirmed = model_source(m.name)
        doubt = "" if confirmed else ", not confirmed"
        click.echo(
            f"{m.name:<{width}}  {m.layers:>3} layers{seen}, {m.heads} KV heads of {m.dim}{doubt}  {source}"
        )


@layout.command()
@click.option("--json", "as_json", is_flag=True, help="Prints one JSON list instead of lines.")
def caches(as_json: bool) -> None:
    """Prints the caches known by name: order of K, number types, block sizes, shares of the heads."""
    from hawk.model_caches import cache_names, load_cache

    known = [load_cache(name) for name in cache_names()]
    if as_json:
        print_json(known)
        return
    width = max(len(c.name) for c in known)
    for c in known:
        sizes, tp = (", ".join(map(str, numbers)) for numbers in (c.block_sizes, c.tp))
        click.echo(
            f"{c.name:<{width}}  {c.layout}, K in {c.k_order} order, {' or '.join(c.codecs)}, blocks {sizes}, TP {tp}"
        )


def _pair(_context: click.Context, option: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """A click callback: `4:8`, source then target; one number stands for both."""
    if value is None:
        return None
    try:
        numbers = [int(n) for n in value.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or min(numbers) < 1:
        raise click.BadParameter(
            f"{value!r} is not a number above 0, or two with a colon between", param=option
        )
    return numbers[0], numbers[-1]


def _params(_context: click.Context, option: click.Parameter, value: tuple[str, ...]) -> dict[str, int]:
    """A click callback: `R=64`, any number of them."""
    found = {}
    for text in value:
        name, _, number = text.partition("=")
        if not name or not (number.isascii() and number.isdigit() and len(number) < 20):
            raise click.BadParameter(f"{text!r} is not a name, = and a number", param=option)
        found[name] = int(number)
    return found


def _shape_options(command: Any) -> Any:
    for name, text in (
        ("--layers", "Layers of the file's cache."),
        ("--kvs", "2 where K and V are both kept, 1 where there is one tensor."),
        ("--heads", "KV heads."),
        ("--dim", "Elements of a head."),
        ("--blocks", "Blocks of the paged cache."),
    ):
        command = click.option(name, type=click.IntRange(1), help=text)(command)
    return command


def _param_options(command: Any) -> Any:
    for name, whose in (("--source-param", "source"), ("--param", "target")):
        command = click.option(
            name,
            "source_params" if whose == "source" else "params",
            multiple=True,
            callback=_params,
            metavar="NAME=N",
            help=f"A parameter of the {whose}'s layout, as R=64.",
        )(command)
    return command


@layout.command()
@click.argument("name")
@_shape_options
@click.option("--block-size", type=click.IntRange(1), help="Tokens of a block.")
@click.option("--codec", help="Codec.  [default: the layout's]")
@click.option(
    "--param", "params", multiple=True, callback=_params, metavar="NAME=N", help="A parameter, as R=64."
)
def show(name: str, codec: str | None, params: dict[str, int], **extents: int | None) -> None:
    """Prints a layout, by its name or by the path of a .toml file, and where its elements land.

    They are drawn for a small cache, or for the one that the options make of it.
    """
    from dataclasses import replace

    from hawk.layouts.describe import EXAMPLE, describe
    from hawk.layouts.library import load

    said = {axis: extent for axis, extent in extents.items() if extent is not None}
    shape = replace(EXAMPLE, **said) if said else None
    click.echo(describe(load(name), shape, codec=codec, params=params))


@layout.command()
@click.argument("source")
@click.argument("target")
@click.option("--model", required=True, help="A name of `hawk layout models`, a .toml file or a config.json.")
@click.option(
    "--tp",
    callback=_pair,
    metavar="N[:N]",
    default="1",
    show_default=True,
    help="Workers of a stage, as 4:8.",
)
@click.option(
    "--pp", callback=_pair, metavar="N[:N]", default="1", show_default=True, help="Pipeline stages, as 1:2."
)
@click.option(
    "--tokens", type=click.IntRange(1), default=8192, show_default=True, help="Tokens of the request."
)
@click.option(
    "--first", type=click.IntRange(0), default=0, show_default=True, help="First token that is not there yet."
)
@click.option(
    "--block-size",
    callback=_pair,
    metavar="N[:N]",
    default="16:64",
    show_default=True,
    help="Tokens of a block.",
)
@click.option(
    "--channels", type=click.IntRange(1, 65536), help="Channels of the target.  [default: the layout's]"
)
@click.option("--codec", help="Codec of the target.  [default: the layout's]")
@click.option("--source-codec", help="Codec of the source.  [default: the layout's]")
@click.option("--source-channels", type=click.IntRange(1, 65536), help="Channels of the source.")
@_param_options
@click.option(
    "--move",
    "move_support",
    type=click.Choice(["none", "host", "device"]),
    default="none",
    show_default=True,
    help="Who can move bytes inside a channel of the target.",
)
@click.option("--move-cost", type=float, default=1e-10, show_default=True, help="Seconds a byte moved so.")
@click.option(
    "--bandwidth", type=float, default=4e9, show_default=True, help="Bytes a second of the transport."
)
@click.option("--request-cost", type=float, default=2e-6, show_default=True, help="Seconds a work request.")
@click.option(
    "--max-sge", type=click.IntRange(1), default=1024, show_default=True, help="Places a request may name."
)
@click.option("--push", is_flag=True, help="The source writes; otherwise the target reads.")
@click.option("--chunk", "max_bytes", default="256MiB", show_default=True, help="Largest chunk.")
def explain(
    source: str,
    target: str,
    model: str,
    tp: tuple[int, int],
    pp: tuple[int, int],
    tokens: int,
    first: int,
    block_size: tuple[int, int],
    channels: int | None,
    codec: str | None,
    source_codec: str | None,
    source_channels: int | None,
    params: dict[str, int],
    source_params: dict[str, int],
    push: bool,
    max_bytes: str,
    **costs: Any,
) -> None:
    """Says what moving a model's cache from one layout to another takes, and why in that way; nothing is moved."""
    from hawk.layouts.library import load
    from hawk.models import load_model
    from hawk.plan.shards import Grid
    from hawk.plan.whole import explain_model
    from hawk.units import parse_size

    found = explain_model(
        load_model(model),
        load(source),
        load(target),
        source=Grid(tp[0], pp[0]),
        target=Grid(tp[1], pp[1]),
        tokens=tokens,
        first=first,
        block_sizes=block_size,
        src_options={"codec": source_codec, "channels": source_channels, "params": source_params},
        dst_options={"codec": codec, "channels": channels, "params": params},
        direction="write" if push else "read",
        max_bytes=parse_size(max_bytes),
        **costs,
    )
    click.echo(str(found))


@layout.command()
@click.argument("source")
@click.argument("target")
@click.argument("infile", type=click.Path(exists=True, dir_okay=False, path_type=str))
@click.argument("outfile", type=click.Path(dir_okay=False, path_type=str))
@_shape_options
@click.option(
    "--block-size",
    callback=_pair,
    metavar="N[:N]",
    help="Tokens of a block, as 16:64; the target's is the source's if not given.",
)
@click.option("--tokens", type=click.IntRange(1), help="How many tokens, from the first on.  [default: all]")
@click.option("--codec", help="Codec of the target.  [default: the layout's]")
@click.option(
    "--source-codec", help="Codec of the source.  [default: by the file's dtype, else the layout's]"
)
@click.option("--channels", type=click.IntRange(1, 65536), help="Channels of the target.")
@click.option("--source-channels", type=click.IntRange(1, 65536), help="Channels of the source.")
@_param_options
@click.option(
    "--tensor", is_flag=True, help="The file is a plain tensor [..., rows, columns], such as weights."
)
@click.option("--threads", type=click.IntRange(1, 256), default=1, show_default=True)
def convert(
    source: str,
    target: str,
    infile: str,
    outfile: str,
    block_size: tuple[int, int] | None,
    tokens: int | None,
    codec: str | None,
    source_codec: str | None,
    channels: int | None,
    source_channels: int | None,
    params: dict[str, int],
    source_params: dict[str, int],
    tensor: bool,
    threads: int,
    **extents: int | None,
) -> None:
    """Converts the cache in one .npy file into another layout, block i into block i.

    Where a layout's order is made of plain axes its file is an array with these axes, those of its buffers first
    (vllm/nhd over bf16: uint16 [layer, kv, block, slot, head, dim]), and the shape is read from it.  All other files
    are uint8 [buffers, channels, bytes], or flat where buffers differ in size (as with scales of their own): all
    buffers of elements, then all of scales.  Their shape has to be said.
    """
    import numpy as np

    from hawk import convert as c
    from hawk.errors import InvalidArgument
    from hawk.layouts.library import load
    from hawk.plan.types import Selection

    if not outfile.endswith(".npy"):
        raise InvalidArgument("the file needs the ending .npy", field="outfile", got=outfile)
    try:
        array = np.load(infile, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InvalidArgument("this is no .npy file", field=infile, got=str(error)[:200]) from None
    if not isinstance(array, np.ndarray):
        array.close()
        raise InvalidArgument("this is no .npy file", field=infile, got="an archive of several")
    declared = load(target)
    options = {"codec": source_codec, "channels": source_channels, "params": source_params}
    if tensor:
        for field, name in (("source", source), ("target", target)):
            if len(load(name).pieces) > 1:
                raise InvalidArgument(
                    "this layout tells K from V, and a tensor is neither",
                    field=field,
                    got=name,
                    expected="a layout with one [[piece]]",
                )
        shape: CacheShape | None = c.tensor_shape(array.shape)
    else:
        shape = _said(extents, None if block_size is None else block_size[0])
    src = c.compile_for(array, source, shape=shape, **options)
    dst = c.retarget(
        src,
        declared,
        block_size=None if block_size is None else block_size[1],
        codec=codec,
        channels=channels,
        params=params,
    )
    selection = None if tokens is None else Selection(0, src.shape.layers, 0, tokens)
    dtype, form = c.array_form(dst, declared)
    # The file may be there already, even be the one that is read: it is replaced by a whole one, or stays.
    final = os.path.realpath(outfile)
    part = f"{final}.{os.getpid()}.part"
    try:
        out = np.lib.format.open_memmap(part, mode="w+", dtype=dtype, shape=form)
        c.convert(array, src, dst, selection=selection, out=out, threads=threads)
        out.flush()
        os.replace(part, final)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    click.echo(f"{outfile}: {dtype} {list(form)}, {dst.name} [{dst.codec.name}], {out.nbytes:,} bytes")


def _said(extents: dict[str, int | None], block_size: int | None) -> CacheShape | None:
    """The shape that the options give; None where they give none."""
    from hawk.errors import InvalidArgument
    from hawk.layouts import CacheShape

    said = {k: v for k, v in extents.items() if v is not None}
    if not said:
        return None
    said = {"layers": 1, "kvs": 2, **said} | ({} if block_size is None else {"block_size": block_size})
    missing = [k for k in ("heads", "dim", "block_size", "blocks") if k not in said]
    if missing:
        raise InvalidArgument(
            "the shape is not whole",
            field=f"--{missing[0].replace('_', '-')}",
            expected="a number",
            got="nothing",
        )
    return CacheShape(**said)
