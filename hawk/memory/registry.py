"""Kinds of memory by name, those of plug-ins included.

A folder of `hawk.memory` is a kind by its name, imported when it is asked for: its `MEMORY` is what a plug-in names.
A plug-in is an entry point in the group `hawk.memories` that names a `Memory` subclass with two more members:
`Config`, a frozen dataclass of the options in its `[memory.NAME]` table (beside `kind`), and
`from_config(name, config)`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import hawk.memory
from hawk.errors import HawkError, HawkMemoryError, InvalidArgument
from hawk.memory.cuda import CudaMemory
from hawk.memory.host import HostMemory
from hawk.memory.npu import EmulatedNpu
from hawk.memory.npu_device import NpuDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hawk.memory.base import Memory

    Survey = Callable[..., Iterable[tuple[str, bool, str, str]]]

GROUP = "hawk.memories"


class MemoryKind(Protocol):
    """What a class must have to be a kind of memory."""

    kind: ClassVar[str]
    Config: ClassVar[type[Any]]

    @classmethod
    def from_config(cls, name: str, config: Any) -> Memory:
        """Opens the memory that `config`, an instance of `Config`, describes."""
        ...


_BUILT_IN = cast(
    "dict[str, type[MemoryKind]]", {m.kind: m for m in (HostMemory, EmulatedNpu, NpuDevice, CudaMemory)}
)


@cache
def _folders() -> dict[str, str]:
    return {m.name: f"hawk.memory.{m.name}" for m in pkgutil.iter_modules(hawk.memory.__path__) if m.ispkg}


@cache
def _plug_ins() -> dict[str, EntryPoint]:
    ours = {*_BUILT_IN, *_folders()}
    return {e.name: e for e in entry_points(group=GROUP) if e.name not in ours}


def shipped() -> list[str]:
    """Names of the kinds that come with HAWK, in the order in which documents tell them."""
    return [*_BUILT_IN, *sorted(_folders())]


def kinds() -> list[str]:
    """Names of all kinds, sorted; naming a plug-in's does not import it."""
    return sorted({*shipped(), *_plug_ins()})


def get(kind: str, *, field: str = "kind") -> type[MemoryKind]:
    """The class of a kind.

    Raises `InvalidArgument` for an unknown name, with the nearest known one, and `HawkMemoryError` for a
    plug-in that cannot be imported or is no memory.  One that is not asked for does no harm.
    """
    if kind in _BUILT_IN:
        return _BUILT_IN[kind]
    if kind in _folders():
        return cast("type[MemoryKind]", importlib.import_module(_folders()[kind]).MEMORY)
    entry = _plug_ins().get(kind)
    if entry is None:
        near = difflib.get_close_matches(kind, kinds(), n=1)
        raise InvalidArgument(
            "unknown kind of memory",
            field=field,
            got=repr(kind),
            expected=f"one of {', '.join(kinds())}",
            hint=f"Did you mean {near[0]!r}?" if near else None,
        )
    try:
        found = entry.load()
    except Exception as e:  # a plug-in may fail in any way
        raise HawkMemoryError(
            f"plug-in {entry.value} cannot be imported: {e!r}", field=field, got=kind
        ) from e
    config = getattr(found, "Config", None)
    if not callable(getattr(found, "from_config", None)) or not (
        isinstance(config, type) and dataclasses.is_dataclass(config)
    ):
        raise HawkMemoryError(
            f"plug-in {entry.value} is no kind of memory",
            field=field,
            got=kind,
            expected="a class with a Config dataclass and from_config(name, config)",
        )
    return cast("type[MemoryKind]", found)


def config_class(kind: str, *, field: str = "kind") -> type[Any]:
    """The dataclass of a kind's options; see `get` for the errors."""
    return get(kind, field=field).Config


def create(kind: str, name: str, config: Any) -> Memory:
    """Opens a memory.  `config` is an instance of `config_class(kind)`; blocks while the memory is filled."""
    cls = get(kind)
    if not isinstance(config, cls.Config):
        raise InvalidArgument(
            "not the options of this kind of memory",
            field=f"memory.{name}",
            got=type(config).__name__,
            expected=cls.Config.__name__,
        )
    try:
        return cls.from_config(name, config)
    except HawkError as error:
        _named(error, name)
        raise


def surveys() -> dict[str, Survey]:
    """What looks at a machine's files for kinds that have a driver of their own (`survey`, a static method), by kind.

    Each takes a `hawk.doctor.Machine`, and `lacking`: whether a memory of that kind is configured and cannot be
    opened.  It gives lines: a name, whether all is well, what was found, and a remedy.
    """
    found = {kind: getattr(get(kind), "survey", None) for kind in shipped()}
    return {kind: survey for kind, survey in found.items() if survey is not None}


def require(kind: str, name: str, config: Any) -> None:
    """Raises the objection to a memory, if there is one: before what takes long is begun."""
    error = objection(kind, name, config)
    if error is not None:
        raise error


def objection(kind: str, name: str, config: Any) -> HawkError | None:
    """Why a memory could not be opened, as far as its kind tells without opening it (`obstacle`); None otherwise."""
    look = getattr(get(kind), "obstacle", None)
    try:
        if look is not None:
            look(config)
    except HawkError as error:
        return _named(error, name)
    return None


def _named(error: HawkError, name: str) -> HawkError:
    """The error, with the table that it is about."""
    if error.field is None or not error.field.startswith("memory."):
        error.facts.setdefault("memory", f"[memory.{name}]")
    return error
