"""What a worker's cache is, read off what vLLM says of it, and made known to the worker's agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hawk.errors import RegistrationFailed
from hawk.integrations import provided
from hawk.integrations.vllm import api
from hawk.integrations.vllm.caches import read_caches
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hawk.integrations.engine import Engine
    from hawk.plan.part import Part

log = get_log("hawk.integrations.vllm")


def register(engine: Engine, config: Any, cache: Any, given: Mapping[str, Any], part: Part) -> list[str]:
    """Registers the worker's cache: vLLM's tensors, or what the platform's own function provides.

    config, cache    vLLM's configuration, and that of its cache
    given            what vLLM's worker registers, by layer

    Returns the names of the layers in their order.  Raises `RegistrationFailed` naming what cannot be.
    """
    settings = engine.settings
    group, name = api.only_group(cache), engine.worker.name
    known = [layer for layer in group.layer_names if layer in given]
    if not known and not settings.cache:
        raise RegistrationFailed(
            "the engine registers none of its layers",
            field="kv_caches",
            got=", ".join(given) or "none",
            expected=", ".join(group.layer_names),
        )
    names = api.in_order(known or group.layer_names)  # a platform may register whatever it has
    readers = part.readers(
        settings.decode_tp or config.parallel_config.tensor_parallel_size,
        settings.decode_pp or config.parallel_config.pipeline_parallel_size,
    )
    if settings.cache:
        provider = provided.find(settings.cache)
        wanted = api.wanted(cache, names, given, part, engine.number, settings.cache_options)
        made = provided.register(engine, provider, wanted, consumers=readers)
        log.info("cache provided", by=settings.cache, cache=repr(made), part=str(part), agent=name)
        return names
    first, spec = given[names[0]], group.kv_cache_spec
    layout = str(getattr(cache, "kv_cache_layout", None) or config.cache_config.kv_cache_layout)
    page = f"vllm/{layout.lower()}"
    if first.device.type == "cpu" and api.pages_of(config, names[0]) == "CPU_ATTN":
        api.allow_tiles(isa := api.attention(config, names[0]).isa)
        page = api.cpu_page(isa, first)
    codec = api.CODECS.get(str(first.dtype))
    if codec is None:
        raise RegistrationFailed(
            "no codec for this dtype",
            field="kv_cache_dtype",
            got=first.dtype,
            expected=", ".join(api.CODECS),
        )
    kv = read_caches(
        given,
        names,
        layout=layout,
        page=page,
        codec=codec,
        kvs=1 if api.is_latent(spec) else 2,
        part=part,
    )
    engine.register(kv, split=int(spec.block_size) // int(first.shape[2]), consumers=readers)
    log.info("cache registered", page=page, codec=codec, part=str(part), agent=name)
    return names
