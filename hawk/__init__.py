"""HAWK moves KV caches between accelerators that disagree about memory layout.

Names below are imported when they are first used, so that `import hawk` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hawk._version import __version__

if TYPE_CHECKING:
    from hawk import blocking as blocking
    from hawk.agent import Agent
    from hawk.cache import CacheSpec, KVCache
    from hawk.client import Client, connect
    from hawk.config import Config, load_config
    from hawk.errors import (
        Aborted,
        AccessDenied,
        AlreadyClaimed,
        AlreadyOffered,
        BadFrame,
        Busy,
        ConfigError,
        ControlError,
        DeadlineExceeded,
        Draining,
        HawkError,
        HawkMemoryError,
        InternalError,
        InvalidArgument,
        JobError,
        LayoutError,
        LeaseExpired,
        MissingDependency,
        NotViable,
        OutOfMemory,
        PartsMismatch,
        PeerLost,
        PeerUnreachable,
        RangeBusy,
        RegistrationFailed,
        StillDraining,
        TransferFailed,
        TransportError,
        UnknownCache,
        UnknownPeer,
        UnknownRequest,
        Unmappable,
        VersionMismatch,
        WrongContext,
    )
    from hawk.handles import Cache, DeviceCache, Ready
    from hawk.memory.shared import alloc
    from hawk.plan.part import Part

_HOME = {
    "Agent": "hawk.agent",
    "Cache": "hawk.handles",
    "CacheSpec": "hawk.cache",
    "Client": "hawk.client",
    "Config": "hawk.config",
    "DeviceCache": "hawk.handles",
    "KVCache": "hawk.cache",
    "Part": "hawk.plan.part",
    "Ready": "hawk.handles",
    "alloc": "hawk.memory.shared",
    "connect": "hawk.client",
    "load_config": "hawk.config",
}
"""The module of each name that does not come from `hawk.errors`."""

__all__ = [
    "Aborted",
    "AccessDenied",
    "Agent",
    "AlreadyClaimed",
    "AlreadyOffered",
    "BadFrame",
    "Busy",
    "Cache",
    "CacheSpec",
    "Client",
    "Config",
    "ConfigError",
    "ControlError",
    "DeadlineExceeded",
    "DeviceCache",
    "Draining",
    "HawkError",
    "HawkMemoryError",
    "InternalError",
    "InvalidArgument",
    "JobError",
    "KVCache",
    "LayoutError",
    "LeaseExpired",
    "MissingDependency",
    "NotViable",
    "OutOfMemory",
    "Part",
    "PartsMismatch",
    "PeerLost",
    "PeerUnreachable",
    "RangeBusy",
    "Ready",
    "RegistrationFailed",
    "StillDraining",
    "TransferFailed",
    "TransportError",
    "UnknownCache",
    "UnknownPeer",
    "UnknownRequest",
    "Unmappable",
    "VersionMismatch",
    "WrongContext",
    "__version__",
    "alloc",
    "connect",
    "load_config",
]


def __getattr__(name: str) -> object:
    if name == "blocking":
        return import_module("hawk.blocking")
    if name not in __all__:
        raise AttributeError(f"module 'hawk' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME.get(name, "hawk.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
