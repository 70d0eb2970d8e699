"""HAWK moves KV caches between accelerators that disagree about memory layout.

Names below are imported when they are first used, so that `import hawk` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hawk._version import __version__

if TYPE_CHECKING:
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

_HOME = {"Config": "hawk.config", "load_config": "hawk.config"}
"""The module of each name that does not come from `hawk.errors`."""

__all__ = [
    "Aborted",
    "AccessDenied",
    "AlreadyClaimed",
    "AlreadyOffered",
    "BadFrame",
    "Busy",
    "Config",
    "ConfigError",
    "ControlError",
    "DeadlineExceeded",
    "Draining",
    "HawkError",
    "HawkMemoryError",
    "InternalError",
    "InvalidArgument",
    "JobError",
    "LayoutError",
    "LeaseExpired",
    "MissingDependency",
    "NotViable",
    "OutOfMemory",
    "PeerLost",
    "PeerUnreachable",
    "RangeBusy",
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
    "load_config",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'hawk' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME.get(name, "hawk.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
