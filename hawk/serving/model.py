"""Models that are served: the extents of their KV, and how much their weights ask of a device."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from hawk.errors import InvalidArgument
from hawk.models import load_model

if TYPE_CHECKING:
    from hawk.plan.shards import Model


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model: `extents` of its cache, `parameters` of its weights, `hidden` elements of a token between layers."""

    extents: Model
    parameters: float
    hidden: int

    @property
    def name(self) -> str:
        """As `load_model` knows it."""
        return self.extents.name

    @property
    def layers(self) -> int:
        """Layers."""
        return self.extents.layers

    @property
    def kv_elements(self) -> int:
        """Elements of KV of one token, all layers and heads."""
        m = self.extents
        return m.layers * m.kvs * m.heads * m.dim


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    text = resources.files("hawk.serving").joinpath("models.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def served_names() -> list[str]:
    """Models that `load_served` knows."""
    return list(_shipped())


def load_served(name: str) -> ServedModel:
    """The model of that name; raises `InvalidArgument` naming those that are known."""
    if name not in _shipped():
        raise InvalidArgument(
            "unknown model", field="model", got=name[:200], expected="one of " + ", ".join(_shipped())
        )
    table = _shipped()[name]
    return ServedModel(load_model(name), float(table["parameters"]), int(table["hidden"]))
