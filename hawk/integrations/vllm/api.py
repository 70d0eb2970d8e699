"""All that is used of vLLM, whose connector interface calls itself experimental: what changes there changes here.

Importing this module raises `MissingDependency` where there is no vLLM, or one that this was not written for.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.cache import CacheSpec
from hawk.convert import convert
from hawk.errors import MissingDependency, RegistrationFailed
from hawk.integrations.provided import Wanted
from hawk.integrations.remote import Grid, Model
from hawk.observe.log import get as get_log

log = get_log("hawk.integrations.vllm")

SUPPORTED = ("0.32", "0.33")
"""The first version of vLLM that this was tried with, and the first that it was not."""

HINT = "Install a vLLM of the range, or a HAWK that was written for yours (docs/vllm.md)"


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def check_version(version: str) -> None:
    """Raises `MissingDependency` for a vLLM outside the range."""
    low, high = SUPPORTED
    if not _release(low) <= _release(version) < _release(high):
        raise MissingDependency(
            "this version of vLLM has another connector interface",
            field="vllm",
            got=version,
            expected=f"{low} or later, before {high}",
            hint=HINT,
        )


try:
    import vllm
except ImportError as absent:
    raise MissingDependency("vLLM is not installed", field="vllm", hint=HINT) from absent

check_version(str(getattr(vllm, "__version__", "") or importlib.metadata.version("vllm")))

try:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.metrics.utils import create_metric_per_engine
except ImportError as changed:
    raise MissingDependency(
        "vLLM's connector interface is not where it was", field="vllm", got=str(changed), hint=HINT
    ) from changed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.plan.part import Part

__all__ = [
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "allow_tiles",
    "create_metric_per_engine",
    "cpu_page",
    "grid_of",
    "make_known",
    "model_of",
    "number_of",
    "one_of_several",
    "only_group",
    "refuse",
    "show_log",
    "wanted",
]

ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}

CPU_PAGES = ("vllm/cpu", "vllm/cpu-amx")


def show_log() -> None:
    """Has HAWK's lines come where vLLM's do, unless the program has a place of its own for them.

    The lines of single jobs come with `VLLM_LOGGING_LEVEL=DEBUG` only.
    """
    ours, theirs = logging.getLogger("hawk"), logging.getLogger("vllm")
    if ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    level = theirs.getEffectiveLevel()
    ours.setLevel(logging.INFO if level <= logging.DEBUG else max(level, logging.WARNING))
    logging.getLogger("hawk.integrations").setLevel(level)


def make_known(name: str, module: str) -> None:
    """Enters a connector in vLLM's own list.  What it counted is read by its name alone, inside `MultiConnector`."""
    with contextlib.suppress(ValueError):  # it is there
        KVConnectorFactory.register_connector(name, module, name)


def _no(what: str, field: str, got: object, expected: object = "") -> RegistrationFailed:
    return RegistrationFailed(
        f"HawkConnector does not do {what}", field=field, got=got, expected=expected or None
    )


def refuse(config: Any, cache: Any) -> None:
    """Raises `RegistrationFailed` naming what this engine does that the connector cannot."""
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise _no("context parallelism", f"parallel_config.{name}", getattr(parallel, name), "1")
    if getattr(config.model_config, "enable_sleep_mode", False):
        raise _no("sleep mode: it takes away memory that peers read", "model_config.enable_sleep_mode", True)
    if getattr(config, "speculative_config", None) is not None:
        raise _no("speculative decoding", "speculative_config", "a draft", "none")
    only_group(cache)
    stages, layers = parallel.pipeline_parallel_size, config.model_config.get_total_num_hidden_layers()
    if layers % stages:
        raise _no(
            "stages of different lengths",
            "parallel_config.pipeline_parallel_size",
            stages,
            f"a divisor of {layers}",
        )


def only_group(cache: Any) -> Any:
    """The one group of layers that keep keys and values of all tokens; raises `RegistrationFailed` for others."""
    groups = cache.transfer_groups
    if len(groups) != 1:
        found = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise _no(
            "models whose layers keep different caches", "kv_cache_groups", found or "none", "one group"
        )
    spec = groups[0].kv_cache_spec
    kinds = [cls.__name__ for cls in type(spec).__mro__]
    if "FullAttentionSpec" not in kinds:
        raise _no("caches of this kind", "kv_cache_spec", kinds[0], "full attention")
    if getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None):
        raise _no("windows", "kv_cache_spec", kinds[0], "full attention")
    mode = getattr(spec, "kv_quant_mode", 0)
    if int(mode):
        raise _no(
            "quantised caches: their scales stay behind", "kv_cache_dtype", mode, "auto, bfloat16 or float16"
        )
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise _no("compressed states", "kv_cache_spec.tokens_per_state", spec.tokens_per_state, "1")
    return groups[0]


def is_latent(spec: Any) -> bool:
    """Whether its rows are latents of keys and values together."""
    return any(cls.__name__ == "MLAAttentionSpec" for cls in type(spec).__mro__)


