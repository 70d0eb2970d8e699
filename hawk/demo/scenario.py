"""What is moved, from which layout into which, and how much of it fits into this machine's memory."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.cache import CacheSpec
from hawk.errors import InvalidArgument, OutOfMemory
from hawk.memory.available import available_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALIGNMENT = 64
"""Of the emulated device: every tensor and page starts at a multiple of this many bytes."""

DEFAULT_TOKENS = 4096

PROCESSES = 400 << 20
"""What the processes take beyond the caches: the engine, two agents, the checker, and the headroom HAWK leaves."""

RESERVE = 512 << 20
"""Bytes that stay free where a request is shrunk, or a tenth of the memory if that is more."""


@dataclass(frozen=True)
class Scenario:
    """One request of `tokens` tokens: a source cache in host pages, a target cache in the channels of a device.

    Both caches have more blocks than the request needs, and its blocks are a random choice of them.
    """

    summary: str
    source: CacheSpec
    target: CacheSpec
    tokens: int

    @property
    def source_bytes(self) -> int:
        """Bytes of the whole source cache."""
        compiled = self.source.compile()
        return compiled.channel_bytes * compiled.buffer_count

    @property
    def target_bytes(self) -> int:
        """Bytes of the whole target cache, over all channels."""
        compiled = self.target.compile()
        return compiled.channel_bytes * compiled.buffer_count * compiled.channels

    @property
    def payload(self) -> int:
        """Bytes of the request in the source's pages."""
        spec = self.source
        return spec.layers * spec.kvs * self.tokens * spec.heads * spec.dim * 2

    @property
    def channels(self) -> int:
        """Memory channels of the device."""
        return self.target.compile().channels

    def source_blocks(self) -> NDArray[np.int64]:
        """The request's block table in the source; the same at every call."""
        return _table(self.tokens, self.source, seed=1)

    def target_blocks(self) -> NDArray[np.int64]:
        """The request's block table in the target; the same at every call."""
        return _table(self.tokens, self.target, seed=2)


def load(tokens: int, *, codec: str | None = None, channels: int | None = None) -> Scenario:
    """The scenario of `layouts/scenarios/demo.toml` for `tokens` tokens; `codec` and `channels` of the device."""
    if tokens < 1:
        raise InvalidArgument("nothing to move", field="tokens", got=tokens, expected="1 or more")
    text = resources.files("hawk.layouts").joinpath("scenarios", "demo.toml").read_text(encoding="utf-8")
    tree = tomllib.loads(text)
    source, target = _spec(tree["model"], tree["source"]), _spec(tree["model"], tree["target"])
    target = replace(
        target, codec=codec or target.codec, channels=channels or target.channels, align=ALIGNMENT
    )
    return Scenario(
        summary=tree["summary"],
        source=replace(source, blocks=_pool(tokens, source.block_size)),
        target=replace(target, blocks=_pool(tokens, target.block_size)),
        tokens=tokens,
    )


def fit(tokens: int, arenas: int, *, codec: str | None = None, channels: int | None = None) -> Scenario:
    """The scenario for `tokens` tokens, or for as many as there is memory for beside `arenas` bytes.

    What is asked for beyond `DEFAULT_TOKENS` leaves a quarter, `RESERVE` at least, to the rest of the machine.  Raises
    `OutOfMemory` if not even one block of the device fits.
    """
    available = available_memory()
    usual = needed(load(DEFAULT_TOKENS, codec=codec, channels=channels), arenas)
    most = max(available - max(RESERVE, available // 4), min(available, usual))
    while True:
        made = load(tokens, codec=codec, channels=channels)
        need = needed(made, arenas)
        if need <= most:
            return made
        block = made.target.block_size
        if tokens <= block:
            raise OutOfMemory(
                "not even one block fits",
                got=f"{available >> 20} MiB available",
                expected=f"{-(-need // (1 << 20))} MiB",
            )
        per_token = (made.source_bytes + made.target_bytes) / tokens
        fewer = tokens - max(1, int((need - most) / per_token))
        tokens = max(block, fewer // block * block)


def needed(scenario: Scenario, arenas: int) -> int:
    """Bytes of memory that moving it takes in all processes together."""
    return scenario.source_bytes + scenario.target_bytes + arenas + PROCESSES


def _spec(model: dict[str, Any], cache: dict[str, Any]) -> CacheSpec:
    return CacheSpec(
        layers=model["layers"],
        heads=model["heads"],
        dim=model["dim"],
        block_size=cache["block_size"],
        blocks=1,
        layout=cache["layout"],
        codec=cache["codec"],
        channels=cache.get("channels"),
    )


def _pool(tokens: int, block_size: int) -> int:
    blocks = -(-tokens // block_size)
    return blocks + max(2, blocks // 16)


def _table(tokens: int, spec: CacheSpec, seed: int) -> NDArray[np.int64]:
    order = np.random.default_rng(seed).permutation(spec.blocks)
    return order[: -(-tokens // spec.block_size)].astype(np.int64)
