"""What the serving side reads of its transport's settings."""

from __future__ import annotations

from typing import Protocol


class Settings(Protocol):
    """Where readers of an engine's transport come in, and how many."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def max_connections(self) -> int: ...
    @property
    def handshake_timeout(self) -> float: ...
