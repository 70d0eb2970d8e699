"""How engines keep the KV caches of known models: the order of K, number types, block sizes, who shares heads.

    cache = load_cache("tt_transformers/llama-3.1-8b")
    spec = cache.spec(blocks=1024, tp_rank=0, tp_size=4, channels=8)
    cache.check(spec)                       # says which field of a spec the model could not read

The facts are data: `layouts/models/caches.toml`, beside the extents in `models.toml`, or a file of one's own.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.arguments import instance
from hawk.cache_spec import CacheSpec
from hawk.errors import InvalidArgument, LayoutError
from hawk.models import load_model, one_table, read_tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from hawk.layouts import CompiledLayout
    from hawk.plan.shards import Model

ORDERS = ("hf", "meta")
_KEYS = ("source", "layout", "request", "k_order", "rotary", "codecs", "block_sizes", "tp")
_OWN_KEYS = ("model", *_KEYS)


@dataclass(frozen=True, slots=True)
class ModelCache:
    """How one engine keeps one model's cache.

    name         ENGINE/MODEL, or the table of one's own file
    model        extents of the whole model's cache
    layout       the layout of its pages, a name or a path
    request      the layout of a request by itself, from which pages are filled; empty if the engine has none
    k_order      "hf" or "meta": how the elements of a head of K follow each other
    rotary       width of a head's rotary part, which is what "meta" interleaves
    codecs       number types that the engine's settings choose among, the default first
    block_sizes  tokens of a block, the default first
    tp           over how many workers the heads may be split
    source       where the engine says so
    """

    name: str
    model: Model
    layout: str
    k_order: str
    rotary: int
    codecs: tuple[str, ...]
    block_sizes: tuple[int, ...]
    tp: tuple[int, ...]
    request: str = ""
    source: str = ""

    @property
    def codec(self) -> str:
        """The number type unless another was chosen."""
        return self.codecs[0]

    @property
    def block_size(self) -> int:
        """Tokens of a block unless another size was chosen."""
        return self.block_sizes[0]

    def choose(self, *, codec: str | None = None, block_size: int | None = None) -> ModelCache:
        """With these of what the engine offers, and no others; raises `InvalidArgument` naming the field."""
        chosen = self
        if codec is not None:
            _one_of(codec, self.codecs, "codec", self.name)
            chosen = replace(chosen, codecs=(codec,))
        if block_size is not None:
            _one_of(block_size, self.block_sizes, "block_size", self.name)
            chosen = replace(chosen, block_sizes=(block_size,))
        return chosen

    def with_layers(self, layers: int) -> ModelCache:
        """The same of a model that has so many layers, such as one cut short for a trial."""
        return replace(self, model=replace(self.model, layers=layers, kinds=()))

    def spec(
        self,
        blocks: int,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        channels: int | None = None,
        align: int | None = None,
    ) -> CacheSpec:
        """The cache of one worker of `tp_size`, of `blocks` blocks; raises `InvalidArgument` naming the field."""
        _one_of(tp_size, self.tp, "tp_size", self.name)
        whole = self._whole(blocks, channels, align)
        return whole if tp_size == 1 else whole.shard(tp_rank=tp_rank, tp_size=tp_size)

    def _whole(self, blocks: int, channels: int | None = None, align: int | None = None) -> CacheSpec:
        """Of all heads."""
        return CacheSpec(
            layers=self.model.layers,
            heads=self.model.heads,
            dim=self.model.dim,
            kvs=self.model.kvs,
            block_size=self.block_size,
            blocks=blocks,
            layout=self.layout,
            codec=self.codec,
            channels=channels,
            align=align,
            params={} if self.rotary == self.model.dim else {"R": self.rotary},
        )

    def request_spec(self, tokens: int) -> CacheSpec:
        """Room for one request of up to `tokens` tokens by itself, of all heads, in whole blocks.

        Raises `InvalidArgument` where the engine takes none such.
        """
        if not self.request:
            raise InvalidArgument(
                f"{self.name} has no layout of a request by itself", field="request", expected="a layout"
            )
        blocks = -(-max(1, tokens) // self.block_size)
        return self._whole(blocks).replace(layout=self.request)

    def check(self, spec: CacheSpec, *, layers: int | None = None) -> None:
        """Raises `InvalidArgument` naming the field of `spec` by which this model would read other numbers.

        layers    how many of the model's layers the cache holds, where it is not all of them or says so by its part
        """
        instance(spec, CacheSpec, "spec", "a CacheSpec")
        held = layers or (self.model.layers if spec.part is None else len(spec.part.layers))
        for field, got, expected in (
            ("layers", spec.layers, held),
            ("dim", spec.dim, self.model.dim),
            ("kvs", spec.kvs, self.model.kvs),
        ):
            if got != expected:
                raise _wrong(self.name, field, got, expected)
        whole = spec.heads if spec.part is None else spec.part.of_heads
        if whole != self.model.heads:
            hint = None if spec.part else "A worker's share of the heads is made by CacheSpec.shard"
            raise _wrong(self.name, "heads", whole, self.model.heads, hint)
        if spec.part is not None:
            shares = [self.model.heads // n for n in self.tp]
            if spec.heads not in shares:
                raise _wrong(self.name, "heads", spec.heads, " or ".join(map(str, shares)))
        compiled = spec.compile()
        if compiled.codec.name not in self.codecs:
            raise _wrong(self.name, "codec", compiled.codec.name, " or ".join(self.codecs))
        if spec.block_size not in self.block_sizes:
            raise _wrong(self.name, "block_size", spec.block_size, " or ".join(map(str, self.block_sizes)))
        if self.model.kvs == 2:
            order, rotary = k_order(compiled)
            wanted = (self.k_order, self.rotary if self.k_order == "meta" else self.model.dim)
            if (order, rotary) != wanted:
                raise _wrong(self.name, "k_order", _order(order, rotary), _order(*wanted))


def k_order(layout: CompiledLayout) -> tuple[str, int]:
    """How a layout keeps the elements of K's heads, and of how many of them that is said: the rotary width.

    Seen from where V's elements lie: "hf" if those of K lie in the same places, "meta" if element i of the first
    half lies where V's 2i does and that of the second half behind it; else "other".
    """
    dim = layout.shape.dim
    if layout.shape.kvs < 2:
        return "hf", dim
    k, v = (_places(layout, kv) for kv in (0, 1))
    index = np.arange(dim, dtype=np.int64)
    if np.array_equal(k, v):
        return "hf", dim
    where = {place: i for i, place in enumerate(map(tuple, v.tolist()))}
    moved = np.asarray([where.get(tuple(place), -1) for place in k.tolist()], dtype=np.int64)
    # The last element of an interleaved part keeps its place, and so do those behind the part: the width is one more
    # than what reaches to the last that does not.
    rotary = int(np.flatnonzero(moved != index)[-1]) + 2
    if rotary % 2 == 0 and rotary <= dim and np.array_equal(moved, _interleaved(index, rotary // 2)):
        return "meta", rotary
    return "other", dim


def _interleaved(index: NDArray[np.int64], half: int) -> NDArray[np.int64]:
    low, high = index < half, (index >= half) & (index < 2 * half)
    return np.where(low, 2 * index, np.where(high, 2 * (index - half) + 1, index))


def _places(layout: CompiledLayout, kv: int) -> NDArray[np.int64]:
    """What each element of a head adds to the page and to the position in it, `[dim, 2]`."""
    piece = layout.piece(kv)
    index = np.arange(layout.shape.dim, dtype=np.int64)
    return np.stack([piece.page_term("dim", index), piece.inside_term("dim", index)], axis=1)


def _order(order: str, rotary: int) -> str:
    return order if order != "meta" else f"meta, of {rotary} elements"


def _wrong(name: str, field: str, got: object, expected: object, hint: str | None = None) -> InvalidArgument:
    return InvalidArgument(
        f"{name} does not keep its cache so", field=field, got=got, expected=expected, hint=hint
    )


def _one_of(value: object, known: Sequence[object], field: str, name: str) -> None:
    if value not in known:
        raise _wrong(name, field, value, " or ".join(map(str, known)))


# -- reading ---------------------------------------------------------------------------------------------


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    """Tables by ENGINE/MODEL, with what the engine says for all."""
    text = resources.files("hawk.layouts").joinpath("models/caches.toml").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = {}
    for engine, table in tomllib.loads(text).items():
        common = {key: value for key, value in table.items() if key != "models"}
        for model, own in table["models"].items():
            found[f"{engine}/{model}"] = {"model": model, **common, **own}
    return found


def cache_names() -> list[str]:
    """Names that `load_cache` knows, in the order of the file."""
    return list(_shipped())


def load_cache(name_or_path: str) -> ModelCache:
    """The cache of that name, or the only one of a `.toml` file of one's own.

    Such a file holds one table like those of `layouts/models/caches.toml`, and `model`: a name of `models.toml`, or
    the path of a file as `hawk.models.load_model` takes it.  Raises `InvalidArgument` naming the key.
    """
    if instance(name_or_path, str, "cache", "a name, or the path of a file").endswith(".toml"):
        return _from_file(Path(name_or_path))
    known = _shipped()
    if name_or_path not in known:
        raise InvalidArgument(
            "no cache of this name is known",
            field="cache",
            got=name_or_path[:200],
            expected="one of " + ", ".join(known),
            hint="A file of one's own is named by a path that ends in .toml",
        )
    return _from_table(name_or_path, known[name_or_path], name_or_path)


def _from_file(path: Path) -> ModelCache:
    name, table = one_table(read_tables(path), path)
    return _from_table(name, table, f"{path}: {name}")


def _from_table(name: str, table: Mapping[str, Any], origin: str) -> ModelCache:
    for key in table:
        if key not in _OWN_KEYS:
            raise InvalidArgument("unknown key", field=f"{origin}.{key}"[:200], expected=", ".join(_OWN_KEYS))
    for key in ("model", "layout", "k_order"):
        if not isinstance(table.get(key), str):
            raise InvalidArgument("a text is needed", field=f"{origin}.{key}", got=table.get(key))
    if table["k_order"] not in ORDERS:
        raise InvalidArgument(
            "unknown order of K",
            field=f"{origin}.k_order",
            got=table["k_order"],
            expected=" or ".join(ORDERS),
        )
    model = load_model(table["model"])
    rotary = table.get("rotary", model.dim)
    if not _positive(rotary) or rotary % 2 or rotary > model.dim:
        raise InvalidArgument(
            "no rotary width",
            field=f"{origin}.rotary",
            got=rotary,
            expected=f"an even number, at most {model.dim}",
        )
    sizes, tp = (tuple(_list(table, key, origin)) for key in ("block_sizes", "tp"))
    for key, numbers in (("block_sizes", sizes), ("tp", tp)):
        for number in numbers:
            if not _positive(number):
                raise InvalidArgument("a positive integer is needed", field=f"{origin}.{key}", got=number)
    for number in tp:
        if model.heads % number:
            raise InvalidArgument(
                "the heads cannot be split so",
                field=f"{origin}.tp",
                got=number,
                expected=f"a divisor of {model.heads}",
            )
    made = ModelCache(
        name,
        model,
        table["layout"],
        table["k_order"],
        rotary,
        tuple(_list(table, "codecs", origin)),
        sizes,
        tp,
        str(table.get("request", "")),
        str(table.get("source", "")),
    )
    if made.request:
        made.check(made.request_spec(tokens=1))
    for size in made.block_sizes:
        _check_block_size(made.choose(block_size=size), origin)
    # Whether each codec is one, and whether the layout keeps K in the order that the table says.
    for codec in made.codecs:
        made.check(made.choose(codec=codec).spec(blocks=1, tp_size=made.tp[0]))
    return made


def _check_block_size(made: ModelCache, origin: str) -> None:
    """Whether pages hold blocks of this size, and a request by itself has them one behind the other.

    They are, if two blocks take as much of its layout as one of twice the size does: blocks that fill no whole number
    of tiles leave gaps.
    """
    size = made.block_size
    try:
        made.check(made.spec(blocks=1, tp_size=made.tp[0]))
        if made.request:
            two = made.request_spec(2 * size).compile()
            one = made.request_spec(size).replace(block_size=2 * size).compile()
            if two.channel_bytes != one.channel_bytes:
                raise LayoutError(f"{made.request} leaves gaps between blocks of {size} tokens")
    except LayoutError as error:
        raise InvalidArgument(
            f"a layout cannot hold blocks of this size: {error.message}",
            field=f"{origin}.block_sizes",
            got=size,
            expected="a size that layout and request have, such as a multiple of the rows of a tile",
        ) from error


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1 << 20


def _list(table: Mapping[str, Any], key: str, origin: str) -> list[Any]:
    value = table.get(key)
    if not isinstance(value, list) or not value:
        raise InvalidArgument("a list is needed", field=f"{origin}.{key}", got=value)
    return value
