"""Where a peer is, by its name."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from hawk.control.messages.common import Software
from hawk.errors import UnknownPeer

if TYPE_CHECKING:
    from collections.abc import Mapping


class Registration(Struct, frozen=True, kw_only=True):
    """What an agent says of itself in the directory, as JSON at PREFIXagents/NAME.

    address      `tcp://HOST:PORT` of its control socket
    generation   its run, 16 hexadecimal digits
    role         `prefill`, `decode` or `both`
    transports, layouts   names of those it has
    """

    address: Annotated[
        str, Meta(max_length=300, pattern=r"^tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}\Z")
    ]
    generation: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    role: Software = ""
    software: Software = ""
    transports: Annotated[list[Software], Meta(max_length=64)] = []
    layouts: Annotated[list[Software], Meta(max_length=512)] = []


class Directory(ABC):
    """Finds control addresses by name.  The rest of HAWK asks it whenever it is about to connect."""

    @abstractmethod
    async def resolve(self, name: str, otherwise: str = "", *, wait: float = 0.0) -> str:
        """The control address of the peer `name`, `"tcp://HOST:PORT"`; `otherwise` for a name that it does not know.

        Raises `UnknownPeer` if there is neither.  Bounded in time by the implementation, and by `wait` seconds
        where what would know is away.
        """

    def lost(self, name: str) -> None:
        """The peer was not where `resolve` said, or is there no more; a hint to look again next time."""
        return

    @abstractmethod
    def replace(self, peers: Mapping[str, str]) -> None:
        """The table of configured peers is another from now on."""

    def configured(self) -> dict[str, str]:
        """The peers that are known beforehand, by name, and where they are said to be; for lists."""
        return {}

    def registered(self) -> Mapping[str, Registration]:
        """What other agents have said of themselves, by name, where agents register."""
        return {}

    @property
    def state(self) -> str:
        """How the directory is, in a few words, where that can change; else empty."""
        return ""

    @property
    def up(self) -> bool:
        """Whether what is known of peers is up to date."""
        return True

    async def start(self) -> None:
        """Begins to follow what changes."""
        return

    async def close(self) -> None:
        """Gives back what the directory holds open.  Safe to call twice."""
        return


class StaticPeers(Directory):
    """The `[peers]` table of the configuration: a name and an address for each peer."""

    def __init__(self, peers: Mapping[str, str]) -> None:
        self._peers = dict(peers)

    def replace(self, peers: Mapping[str, str]) -> None:
        """Another table from now on."""
        self._peers = dict(peers)

    @property
    def names(self) -> list[str]:
        """All known names, sorted."""
        return sorted(self._peers)

    def configured(self) -> dict[str, str]:
        """The whole table."""
        return dict(self._peers)

    async def resolve(self, name: str, otherwise: str = "", *, wait: float = 0.0) -> str:
        """The configured address; an unknown name's error lists those that are known, and the nearest."""
        address = self._peers.get(name) or otherwise
        if not address:
            raise unknown_peer(name, self.names)
        return address


def unknown_peer(name: str, known: list[str]) -> UnknownPeer:
    """The error for a peer that is not there, naming those that are."""
    nearest = difflib.get_close_matches(name, known, n=1)
    shown = ", ".join(known[:20]) + (f" and {len(known) - 20} more" if len(known) > 20 else "")
    return UnknownPeer(
        "no peer of that name is configured",
        field="peer",
        got=repr(name),
        expected=f"one of {shown}" if known else None,
        hint=f"Did you mean {nearest[0]}?" if nearest else "Add it to [peers] in the agent's configuration",
    )
