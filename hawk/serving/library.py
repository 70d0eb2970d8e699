"""The discrete-event library, asked for when something is simulated."""

from __future__ import annotations

from typing import Any

from hawk.errors import MissingDependency
from hawk.extras import install


def simpy() -> Any:
    """The module `simpy`.  Raises `MissingDependency` where it is not installed."""
    try:
        import simpy as found
    except ImportError as error:
        raise MissingDependency(
            "the simulator stands on SimPy, which is not installed",
            field="simpy",
            got=error,
            hint=install("evaluate"),
        ) from error
    return found