def model_of(config: Any, cache: Any) -> Model:
    """All heads and layers that the engine's workers share."""
    group = only_group(cache)
    latent = is_latent(group.kv_cache_spec)
    stages = config.parallel_config.pipeline_parallel_size
    layers = len(group.layer_names) if stages == 1 else config.model_config.get_total_num_hidden_layers()
    return Model(1 if latent else config.model_config.get_total_num_kv_heads(), layers)


def wanted(
    cache: Any,
    names: Sequence[str],
    given: Mapping[str, Any],
    part: Part,
    number: int,
    options: Mapping[str, Any],
) -> Wanted:
    """What a cache has to be that is to stand in for vLLM's tensors; raises `RegistrationFailed` for a strange one."""
    spec = only_group(cache).kv_cache_spec
    latent = is_latent(spec)
    if not latent and getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
        raise _no(
            "values of another width than keys", "kv_cache_spec.head_size_v", spec.head_size_v, spec.head_size
        )
    return Wanted(
        names=tuple(names),
        heads=1 if latent else int(spec.num_kv_heads),
        dim=int(spec.head_size),
        kvs=1 if latent else 2,
        block_size=int(spec.block_size),
        blocks=int(cache.num_blocks),
        part=part,
        number=number,
        given=given,
        options=options,
    )


def one_of_several(config: Any) -> int | None:
    """Which of several engines that were started by one command (data parallel) this is; None where it is alone."""
    if not re.search(r"_dp\d+$", config.kv_transfer_config.engine_id or ""):
        return None
    return int(getattr(config.parallel_config, "data_parallel_index", 0))


def grid_of(config: Any) -> Grid:
    """How the workers share them."""
    parallel = config.parallel_config
    return Grid(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)


def number_of(config: Any) -> int:
    """Which worker this process is."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return int(get_pp_group().rank_in_group * grid_of(config).tp + get_tp_group().rank_in_group)


def in_order(names: Sequence[str]) -> list[str]:
    """The layers' names by the number that each has in it."""

    def number(name: str) -> tuple[int, ...]:
        return tuple(int(part) for part in name.split(".") if part.isdecimal())

    return sorted(names, key=number)


def attention(config: Any, layer: str) -> Any:
    """The attention of that name."""
    return config.compilation_config.static_forward_context[layer]


def pages_of(config: Any, layer: str) -> str:
    """The name of the attention backend, which says how it fills a page."""
    found = attention(config, layer)
    backend = found.get_attn_backend() if hasattr(found, "get_attn_backend") else found.attn_backend
    return str(backend.get_name())


def allow_tiles(isa: str) -> None:
    """Asks Linux for the tile registers (AMX) that attention of this kind computes with; once is for the process.

    vLLM leaves that to the library that multiplies its matrices, which asks at the first prompt of several tokens.  An
    engine that has fetched its first prompt computes a single token, and would end by an illegal instruction.
    """
    if isa == "amx":
        import torch

        if not torch.cpu._init_amx():
            log.warning("the system does not allow AMX, by which this engine's attention is to compute")


def cpu_page(isa: str, tensor: Any) -> str:
    """The layout of a page of CPU attention, found out by letting vLLM write one.

    It depends on the processor's instructions, which neither shape nor strides tell.  Raises `RegistrationFailed`
    for one that no shipped layout describes.
    """
    import torch
    from vllm import _custom_ops as ops

    _, heads, slots, width = (int(n) for n in tensor.shape)
    dim = width // 2
    page = torch.zeros((2, heads, slots, width), dtype=tensor.dtype)
    keys, values = page.view(2, heads, 2 * slots, dim).chunk(2, dim=2)
    size = slots * heads * dim
    rows = [
        torch.arange(at, at + size).remainder(prime).to(tensor.dtype) for at, prime in ((0, 251), (size, 241))
    ]
    k, v = (row.view(slots, heads, dim) for row in rows)
    ops.cpu_attn_reshape_and_cache(k, v, keys, values, torch.arange(slots, 2 * slots), isa)
    got = page[1].contiguous().view(torch.uint8).reshape(-1).numpy()
    both = torch.stack((k, v)).permute(0, 2, 1, 3).contiguous()  # kv, head, slot, dim
    plain = both.view(torch.uint8).reshape(-1).numpy()
    codec = CODECS.get(str(tensor.dtype), "")
    for name in CPU_PAGES:
        if (said := _page(name, codec, heads, slots, dim, plain)) is not None and np.array_equal(said, got):
            return name
    raise _no("pages of CPU attention as this processor has them", "attention", isa, " or ".join(CPU_PAGES))


def _page(
    name: str, codec: str, heads: int, slots: int, dim: int, plain: NDArray[np.uint8]
) -> NDArray[np.uint8] | None:
    """One block in that layout; None if the layout does not hold the codec."""
    from hawk.layouts import load

    if codec not in load(name).codecs:
        return None
    spec = CacheSpec(
        layers=1, heads=heads, dim=dim, block_size=slots, blocks=1, layout="contiguous/bhsd", codec=codec
    )
    made = convert(plain, spec.compile(), spec.replace(layout=name).compile())
    return np.asarray(made).reshape(-1).view(np.uint8)


CODECS: Mapping[str, str] = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
}
