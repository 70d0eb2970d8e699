"""How two groups of workers share a model out, and so which worker sends what to which.

    layers   pipeline stages: worker (stage, tp) keeps the layers of its stage
    heads    tensor parallelism: of H KV heads worker r of the `tp` of a stage keeps `[r*H//tp, (r+1)*H//tp)`; with
             more workers than heads it keeps a copy of head `r*H//tp`, so that every head is replicated
    kinds    layers of different kinds (whole attention, a sliding window) have caches and block tables of their own

Engines number their workers stage by stage, so rank = stage * tp + r.  Everything here is pure and small: what
it returns are `Part`s, and each becomes one `Selection` for one transfer between two caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, product
from typing import TYPE_CHECKING

from hawk.errors import InternalError, InvalidArgument
from hawk.plan.types import Selection

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that keep the same tokens.

    layers    numbers in the model, ascending
    window    None where every token is kept; else what a token sees, itself and the `window - 1` before it, so
              that the last `window - 1` tokens are all that the next one needs
    """

    name: str
    layers: tuple[int, ...]
    window: int | None = None

    def first_token(self, tokens: int) -> int:
        """The first of `tokens` tokens that the next one still needs."""
        return 0 if self.window is None else max(0, tokens - (self.window - 1))


@dataclass(frozen=True, slots=True)
class Model:
    """What is shared out: the extents of a whole model's cache.

    heads    KV heads of the model (1 for latents); `kvs` is 2, or 1 where there is one tensor
    kinds    the layers by kind, every layer in one of them; empty: all layers keep every token
    """

    name: str
    layers: int
    heads: int
    dim: int
    kvs: int = 2
    kinds: tuple[Kind, ...] = ()

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "dim", "kvs"):
            _positive(f"model.{name}", getattr(self, name))
        names = [kind.name for kind in self.kinds]
        if len(set(names)) != len(names):
            raise InvalidArgument(
                "two kinds have one name", field="model.kinds", got=names, expected="each once"
            )
        found = sorted(layer for kind in self.kinds for layer in kind.layers)
        if self.kinds and found != list(range(self.layers)):
            raise InvalidArgument(
                "each layer is of one kind",
                field="model.kinds",
                got=f"{len(found)} layers, {len(set(found))} different ones",
                expected=f"0..{self.layers - 1}, each once",
            )
        for kind in self.kinds:
            if list(kind.layers) != sorted(kind.layers) or not kind.layers:
                raise InvalidArgument(
                    "layers are named in ascending order",
                    field=f"model.kinds.{kind.name}",
                    got=kind.layers,
                    expected=sorted(kind.layers) or "one layer or more",
                )
            if kind.window is not None and kind.window < 2:
                raise InvalidArgument(
                    "a window without a token before the newest keeps nothing",
                    field=f"model.kinds.{kind.name}.window",
                    got=kind.window,
                    expected="2 or more",
                )

    @property
    def all_kinds(self) -> tuple[Kind, ...]:
        """The kinds, one of all layers if none is named."""
        return self.kinds or (Kind("all", tuple(range(self.layers))),)


@dataclass(frozen=True, slots=True)
class Grid:
    """How one side shares the model out: `pp` stages of `tp` workers.

    stages    layers of each stage; empty: as equal as can be, stage s from `s*layers//pp` on
    apart     whether layers of different kinds lie in caches of their own (True) or all in one (False)
    """

    tp: int = 1
    pp: int = 1
    stages: tuple[int, ...] = ()
    apart: bool = True

    def __post_init__(self) -> None:
        _positive("grid.tp", self.tp)
        _positive("grid.pp", self.pp)
        for n in self.stages:
            _positive("grid.stages", n)
        if self.stages and len(self.stages) != self.pp:
            raise InvalidArgument(
                "one number of layers a stage is needed",
                field="grid.stages",
                got=len(self.stages),
                expected=self.pp,
            )

    @property
    def ranks(self) -> int:
        """Number of workers."""
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class Shard:
    """What one worker keeps.

    layers, heads      numbers in the model
    replica, replicas  which copy of its heads this is, of how many
    """

    rank: int
    layers: range
    heads: range
    replica: int
    replicas: int


