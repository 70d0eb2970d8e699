"""The pairs of layouts that `hawk bench retile` measures: read from data, planned as a job plans them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.errors import InvalidArgument
from hawk.layouts import CacheShape, Layout, codecs, load
from hawk.plan.source import retile_steps
from hawk.plan.target import target_chunk
from hawk.plan.types import Chunk, Placement, Selection
from hawk.retile.rows import RowsStep

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from hawk.layouts import CompiledLayout
    from hawk.plan.types import Step, TargetChunk

    U8 = NDArray[np.uint8]

BLOCK = 64

_SCALE = 0.0123
"""Of elements whose scales lie in buffers of their own, binary32 each."""


@dataclass(frozen=True)
class Case:
    """One pair of layouts: `group` and `goal` as the file gives them, the sides compiled for `tokens` tokens."""

    group: str
    goal: float
    pair: str
    source: CompiledLayout
    target: CompiledLayout
    tokens: int


@dataclass(frozen=True)
class Work:
    """What one row of the table does: some steps of a chunk, and the bytes that they read and write.

    tensor    what is moved: "K", "V", "K and V" where both share the target's pages, "latent" where there is one,
              "K or V" where both are moved alike and V stands for both
    """

    tensor: str
    steps: tuple[Step, ...]
    read: int
    written: int


def _tree() -> dict[str, Any]:
    text = resources.files("hawk.layouts").joinpath("scenarios", "retile.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def device_goals() -> dict[str, list[float]]:
    """The pairs that are measured on devices by default, each with the goals of its rows."""
    return {entry["pair"]: entry["goals"] for entry in _tree()["device"]}


def cases(
    nbytes: int, pair: str = "*", names: Collection[str] = (), *, tokens: int = 0, layers: int = 1
) -> list[Case]:
    """The cases whose pair or group matches the pattern `pair`, one tensor of each of about `nbytes` bytes in bf16.

    With `names` only those of these pairs; `tokens` overrides the number that follows from `nbytes`.

    Raises `InvalidArgument` for a pattern that nothing matches.
    """
    tree = _tree()
    found = []
    for group in tree["groups"]:
        model = tree["models"][group.get("model", "usual")]
        step = _tokens_of_a_block(tree)
        count = tokens or max(1, nbytes // (2 * model["heads"] * model["dim"]) // step) * step
        for name in group["pairs"]:
            told = name, group["title"]
            if not any(fnmatchcase(text, pair) or pair in text for text in told):
                continue
            if names and name not in names:
                continue
            source, target = (_compile(tree, side.strip(), model, count, layers) for side in name.split(">"))
            found.append(Case(group["title"], group["goal"], name, source, target, count))
    if not found:
        raise InvalidArgument(
            "no pair matches",
            field="pair",
            got=pair,
            expected="a part of a pair or a group in layouts/scenarios/retile.toml",
        )
    return found


def _tokens_of_a_block(tree: dict[str, Any]) -> int:
    """A number of tokens that fills whole blocks of every side."""
    return int(np.lcm.reduce([side.get("block", BLOCK) for side in tree["sides"].values()] + [BLOCK]))


def _compile(
    tree: dict[str, Any], name: str, model: dict[str, int], tokens: int, layers: int
) -> CompiledLayout:
    name, _, codec = name.partition(":")
    side = tree["sides"].get(name, {"layout": name})
    layout = Layout.from_toml(side["text"], name) if "text" in side else load(side["layout"])
    size = side.get("block", BLOCK)
    shape = CacheShape(
        layers=layers,
        heads=model["heads"],
        dim=model["dim"],
        block_size=size,
        blocks=-(-tokens // size),
        kvs=model["kvs"],
    )
    return layout.compile(shape, codec=codec or "bf16", params=side.get("params"))


class Planned:
    """A case with its chunk planned, random block tables on both sides."""

    def __init__(self, case: Case) -> None:
        self.case = case
        source, target = case.source, case.target
        rng = np.random.default_rng(0)
        tables = [rng.permutation(side.shape.blocks).astype(np.int64) for side in (source, target)]
        shape = len(source.buffer_bytes), source.channels
        numbers = np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)
        placement = Placement(numbers, np.zeros(numbers.shape, np.int64))
        layers = source.shape.layers
        chunk = Chunk(0, layers, 0, -(-case.tokens // target.shape.block_size))
        self.chunk: TargetChunk = target_chunk(target, tables[1], Selection(0, layers, 0, case.tokens), chunk)
        self.steps = retile_steps(source, tables[0], placement, self.chunk, tables[1])

    @property
    def region_bytes(self) -> list[int]:
        """Size of each region of the source."""
        source = self.case.source
        return [nbytes for nbytes in source.buffer_bytes for _ in range(source.channels)]

    @property
    def moved(self) -> int:
        """Bytes that all steps read and write."""
        shape, codec = self.case.source.shape, self.case.source.codec
        read = codec.page_bytes(self.case.tokens * shape.heads * shape.dim) * shape.kvs * shape.layers
        return read + sum(int(self.chunk.runs[kind].nbytes.sum()) for kind in self.chunk.kind)

    def work(self) -> list[Work]:
        """The rows of this case."""
        source, target = self.case.source, self.case.target
        kvs = range(target.shape.kvs)
        each = [tuple(step for step in self.steps if step.kv == kv) for kv in kvs]
        written = [0] * len(kvs)
        for (_, kv), kind in zip(self.chunk.planes, self.chunk.kind, strict=True):
            written[kv] += int(self.chunk.runs[kind].nbytes.sum())
        shape = source.shape
        elements = self.case.tokens * shape.heads * shape.dim
        read = source.codec.page_bytes(elements)
        if len(kvs) == 1:
            return [Work("latent", each[0], read, written[0])]
        if target.shares_pages:
            return [Work("K and V", tuple(self.steps), 2 * read, sum(written))]
        if _loops(each[0]) == _loops(each[1]):
            return [Work("K or V", each[1], read, written[1])]
        return [Work(name, each[kv], read, written[kv]) for kv, name in enumerate("KV")]

    def fill(self, regions: list[U8]) -> None:
        """Ordinary numbers, a normal distribution, as the source's codec holds them, and one scale for all."""
        source = self.case.source
        codec, elements = source.codec, source.piece(0).elements
        values = np.random.default_rng(1).standard_normal((61, elements), np.float32).view(np.uint32)
        sample = codecs.encode(codec, values)
        page, stride = source.page_bytes, source.page_stride
        count = source.buffer_count * source.channels
        for region in regions[count:]:
            region.view(np.float32)[:] = _SCALE
        for region in regions[:count]:
            pages = region.reshape(-1, stride)
            for first in range(0, len(pages), len(sample)):
                part = pages[first : first + len(sample)]
                part[:, :page] = sample[: len(part)]


def _loops(steps: tuple[Step, ...]) -> list[object]:
    """What tells two tensors' work apart."""
    found: list[object] = []
    for step in steps:
        if isinstance(step, RowsStep):
            passes = [one for side in (step.reads, step.writes) for tensor in side for one in tensor.passes]
            found.append([(one.program.loops, len(one.pieces)) for one in passes])
        else:
            found.append((step.program.loops, len(step.pieces)))
    return found
