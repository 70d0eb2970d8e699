"""Extents of models' KV caches by name, from a file of one's own, or from a model's own `config.json`."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hawk.errors import InvalidArgument
from hawk.plan.shards import Kind, Model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KEYS = ("source", "confirmed", "layers", "heads", "dim", "kvs", "window", "pattern")
_KINDS = {"full", "sliding"}
MOST_BYTES = 1 << 20


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    text = resources.files("hawk.layouts").joinpath("models/models.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def model_names() -> list[str]:
    """Names that `load_model` knows, in the order of the file."""
    return list(_shipped())


def model_source(name: str) -> tuple[str, str]:
    """Where the figures of a model of `model_names` are from, and what they were compared with: empty if nothing."""
    table = _shipped()[name]
    return table.get("source", ""), table.get("confirmed", "")


def load_model(name_or_path: str) -> Model:
    """The model of that name, the only one of a `.toml` file, or that of a `config.json`.

    A file of one's own holds one table like those in `layouts/models/models.toml`.  Raises `InvalidArgument`.
    """
    if name_or_path.endswith((".toml", ".json")):
        return _from_file(Path(name_or_path))
    known = _shipped()
    if name_or_path not in known:
        raise InvalidArgument(
            "unknown model",
            field="model",
            got=name_or_path[:200],
            expected="one of " + ", ".join(known),
            hint="A file is named by a path that ends in .toml or .json",
        )
    return _from_table(name_or_path, known[name_or_path], name_or_path)


def read_tables(path: Path) -> Any:
    """What a `.toml` or `.json` file holds; raises `InvalidArgument` naming the file."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise InvalidArgument(
                "the file is too large", field=str(path), expected=f"at most {MOST_BYTES} bytes"
            )
        text = raw.decode("utf-8")
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise InvalidArgument(
            "cannot read this file", field=str(path), got=error.strerror or error
        ) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument("the file cannot be read", field=str(path), got=str(error)[:200]) from None


def one_table(tables: Any, path: Path) -> tuple[str, dict[str, Any]]:
    """The name and the content of a file's only table; raises `InvalidArgument` naming the file."""
    if not isinstance(tables, dict) or len(tables) != 1 or not isinstance(next(iter(tables.values())), dict):
        raise InvalidArgument(
            "one table is needed, named like the model", field=str(path), got=list(tables)[:8]
        )
    return next(iter(tables.items()))


def _from_file(path: Path) -> Model:
    tables = read_tables(path)
    if path.suffix == ".json":
        return from_config(tables, path.parent.name or path.stem, str(path))
    name, table = one_table(tables, path)
    return _from_table(name, table, f"{path}: {name}")


def _from_table(name: str, table: Mapping[str, Any], origin: str) -> Model:
    for key in table:
        if key not in _KEYS:
            raise InvalidArgument("unknown key", field=f"{origin}.{key}"[:200], expected=", ".join(_KEYS))
    for key in ("layers", "heads", "dim"):
        _extent(table.get(key), f"{origin}.{key}")
    layers = table["layers"]
    names = str(table.get("pattern", "")).split()
    kinds = (
        _kinds([names[i % len(names)] for i in range(layers)], table.get("window"), origin) if names else ()
    )
    return Model(
        name, layers, table["heads"], table["dim"], _extent(table.get("kvs", 2), f"{origin}.kvs"), kinds
    )


def _extent(value: object, field: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 20:
        raise InvalidArgument("a positive integer is needed", field=field, got=value, expected="1..1048576")
    return value


def _kinds(names: Sequence[str], window: object, origin: str) -> tuple[Kind, ...]:
    unknown = {*names} - _KINDS
    if unknown:
        raise InvalidArgument(
            "unknown kind of layer", field=f"{origin}.pattern", got=min(unknown), expected="full or sliding"
        )
    found = []
    for name in ("full", "sliding"):
        layers = tuple(i for i, n in enumerate(names) if n == name)
        if layers:
            found.append(
                Kind(name, layers, _extent(window, f"{origin}.window") if name == "sliding" else None)
            )
    return tuple(found)


def from_config(config: Mapping[str, Any], name: str, origin: str = "config") -> Model:
    """The model that a `config.json` in the form of Hugging Face's transformers describes.

    Read are num_hidden_layers, num_key_value_heads (or num_attention_heads), head_dim (or hidden_size /
    num_attention_heads), kv_lora_rank + qk_rope_head_dim, and layer_types with sliding_window.  Without layer_types
    every layer is taken to keep every token, which is never too little.
    """
    if not isinstance(config, dict):
        raise InvalidArgument("a config is one object", field=origin, got=type(config).__name__)
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config = inner
    layers = _extent(config.get("num_hidden_layers"), f"{origin}: num_hidden_layers")
    types = config.get("layer_types")
    kinds: tuple[Kind, ...] = ()
    if isinstance(types, list):
        short = [str(t).removesuffix("_attention") for t in types]
        if len(short) != layers:
            raise InvalidArgument(
                "one type a layer is needed", field=f"{origin}: layer_types", got=len(short), expected=layers
            )
        kinds = _kinds(short, config.get("sliding_window"), origin) if "sliding" in short else ()
    if config.get("kv_lora_rank"):
        rank = _extent(config["kv_lora_rank"], f"{origin}: kv_lora_rank")
        rope = _extent(config.get("qk_rope_head_dim"), f"{origin}: qk_rope_head_dim")
        return Model(name, layers, 1, rank + rope, 1, kinds)
    attention = config.get("num_attention_heads")
    heads = _extent(config.get("num_key_value_heads") or attention, f"{origin}: num_key_value_heads")
    dim = config.get("head_dim")
    if dim is None:
        count = _extent(attention, f"{origin}: num_attention_heads")
        dim = _extent(config.get("hidden_size"), f"{origin}: hidden_size") // count
    return Model(name, layers, heads, _extent(dim, f"{origin}: head_dim"), 2, kinds)
