"""Host tensors of ttnn over the bytes that HAWK writes: what was fetched is a tensor, without a copy.

ttnn maps the file of a tensor that it loads, and reads its bytes there.  So each tensor is a file in shared memory: the
head that ttnn wrote for a tensor of that shape, and behind it the bytes of one buffer of the cache, which the agent
fills.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.arguments import count, instance
from hawk.cache import CacheSpec, KVCache
from hawk.errors import InternalError, InvalidArgument, MissingDependency
from hawk.integrations.ttnn import api
from hawk.integrations.ttnn.tiles import tensor_shape
from hawk.memory import shared
from hawk.model_caches import ModelCache

if TYPE_CHECKING:
    from types import TracebackType


class HostTensors:
    """A cache in this process' memory, and its tensors: K and V of each layer `[blocks, heads, rows, dim]`.

    kv      the cache, to register with the agent; what a fetch writes into it is in the tensors
    spec    its description
    chips   over how many chips of a mesh the heads are split

    Make one with `for_request` (a request by itself, as `paged_fill_cache` takes it) or with `alloc`.  A tensor has the
    request once its fetch is *ready*, and until another fetch writes there.
    """

    def __init__(
        self, kv: KVCache, tensors: list[Any], buffers: list[shared.SharedBuffer], chips: int
    ) -> None:
        self.kv = kv
        self.spec = kv.spec
        self.chips = chips
        self._tensors = tensors
        self._buffers = buffers

    @classmethod
    def for_request(cls, model: ModelCache, tokens: int, *, mesh: Any = None) -> HostTensors:
        """Room for a request of up to `tokens` tokens by itself: `[1, heads, tokens, dim]`, in whole blocks.

        model     says order of K, number type, block size and extents
        mesh      a mesh device over whose chips the heads are split, or None for one chip

        Making it takes eight bytes an element for a moment: keep it, and fetch into it again.  Raises as `alloc` does.
        """
        known = instance(model, ModelCache, "model", "a ModelCache")
        return cls.alloc(known.request_spec(count(tokens, "tokens")), mesh=mesh, request=True)

    @classmethod
    def alloc(cls, spec: CacheSpec, *, mesh: Any = None, request: bool = False) -> HostTensors:
        """Tensors for a cache of `spec`, all zero: `[blocks, heads, block_size, dim]`.

        mesh       a mesh device over whose chips the heads are split as `ShardTensorToMesh(mesh, dim=1)` does; heads
                   have to follow each other then, as those of a request by itself do
        request    the cache is a request by itself, whose layout has the blocks of a head in a row

        Raises `LayoutError` for a layout whose bytes are no ttnn tensor, `InvalidArgument` for heads or blocks that the
        mesh cannot share, `OutOfMemory`, `MissingDependency` without ttnn.
        """
        spec = instance(spec, CacheSpec, "spec", "a CacheSpec").replace(channels=None)
        compiled = spec.compile()
        if compiled.channels != 1:
            spec = spec.replace(channels=1)
            compiled = spec.compile()
        shape = tensor_shape(compiled, request=request)
        chips = 1 if mesh is None else api.mesh_size(list(mesh.shape))
        if chips > 1:
            _check_share(spec, chips, request)
        head = _head(shape, compiled.codec.name, compiled.channel_bytes, mesh if chips > 1 else None)
        buffers: list[shared.SharedBuffer] = []
        tensors: list[Any] = []
        try:
            for i in range(compiled.buffer_count):
                buffer = shared.alloc(len(head) + compiled.channel_bytes, name=f"hawk-tensor{i}")
                buffers.append(buffer)
                buffer.array[: len(head)] = np.frombuffer(head, np.uint8)
                tensors.append(_load(buffer.fd))
            _check_view(buffers[0].array, tensors[0], len(head))
            kv = KVCache.from_numpy([b.array[len(head) :] for b in buffers], spec)
        except BaseException:
            for buffer in buffers:
                buffer.close()
            raise
        return cls(kv, tensors, buffers, chips)

    def tensor(self, layer: int, kv: int = 0) -> Any:
        """The host tensor of K (`kv` 0) or V (1) of a layer; raises `InvalidArgument` once closed."""
        if not self._tensors:
            raise InvalidArgument("the tensors are closed", field="tensor")
        for name, value, end in (("layer", layer, self.spec.layers), ("kv", kv, self.spec.kvs)):
            if not 0 <= count(value, name) < end:
                raise InvalidArgument("out of range", field=name, got=value, expected=f"0..{end - 1}")
        return self._tensors[self.spec.compile().buffer(layer, kv)]

    def blocks(self, tokens: int) -> range:
        """The block table of a request of `tokens` tokens in this room; raises `InvalidArgument` for one too large."""
        room = self.spec.blocks * self.spec.block_size
        if not 0 < count(tokens, "tokens") <= room:
            raise InvalidArgument(
                "no room for this request", field="tokens", got=tokens, expected=f"1..{room}"
            )
        return range(-(-tokens // self.spec.block_size))

    def zero(self) -> None:
        """Sets every element to 0, before the room is used for another request; `InvalidArgument` once closed."""
        if not self._tensors:
            raise InvalidArgument("the tensors are closed", field="tensor")
        for buffer in self.kv.buffers:
            buffer[:] = 0

    def close(self) -> None:
        """Lets go of the memory, after the client released the cache; tensors that somebody has stay readable."""
        self._tensors = []
        self.kv.close()
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []

    def __enter__(self) -> HostTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_share(spec: CacheSpec, chips: int, request: bool) -> None:
    if spec.heads % chips:
        raise InvalidArgument(
            "the chips of the mesh cannot share the heads",
            field="heads",
            got=spec.heads,
            expected=f"a multiple of {chips}",
        )
    if spec.blocks != 1 and not request:
        raise InvalidArgument(
            "heads are split over a mesh where they follow each other, and here blocks come first",
            field="blocks",
            got=spec.blocks,
            expected=1,
            hint="A paged cache has a spec for each chip: CacheSpec.shard",
        )


def _head(shape: tuple[int, ...], codec: str, nbytes: int, mesh: Any) -> bytes:
    """What ttnn writes before the bytes of a tensor of this shape into its file."""
    ttnn = api.library()
    mapper = {} if mesh is None else {"mesh_mapper": ttnn.shard_tensor_to_mesh_mapper(mesh, 1)}
    model = ttnn.Tensor(np.zeros(shape, np.float32), api.dtype(codec), layout=ttnn.TILE_LAYOUT, **mapper)
    with tempfile.TemporaryDirectory(prefix="hawk-") as folder:
        path = Path(folder, "model.tensorbin")
        ttnn.dump_tensor(str(path), model)
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = 8 + int.from_bytes(first, "little")
            if size != length + nbytes:
                raise MissingDependency(
                    "this ttnn writes tensors in another form than HAWK knows",
                    field="ttnn",
                    got=f"{size} bytes for {nbytes} of tensor",
                    expected=f"{length + nbytes}",
                    hint=api.HINT,
                )
            return first + file.read(length - 8)


def _load(fd: int) -> Any:
    """The tensor in a file that has no name; ttnn wants one with an ending."""
    with tempfile.TemporaryDirectory(prefix="hawk-") as folder:
        path = Path(folder, "tensor.tensorbin")
        path.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
        return api.library().load_tensor(str(path))


def _check_view(bytes_: Any, tensor: Any, head: int) -> None:
    """That the tensor shows what is written into the memory, and is no copy of it."""
    seen = api.shard_bytes(tensor)
    before = int(bytes_[head])
    try:
        for value in (before ^ 0xFF, before ^ 0x55):
            bytes_[head] = value
            if int(seen[0]) != value:
                raise InternalError("ttnn copied a tensor that it should have mapped", field="ttnn")
    finally:
        bytes_[head] = before
