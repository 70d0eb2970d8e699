"""The part of vLLM's connector interface that `hawk.integrations.vllm` touches, without vLLM and without torch.

Signatures and the order of hooks are those of vLLM 0.32; tensors are numpy arrays that answer as torch's do.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


@dataclass
class TransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class Base:
    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._connector_metadata: Any = None
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None
        return self._connector_metadata

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None


class Factory:
    known: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls.known:
            raise ValueError("already registered")
        cls.known[name] = module_path, class_name


class Stats:
    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data


class Metric:
    """One of Prometheus', which remembers."""

    def __init__(self, *, name: str, documentation: str, labelnames: list[str], buckets: Any = None) -> None:
        self.name = name
        self.seen: list[float] = []

    def observe(self, value: float) -> None:
        self.seen.append(value)

    inc = observe


class PromMetrics:
    def __init__(self, config: Any, types: Any, labels: list[str], values: Any) -> None:
        self._histogram_cls = self._counter_cls = Metric


def _module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(content)
    return made


def modules(version: str = "0.32.0") -> dict[str, ModuleType]:
    """By name, as `sys.modules` has them."""
    group = SimpleNamespace(rank_in_group=0)
    base = "vllm.distributed.kv_transfer.kv_connector.v1"
    found = [
        _module("vllm", __version__=version, __path__=[]),
        *(_module(name, __path__=[]) for name in ("vllm.distributed", "vllm.v1", "vllm.v1.metrics")),
        _module("vllm.distributed.parallel_state", get_pp_group=lambda: group, get_tp_group=lambda: group),
        *(
            _module(name, __path__=[])
            for name in ("vllm.distributed.kv_transfer", base.rpartition(".")[0], base)
        ),
        _module(f"{base.rpartition('.')[0]}.factory", KVConnectorFactory=Factory),
        _module(
            f"{base}.base",
            KVConnectorBase_V1=Base,
            KVConnectorHandshakeMetadata=type("KVConnectorHandshakeMetadata", (), {}),
            KVConnectorMetadata=type("KVConnectorMetadata", (), {}),
            KVConnectorRole=Role,
            KVConnectorTransferResults=TransferResults,
            KVConnectorWorkerMetadata=type("KVConnectorWorkerMetadata", (), {}),
            SupportsHMA=type("SupportsHMA", (), {}),
        ),
        _module(f"{base}.metrics", KVConnectorPromMetrics=PromMetrics, KVConnectorStats=Stats),
        _module("vllm.v1.metrics.cache_hit_source", CacheHitSource=SimpleNamespace(P2P="p2p")),
        _module(
            "vllm.v1.metrics.utils",
            create_metric_per_engine=lambda metric, values: dict.fromkeys(values, metric),
        ),
    ]
    return {module.__name__: module for module in found}


@contextmanager
def installed(version: str = "0.32.0") -> Iterator[None]:
    """While it lasts `import vllm` finds this; what was imported of it, or because of it, is forgotten afterwards."""
    ours = modules(version)
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(ours)
    try:
        yield
    finally:
        for name in [
            name for name in sys.modules if name in ours or name.startswith("hawk.integrations.vllm")
        ]:
            del sys.modules[name]
        sys.modules.update(hidden)


class Tensor:
    """`[block, head, slot, K and V]` of one layer over bytes of that order in memory."""

    def __init__(self, raw: np.ndarray, shape: tuple[int, int, int, int], order: str = "BHNC") -> None:
        self.raw = raw
        sizes = dict(zip("BHNC", shape, strict=True))
        stride, strides = 1, {}
        for axis in reversed(order):
            strides[axis] = stride
            stride *= sizes[axis]
        self.shape = shape
        self.dtype = "torch.bfloat16"
        self.device = SimpleNamespace(type="cpu")
        self._strides = tuple(strides[axis] for axis in "BHNC")

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return int(self.raw.ctypes.data)

    def element_size(self) -> int:
        return 2


class FullAttentionSpec:
    def __init__(self, block_size: int, heads: int, **more: Any) -> None:
        self.block_size = block_size
        self.num_kv_heads = heads
        self.head_size = 8
        self.__dict__.update(more)


@dataclass
class Block:
    users: int = 0