def shard(model: Model, grid: Grid, rank: int) -> Shard:
    """What worker `rank` keeps; `InvalidArgument` for a rank or stages that do not exist."""
    if not 0 <= rank < grid.ranks:
        raise InvalidArgument("no such worker", field="rank", got=rank, expected=f"0..{grid.ranks - 1}")
    if grid.pp > model.layers or (grid.stages and sum(grid.stages) != model.layers):
        raise InvalidArgument(
            f"the stages do not share out the layers of {model.name}",
            field="grid.stages" if grid.stages else "grid.pp",
            got=f"{sum(grid.stages)} layers" if grid.stages else grid.pp,
            expected=model.layers if grid.stages else f"{model.layers} or less",
        )
    stage, r = divmod(rank, grid.tp)
    if grid.stages:
        bounds = list(accumulate(grid.stages, initial=0))
    else:
        bounds = [s * model.layers // grid.pp for s in range(grid.pp + 1)]
    first = r * model.heads // grid.tp
    last = max(first + 1, (r + 1) * model.heads // grid.tp)
    if grid.tp <= model.heads:
        return Shard(rank, range(bounds[stage], bounds[stage + 1]), range(first, last), 0, 1)
    # The workers whose r * heads // tp is the same head.
    begin = -(-first * grid.tp // model.heads)
    end = -(-(first + 1) * grid.tp // model.heads)
    return Shard(rank, range(bounds[stage], bounds[stage + 1]), range(first, last), r - begin, end - begin)


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker's cache sends to another's; layers and heads count within these two caches.

    source, target         ranks
    kind                   the layers' kind
    layer, source_layers   the target's first layer, and the source's layer for it and for each that follows
    head, heads, source_head    target heads `[head, head + heads)` from the source's `source_head` on
    """

    source: int
    target: int
    kind: Kind
    layer: int
    source_layers: tuple[int, ...]
    head: int
    heads: int
    source_head: int

    def selection(self, tokens: int, first: int = 0) -> Selection | None:
        """The transfer of tokens `[first, tokens)` of a request, as far as this kind of layer keeps them.

        `first` is where the target's own prefix ends.  None where nothing is left to move.
        """
        begin = max(first, self.kind.first_token(tokens))
        if begin >= tokens:
            return None
        own = tuple(range(self.layer, self.layer + len(self.source_layers)))
        return Selection(
            layer=self.layer,
            layers=len(self.source_layers),
            token=begin,
            tokens=tokens - begin,
            source_layers=() if own == self.source_layers else self.source_layers,
            head=self.head,
            heads=self.heads,
            source_head=self.source_head,
        )


def cache_layers(model: Model, grid: Grid, rank: int, kind: Kind) -> tuple[int, ...]:
    """The model's layers that one cache of a worker holds, in the cache's order.

    `kind` tells which of its caches; where one cache holds all kinds, any of them does.  Empty where the worker's
    stage has no layer of this kind.
    """
    own = shard(model, grid, rank).layers
    return tuple(n for n in (kind.layers if grid.apart else own) if n in own)


def _numbered(layers: tuple[int, ...]) -> dict[int, int]:
    """Place of each layer in a cache."""
    return {layer: i for i, layer in enumerate(layers)}


def _runs(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, tuple[int, ...]]]:
    """(first target layer, source layers) for each stretch of target layers that follow each other."""
    found: list[tuple[int, list[int]]] = []
    for target, source in pairs:
        if found and target == found[-1][0] + len(found[-1][1]):
            found[-1][1].append(source)
        else:
            found.append((target, [source]))
    return [(first, tuple(sources)) for first, sources in found]


def parts(model: Model, source: Grid, target: Grid) -> tuple[Part, ...]:
    """What every target worker needs, and from whom; in the order of the targets, then kinds, layers and heads.

    Each element of each target cache is in exactly one part.  Where the source has several copies of a head, the
    target's copies take them in turn, so that the load is spread.
    """
    senders = [shard(model, source, rank) for rank in range(source.ranks)]
    holds = {
        (sender.rank, kind.name): _numbered(cache_layers(model, source, sender.rank, kind))
        for sender in senders
        for kind in model.all_kinds
    }
    found: list[Part] = []
    for rank in range(target.ranks):
        mine = shard(model, target, rank)
        for kind in model.all_kinds:
            wanted = _numbered(cache_layers(model, target, rank, kind))
            for sender in senders:
                held = holds[sender.rank, kind.name]
                heads = range(
                    max(mine.heads.start, sender.heads.start), min(mine.heads.stop, sender.heads.stop)
                )
                if not heads or sender.replica != mine.replica * sender.replicas // mine.replicas:
                    continue
                both = [n for n in kind.layers if n in held and n in wanted]
                for layer, layers in _runs((wanted[n], held[n]) for n in both):
                    found.append(
                        Part(
                            source=sender.rank,
                            target=rank,
                            kind=kind,
                            layer=layer,
                            source_layers=layers,
                            head=heads.start - mine.heads.start,
                            heads=len(heads),
                            source_head=heads.start - sender.heads.start,
                        )
                    )
    return tuple(found)


def check_parts(model: Model, source: Grid, target: Grid, found: Sequence[Part]) -> None:
    """Raises `InternalError` unless the parts fill each layer and head of each target once, and rightly.

    Slow (it looks at every layer and head): for tests and `explain`.
    """
    filled: dict[tuple[int, int, int], int] = {}
    for part in found:
        mine, sender = shard(model, target, part.target), shard(model, source, part.source)
        wanted = cache_layers(model, target, part.target, part.kind)
        held = cache_layers(model, source, part.source, part.kind)
        for i, j in product(range(len(part.source_layers)), range(part.heads)):
            layer, head = wanted[part.layer + i], mine.heads[part.head + j]
            if held[part.source_layers[i]] != layer or sender.heads[part.source_head + j] != head:
                raise InternalError("a part takes another layer or head than it fills", part=part)
            if layer not in part.kind.layers:
                raise InternalError("a part fills a layer of another kind", part=part)
            key = part.target, layer, head
            filled[key] = filled.get(key, 0) + 1
    for rank in range(target.ranks):
        mine = shard(model, target, rank)
        for layer, head in product(mine.layers, mine.heads):
            if filled.pop((rank, layer, head), 0) != 1:
                raise InternalError("not filled exactly once", rank=rank, layer=layer, head=head)
    if filled:
        raise InternalError("a part fills what no worker keeps", where=next(iter(filled)))


def _positive(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgument("a positive integer is needed", field=field, got=value, expected="1 or more")
