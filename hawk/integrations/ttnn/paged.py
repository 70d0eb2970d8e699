"""A model's paged cache in the memory of a chip or a mesh: ttnn's tensors, and what HAWK has to know of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hawk.arguments import count as whole
from hawk.arguments import instance
from hawk.errors import InvalidArgument
from hawk.integrations.ttnn import api
from hawk.integrations.ttnn.host import HostTensors
from hawk.integrations.ttnn.reserving import allocate, banks, bounds, chips
from hawk.integrations.ttnn.tiles import tensor_shape
from hawk.memory.tenstorrent import Reservation
from hawk.model_caches import ModelCache, k_order, load_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.cache_spec import CacheSpec
    from hawk.handles import DeviceCache
    from hawk.layouts import CompiledLayout

_NAMES = ("k", "v")


class PagedCache:
    """K and V of each layer, `[blocks, heads of one chip, block_size, dim]` in tiles over interleaved DRAM.

    tensors    `tensors[layer]` is (K, V), as tt_transformers keeps its `kv_cache`
    model      what the model expects: a `ModelCache` or its name
    k_order    how the engine keeps K where it says so itself ("hf" where it runs with `use_hf_rope`, else "meta")

    Raises `InvalidArgument` naming the tensor and what about it the model would misread: number type, block size,
    heads, head size, order of K, memory; or the layers where their number is another.
    """

    def __init__(
        self, tensors: Sequence[Sequence[Any]], model: ModelCache | str, *, k_order: str | None = None
    ) -> None:
        self.model = _known(model)
        if k_order is not None and k_order != self.model.k_order:
            raise InvalidArgument(
                f"{self.model.name} keeps K in another order",
                field="k_order",
                got=k_order,
                expected=self.model.k_order,
                hint="A file of one's own says another order, and the layout that has it (docs/client.md)",
            )
        self.tensors = [
            tuple(instance(pair, Iterable, f"kv[{i}]", "K and V"))  # type: ignore[type-abstract]
            for i, pair in enumerate(instance(tensors, Iterable, "kv", "K and V of each layer"))  # type: ignore[type-abstract]
        ]
        if len(self.tensors) != self.model.model.layers:
            raise self._wrong("kv", len(self.tensors), f"{self.model.model.layers} layers")
        for layer, pair in enumerate(self.tensors):
            if len(pair) != self.model.model.kvs:
                raise self._wrong(f"kv[{layer}]", len(pair), f"{self.model.model.kvs} tensors")
            for kv, tensor in enumerate(pair):
                if not callable(getattr(tensor, "device", None)) or tensor.device() is None:
                    raise self._wrong(
                        f"kv[{layer}].{_NAMES[kv]}", type(tensor).__name__, "a tensor on a device"
                    )
        self.device = self.tensors[0][0].device()
        self.chips = chips(self.device)
        for layer, pair in enumerate(self.tensors):
            for kv, tensor in enumerate(pair):
                if chips(tensor.device()) != self.chips:
                    field = f"kv[{layer}].{_NAMES[kv]}.device"
                    raise self._wrong(field, str(chips(tensor.device())), str(self.chips))
        self.banks = banks(self.device)
        self.blocks = api.extents(self.tensors[0][0])[0]
        self.model = self._checked()
        for spec in self.specs:
            self.model.check(spec)
        tensor_shape(self.specs[0].compile())
        self._staging: list[Any] = []

    @classmethod
    def alloc(cls, device: Any, model: ModelCache | str, blocks: int) -> PagedCache:
        """A cache in one tensor that HAWK owns, of which each layer's K and V is a view (`ttnn.narrow`).

        Their addresses follow each other, so that `reservation` covers nothing else.  A view begins in bank 0:
        `blocks` is a multiple of what `blocks` in the error says where a block's pages do not fill all banks.
        Deallocating one view deallocates all.  Raises `InvalidArgument`, `OutOfMemory`.
        """
        ttnn = api.library()
        known = _known(model)
        count, group = banks(device), len(chips(device))
        spec = known.spec(blocks=blocks, tp_size=group, channels=count)
        compiled = spec.compile()
        pages = compiled.pages // blocks  # of one block
        step = next(n for n in range(1, count + 1) if n * pages % count == 0)
        if blocks % step:
            raise InvalidArgument(
                f"a view of ttnn begins in bank 0 of {count}, and {blocks} blocks end in the midst of a round",
                field="blocks",
                got=blocks,
                expected=f"a multiple of {step}",
            )
        planes = compiled.buffer_count
        shape = (planes * blocks, spec.heads, spec.block_size, spec.dim)
        owner = allocate(device, shape, compiled.codec.name, f"{planes} tensors of {blocks} blocks")
        views = [ttnn.narrow(owner, 0, i * blocks, blocks) for i in range(planes)]
        kvs = known.model.kvs
        made = cls([views[i : i + kvs] for i in range(0, planes, kvs)], known)
        made._owner = owner
        return made

    _owner: Any = None

    @property
    def specs(self) -> list[CacheSpec]:
        """One spec a chip, in the order of `chips`: its share of the heads, dealt over its banks."""
        group = len(self.chips)
        return [
            self.model.spec(self.blocks, tp_rank=rank, tp_size=group, channels=self.banks)
            for rank in range(group)
        ]

    @property
    def addresses(self) -> list[tuple[int, ...]]:
        """Of each layer the bank-local addresses of (K, V), the same in every bank of every chip."""
        return [tuple(int(t.buffer_address()) for t in pair) for pair in self.tensors]

    def reservation(self) -> Reservation:
        """The range of every bank in which the cache lies, for a memory of kind `tenstorrent` to be made over.

        A cache that such a memory allocates is then this one: its buffers lie where these tensors do.  Raises
        `InvalidArgument` naming the first tensor that does not follow the one before it, as happens where other tensors
        were allocated meanwhile; those of `alloc` always do.
        """
        compiled = self.specs[0].compile()
        flat = [address for pair in self.addresses for address in pair]
        for i, (before, after) in enumerate(pairwise(flat), 1):
            if after - before != compiled.channel_bytes:
                layer, kv = divmod(i, self.model.model.kvs)
                raise InvalidArgument(
                    "the tensors of the cache do not follow each other in the banks",
                    field=f"kv[{layer}].{_NAMES[kv]}",
                    got=hex(after),
                    expected=hex(before + compiled.channel_bytes),
                    hint="PagedCache.alloc makes them so",
                )
        lowest, highest = bounds(self.device)
        return Reservation(
            chips=self.chips,
            address=flat[0],
            nbytes=len(flat) * compiled.channel_bytes,
            banks=self.banks,
            alignment=int(api.library().get_dram_alignment()),
            lowest=lowest,
            highest=highest,
            holder=self.tensors if self._owner is None else self._owner,
        )

    def check_place(self, cache: DeviceCache, reservation: Reservation) -> None:
        """Raises `InvalidArgument` unless `cache`, in a memory over `reservation`, lies where these tensors do.

        So it does if its layout keeps what the model expects, and each buffer begins where its tensor does.
        """
        self._check_layout(cache.layout)
        flat = [address for pair in self.addresses for address in pair]
        for i, (offset, address) in enumerate(zip(cache.offsets, flat, strict=True)):
            if reservation.address + offset != address:
                layer, kv = divmod(i, self.model.model.kvs)
                raise InvalidArgument(
                    "the agent's cache lies elsewhere than ttnn's tensor",
                    field=f"kv[{layer}].{_NAMES[kv]}",
                    got=hex(reservation.address + offset),
                    expected=hex(address),
                    hint="The memory must hold nothing else: allocate this cache in it first",
                )

    def _check_layout(self, layout: CompiledLayout) -> None:
        expected = self.specs[0].compile()
        for field in ("layers", "heads", "dim", "kvs", "block_size", "blocks"):
            got, wanted = getattr(layout.shape, field), getattr(expected.shape, field)
            if got != wanted:
                raise self._wrong(f"cache.{field}", got, wanted)
        if layout.codec.name != expected.codec.name:
            raise self._wrong("cache.codec", layout.codec.name, expected.codec.name)
        if layout.channels != expected.channels:
            raise self._wrong("cache.channels", layout.channels, expected.channels)
        tensor_shape(layout)
        if k_order(layout) != k_order(expected):
            raise self._wrong("cache.k_order", k_order(layout)[0], k_order(expected)[0])

    def fill(self, held: HostTensors, page_table: Any, *, user: int = 0) -> None:
        """Copies a request out of host tensors to the chips, and from there into the blocks of its page table.

        held          of `HostTensors.for_request` of the same model and mesh
        page_table    ttnn's, `[users, blocks of one request]` on the device
        user          the row of it that is the request's

        Nothing is converted: `copy_host_to_device_tensor` into one tensor each for K and V, which stay where they are
        from request to request of one length (programs and traces that were made with them hold), then
        `paged_fill_cache`.  When this ends, also by an error of ttnn's, the host tensors may be fetched into again.
        Raises `InvalidArgument` for tensors of another model, a page table of fewer blocks than they have, and a
        row that it has not.
        """
        ttnn = api.library()
        self.model.check(instance(held, HostTensors, "held", "HostTensors").spec)
        if held.chips != len(self.chips):
            raise self._wrong("held.chips", held.chips, len(self.chips))
        shape = api.extents(held.tensor(0))
        users, room = api.extents(page_table)[0], api.extents(page_table)[-1] * self.model.block_size
        if whole(user, "user") >= users:
            raise InvalidArgument("no such row", field="user", got=user, expected=f"0..{users - 1}")
        if shape[0] != 1 or shape[2] > room:
            raise InvalidArgument(
                "the page table has not as many blocks as the host tensors, whose every row is copied",
                field="page_table",
                got=f"{room} rows",
                expected=f"{shape[2]} of [1, heads, rows, dim]"
                if shape[0] == 1
                else "tensors of for_request",
            )
        if self._staging and api.extents(self._staging[0]) != shape:
            self._staging = []  # given back before others are taken: there may be no room for both
        if not self._staging:
            self._staging = [
                allocate(self.device, shape, self.model.codec, "a request's K or V") for _ in self.tensors[0]
            ]
        try:
            for layer, pair in enumerate(self.tensors):
                for kv, cache in enumerate(pair):
                    ttnn.copy_host_to_device_tensor(held.tensor(layer, kv), self._staging[kv])
                    ttnn.experimental.paged_fill_cache(cache, self._staging[kv], page_table, batch_idx=user)
        finally:
            # Copies are put on a queue: until they are done the chips may still read the host tensors.
            ttnn.synchronize_device(self.device)

    def _checked(self) -> ModelCache:
        """The model with the number type and the block size that the tensors have, which are of those it knows."""
        ttnn = api.library()
        first = self.tensors[0][0]
        found = self.model
        group = len(self.chips)
        if group not in found.tp:
            raise self._wrong("chips", group, " or ".join(map(str, found.tp)))
        heads = found.model.heads // group
        for layer, pair in enumerate(self.tensors):
            for kv, tensor in enumerate(pair):
                name = f"kv[{layer}].{_NAMES[kv]}"
                shape = api.extents(tensor)
                if len(shape) != 4:
                    raise self._wrong(f"{name}.shape", shape, "[blocks, heads, block_size, dim]")
                for field, got, expected in (
                    ("blocks", shape[0], (self.blocks,)),
                    ("heads", shape[1], (heads,)),
                    ("block_size", shape[2], found.block_sizes),
                    ("dim", shape[3], (found.model.dim,)),
                    ("codec", api.codec(tensor.dtype, f"{name}.codec"), found.codecs),
                ):
                    if got not in expected:
                        raise self._wrong(f"{name}.{field}", got, " or ".join(map(str, expected)))
                if tensor.layout != ttnn.TILE_LAYOUT:
                    raise self._wrong(f"{name}.layout", tensor.layout, ttnn.TILE_LAYOUT)
                config = tensor.memory_config()
                if (config.memory_layout, config.buffer_type) != (
                    ttnn.TensorMemoryLayout.INTERLEAVED,
                    ttnn.BufferType.DRAM,
                ):
                    raise self._wrong(f"{name}.memory_config", config, "interleaved DRAM")
                if layer == kv == 0:  # what is chosen holds for the rest
                    found = found.choose(codec=api.codec(first.dtype, f"{name}.codec"), block_size=shape[2])
        return found

    def _wrong(self, field: str, got: object, expected: object) -> InvalidArgument:
        return InvalidArgument(
            f"{self.model.name} would misread this cache", field=field, got=got, expected=expected
        )


def _known(model: object) -> ModelCache:
    """The model's cache, or the one of that name."""
    if isinstance(model, str):
        return load_cache(model)
    return instance(model, ModelCache, "model", "a ModelCache, or its name")