class Pool:
    """vLLM's count of who uses which block."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [Block() for _ in range(blocks)]

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.users += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.users -= 1
            assert block.users >= 0

    def used(self) -> list[int]:
        return [number for number, block in enumerate(self.blocks) if block.users]


class Engine:
    """A scheduler's and a worker's connector, a cache, and steps as vLLM takes them."""

    def __init__(
        self,
        role: str,
        *,
        engine_id: str,
        block: int,
        blocks: int,
        order: str,
        extra: dict[str, Any],
        **more: Any,
    ) -> None:
        self.block, self.layers, heads, dim = block, 3, 2, 8
        self.names = [f"model.layers.{i}.attn" for i in range(self.layers)]
        shape = (blocks, heads, block, 2 * dim)
        nbytes = 2 * blocks * heads * block * 2 * dim
        self.tensors = {name: Tensor(np.zeros(nbytes, np.uint8), shape, order[1:]) for name in self.names}
        group = SimpleNamespace(layer_names=self.names, kv_cache_spec=FullAttentionSpec(block, heads))
        self.cache = SimpleNamespace(
            transfer_groups=[group],
            num_blocks=blocks,
            transfer_group_ids=(0,),
            kv_cache_layout=order,
            select_transfer_block_ids=lambda ids: (list(ids[0]),),
        )
        backend = SimpleNamespace(get_name=lambda: "ANY")
        self.config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_role=role, engine_id=engine_id, kv_connector_extra_config=extra
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
            model_config=SimpleNamespace(
                get_total_num_kv_heads=lambda: heads, get_total_num_hidden_layers=lambda: self.layers
            ),
            cache_config=SimpleNamespace(kv_cache_layout=order),
            compilation_config=SimpleNamespace(
                static_forward_context={name: SimpleNamespace(attn_backend=backend) for name in self.names}
            ),
        )
        for name, value in more.items():
            setattr(getattr(self.config, name.partition("__")[0]), name.partition("__")[2], value)
        self.finished: set[str] = set()
        self.requests: dict[str, Any] = {}
        self.pool = Pool(blocks)

    def start(self, connector: Any) -> None:
        """Both halves are made, the caches registered, and the handshake is over."""
        self.scheduler = connector(self.config, Role.SCHEDULER, self.cache)
        self.scheduler.bind_gpu_block_pool(self.pool)
        self.worker = connector(self.config, Role.WORKER, self.cache)
        self.worker.register_kv_caches(self.tensors)
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})

    def request(self, key: str, prompt: list[int], params: dict[str, Any] | None) -> Any:
        made = SimpleNamespace(
            request_id=key,
            prompt_token_ids=prompt,
            kv_transfer_params=params,
            status=SimpleNamespace(name="RUNNING"),
        )
        self.requests[key] = made
        self.scheduler.on_new_request(made)
        return made

    def step(
        self,
        new: dict[str, tuple[list[int], int, int]] | None = None,
        cached: dict[str, tuple[list[int], int, int]] | None = None,
        preempted: set[str] | None = None,
        resumed: set[str] | None = None,
        write: Any = None,
    ) -> TransferResults:
        """One step; of each request its (new) blocks, tokens computed before, and tokens of this step."""
        new, cached = new or {}, cached or {}
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=key, block_ids=(blocks,), num_computed_tokens=computed)
                for key, (blocks, computed, _) in new.items()
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(cached),
                new_block_ids=[(blocks,) if blocks else None for blocks, _, _ in cached.values()],
                num_computed_tokens=[computed for _, computed, _ in cached.values()],
                resumed_req_ids=resumed or set(),
            ),
            num_scheduled_tokens={key: tokens for key, (_, _, tokens) in {**new, **cached}.items()},
            preempted_req_ids=preempted,
        )
        finished, self.finished = self.finished, set()
        meta = self.scheduler.build_connector_meta(output)
        worker = self.worker
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        for number, name in enumerate(self.names):
            if write is not None:
                write(number, self.tensors[name])
            worker.wait_for_layer_load(name)
            worker.save_kv_layer(name, self.tensors[name], None)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results: TransferResults = worker.get_transfer_results(finished)
        self.invalid = worker.get_block_ids_with_load_errors()
        told = worker.build_connector_worker_meta()
        self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=told))
        worker.clear_connector_metadata()
        return results

    def finish(self, key: str, blocks: list[int], status: str = "FINISHED_LENGTH_CAPPED") -> Any:
        request = self.requests.pop(key)
        request.status = SimpleNamespace(name=status)
        answer = self.scheduler.request_finished_all_groups(request, (blocks,))
        self.finished.add(key)
        return answer

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
