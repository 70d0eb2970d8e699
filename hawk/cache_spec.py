"""What a cache is, apart from where its bytes are: a shape, a layout, and which part of a model it holds."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hawk.arguments import instance, shown
from hawk.control.messages import CacheDescr
from hawk.errors import InvalidArgument, LayoutError
from hawk.jobs.caches import write_part
from hawk.layouts import CacheShape, Layout, load
from hawk.plan.part import Part, span

if TYPE_CHECKING:
    from hawk.layouts import CompiledLayout

_BOUNDS: dict[str, int] = {
    "layers": 65_536,
    "heads": 65_536,
    "dim": 1_048_576,
    "block_size": 1_048_576,
    "blocks": 2**31 - 1,
    "kvs": 2,
}
"""The largest value of each extent that can be told to an agent; the smallest is 1."""


def _whole(value: object, field: str, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgument(
            "out of range", field=field, got=shown(value), expected=f"a whole number {low}..{high}"
        )


def _named(layout: object) -> None:
    if not isinstance(layout, str | os.PathLike | Layout):
        raise LayoutError(
            "no layout",
            field="layout",
            got=shown(layout),
            expected="a layout's name, a file's path, or a Layout",
        )


def loaded(layout: str | Layout) -> Layout:
    """The layout that a caller named or gave; raises `LayoutError`."""
    _named(layout)
    return layout if isinstance(layout, Layout) else load(layout)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A KV cache of one worker: `layers` x K and V x `blocks` of `block_size` tokens x `heads` x `dim`.

    part       which heads and layers of the model these are, where a group of workers shares it out; `shard` sets
               it.  None: the cache is the whole model's
    layout     name of a shipped layout (`"vllm/nhd"`), path of a layout file, or a `Layout`
    codec      how elements are stored; the layout's default if None
    channels   memory channels for interleaved layouts; the memory's own if None
    params     parameters of the layout, such as the rotary dimension

    Raises `InvalidArgument`, or `LayoutError` for a layout that is none, naming the field.
    """

    layers: int
    heads: int
    dim: int
    block_size: int
    blocks: int
    layout: str | Layout = "vllm/nhd"
    codec: str | None = None
    kvs: int = 2
    channels: int | None = None
    align: int | None = None
    params: Mapping[str, int] = field(default_factory=dict)
    part: Part | None = None

    def __post_init__(self) -> None:
        for name, high in _BOUNDS.items():
            _whole(getattr(self, name), name, 1, high)
        _named(self.layout)
        if self.codec is not None:
            instance(self.codec, str, "codec", "a codec's name, or None")
        self._check_layout()
        if self.channels is not None:
            _whole(self.channels, "channels", 1, 4096)
        if self.align is not None:
            _whole(self.align, "align", 1, 2**30)
        params: object = self.params
        if not isinstance(params, Mapping):
            raise InvalidArgument(
                "no parameters", field="params", got=shown(params), expected="whole numbers by name"
            )
        for key, value in self.params.items():
            instance(key, str, "params", "names that are text")
            _whole(value, f"params.{key}", -(2**63), 2**63 - 1)
        if self.part is not None:
            self._check_part(instance(self.part, Part, "part", "a hawk.Part, or None"))

    def _check_layout(self) -> None:
        """Whether the layout is there and holds the codec; a file is looked at once it is needed."""
        if not isinstance(self.layout, Layout) and str(self.layout).endswith(".toml"):
            return
        known = self.resolve()
        if self.codec is not None and self.codec not in known.codecs:
            raise LayoutError(
                f"the layout {known.name} does not hold this codec",
                field="codec",
                got=shown(self.codec),
                expected=", ".join(known.codecs),
            )

    def _check_part(self, part: Part) -> None:
        for name in ("heads", "layers"):
            held = len(getattr(part, name))
            if held != getattr(self, name):
                raise InvalidArgument(
                    f"the part has another number of {name} than the cache",
                    field=f"part.{name}",
                    got=f"{held} ({span(getattr(part, name))})",
                    expected=getattr(self, name),
                    hint="CacheSpec.shard makes both out of the whole model's spec",
                )

    @property
    def shape(self) -> CacheShape:
        """The index box."""
        return CacheShape(
            layers=self.layers,
            heads=self.heads,
            dim=self.dim,
            block_size=self.block_size,
            blocks=self.blocks,
            kvs=self.kvs,
        )

    def resolve(self) -> Layout:
        """The layout, loaded; raises `LayoutError`."""
        return loaded(self.layout)

    def compile(self) -> CompiledLayout:
        """The layout bound to this shape; raises `LayoutError`."""
        return self.resolve().compile(
            self.shape, codec=self.codec, channels=self.channels, align=self.align, params=dict(self.params)
        )

    def shard(
        self,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        pp_rank: int = 0,
        pp_size: int = 1,
        heads: range | None = None,
        layers: range | None = None,
    ) -> CacheSpec:
        """The cache of one worker, of a spec that is the whole model's: fewer heads and layers, and `part` says which.

        tp_rank, tp_size    which worker of how many that share the heads; of more workers than heads each keeps a
                            copy of one head
        pp_rank, pp_size    which stage of how many that share the layers
        heads, layers       instead: the heads or layers themselves

        Raises `InvalidArgument` naming the argument.
        """
        if self.part is not None:
            raise InvalidArgument("the spec is a part already", field="part", got=self.part)
        for name, numbers, size in (("heads", heads, tp_size), ("layers", layers, pp_size)):
            if numbers is not None and size != 1:
                rank = "tp_size" if name == "heads" else "pp_size"
                raise InvalidArgument(
                    f"{rank} says which {name} already", field=name, got=numbers, expected=f"{rank} or {name}"
                )
        part = Part.of(
            self.heads, self.layers, tp_rank=tp_rank, tp_size=tp_size, pp_rank=pp_rank, pp_size=pp_size
        )
        if heads is not None or layers is not None:
            part = dataclasses.replace(
                part,
                heads=part.heads if heads is None else heads,
                layers=part.layers if layers is None else layers,
            )
        return self.replace(heads=len(part.heads), layers=len(part.layers), part=part)

    def descr(self) -> CacheDescr:
        """The description that travels."""
        layout = self.resolve()
        return CacheDescr(
            layout=layout.text,
            codec=self.codec or layout.codec,
            layers=self.layers,
            heads=self.heads,
            dim=self.dim,
            block_size=self.block_size,
            blocks=self.blocks,
            kvs=self.kvs,
            channels=self.channels or 0,
            align=self.align or 0,
            params=dict(self.params),
            part=None if self.part is None else write_part(self.part),
        )

    def replace(self, **changes: Any) -> CacheSpec:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)
