"""Caches that an engine does not allocate itself: a platform's own function gives them.

An engine for a GPU has its cache in tensors, which a connector registers as they are.  An NPU's platform has it in the
channels of a device, in the device's layout, and nothing in those tensors.  It names a function,

    async def provide(client: hawk.Client, wanted: Wanted) -> hawk.Cache:
        spec = wanted.spec("tenstorrent/kv", codec="bfp8_b")
        return await client.allocate(spec, memory="npu0")

which is called once in each worker, on the connector's event loop, while the worker waits for it.  What it returns is
where requests are brought to, and offered from; the platform keeps it, too, and attends from its channels.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hawk.cache import CacheSpec
from hawk.errors import ConfigError, HawkError, InvalidArgument, RegistrationFailed
from hawk.handles import Cache
from hawk.integrations.settings import WHERE
from hawk.observe.log import get as get_log
from hawk.plan.part import Part

if TYPE_CHECKING:
    from hawk.client import Client
    from hawk.integrations.engine import Engine
    from hawk.layouts import Layout

log = get_log("hawk.integrations.provided")

FIELD = f"{WHERE}.cache"

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the cache of one worker has to be.

    names            the engine's names of this worker's layers, in their order: layer i of the cache is `names[i]`
    heads, dim, kvs  of this worker's KV heads; kvs is 1 where a row is a latent, without V of its own
    block_size       tokens in a block, as the engine's block tables count them
    blocks           how many of those the engine numbers, from 0 on
    part             which heads and layers of the model these are
    number           which worker of the engine
    given            what the engine registered as its caches, by layer: whatever the platform's worker made
    options          `cache_options` of the connector's configuration
    """

    names: tuple[str, ...]
    heads: int
    dim: int
    kvs: int
    block_size: int
    blocks: int
    part: Part
    number: int = 0
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)

    def spec(self, layout: str | Layout, *, block_size: int = 0, **more: Any) -> CacheSpec:
        """A cache of that layout that holds it; `more` are other fields of `CacheSpec`, such as `codec`.

        block_size    tokens in one of the cache's own blocks; 0: as the engine's.  It divides the engine's

        Raises `InvalidArgument`, or `LayoutError` for a layout that is none.
        """
        size = block_size or self.block_size
        if size < 1 or self.block_size % size:
            raise InvalidArgument(
                "one block of the engine has to be a whole number of the cache's",
                field="block_size",
                got=size,
                expected=f"{self.block_size}, or a divisor of it",
            )
        fields: dict[str, Any] = {
            "blocks": self.blocks * self.block_size // size,
            "kvs": self.kvs,
            "part": self.part,
            **more,
        }
        return CacheSpec(
            layers=len(self.names),
            heads=self.heads,
            dim=self.dim,
            block_size=size,
            layout=layout,
            **fields,
        )


Provider = Callable[["Client", Wanted], Awaitable[Cache]]


def find(name: str) -> Provider:
    """The function `"MODULE:FUNCTION"`; raises `ConfigError` naming what is missing."""

    def wrong(what: str, got: object = name) -> ConfigError:
        return ConfigError(
            what,
            field=FIELD,
            got=got,
            expected='"MODULE:FUNCTION", an async function of (client, wanted) that returns a hawk.Cache',
        )

    if not _NAME.fullmatch(name):
        raise wrong("no name of a function")
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as error:  # whatever the platform's code raises
        raise wrong(f"the module cannot be imported: {error!r}") from error
    if not callable(found):
        raise wrong(f"the module {module} has no such function")
    made: Provider = found
    return made


def register(engine: Engine, provider: Provider, wanted: Wanted, *, consumers: int) -> Cache:
    """Has the provider make the worker's cache, and the engine know it.

    consumers    how many workers of the other side read each offer of it

    Raises what the provider raised, as `RegistrationFailed` unless it is an error of HAWK's, and `RegistrationFailed`
    naming the field where the cache is not what was wanted.
    """
    called = False

    async def make(client: Client) -> Cache:
        nonlocal called
        if called:
            # An agent that comes back knows nothing of the old one's memory, and the engine's requests are in that.
            raise RegistrationFailed(
                "the cache was in memory of an agent that is gone: restart the engine", field=FIELD
            )
        called = True
        try:
            cache: object = await provider(client, wanted)
        except HawkError:
            raise
        except Exception as error:
            raise RegistrationFailed(
                "the function that provides the cache failed", field=FIELD, got=repr(error)
            ) from error
        return checked(cache, client, wanted)

    engine.register(make, consumers=consumers)
    assert engine.cache is not None
    engine.split = wanted.block_size // engine.cache.layout.shape.block_size
    return engine.cache


def checked(cache: object, client: Client, wanted: Wanted) -> Cache:
    """The cache, if it holds what is wanted; else raises `RegistrationFailed`; of another client, `InvalidArgument`."""
    if not isinstance(cache, Cache):
        raise RegistrationFailed(
            "no cache was provided",
            field=FIELD,
            got=type(cache).__name__,
            expected="a hawk.Cache, as Client.allocate and Client.register return it",
        )
    cache.check(client)
    shape = cache.layout.shape

    def differs(name: str, got: object, expected: object) -> RegistrationFailed:
        return RegistrationFailed(
            "the cache that was provided is not what the engine needs",
            field=f"{FIELD}.{name}",
            got=got,
            expected=expected,
        )

    exact = {"layers": len(wanted.names), "heads": wanted.heads, "dim": wanted.dim, "kvs": wanted.kvs}
    for name, expected in exact.items():
        if getattr(shape, name) != expected:
            raise differs(name, getattr(shape, name), expected)
    if wanted.block_size % shape.block_size:
        raise differs("block_size", shape.block_size, f"{wanted.block_size}, or a divisor of it")
    least = wanted.blocks * (wanted.block_size // shape.block_size)
    if shape.blocks < least:
        raise differs("blocks", shape.blocks, f"{least} or more")
    part = cache.part or Part.of(wanted.heads, len(wanted.names))
    if part != wanted.part:
        raise differs("part", part, wanted.part)
    return cache
