"""The agents that read from this one: who each said that it is, and what each has been told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hawk.control.messages import Hello, Notice, PeerMessage, Refused, Welcome
from hawk.errors import BadFrame, HawkError, PeerUnreachable
from hawk.jobs.peers import NOTICE_VERSION
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hawk.control.server import Peer

log = get_log("hawk.jobs.guests")

_REMEMBERED = 4096
"""Introductions kept, of agents that are gone too."""


class Guests:
    """Those who have introduced themselves, by the identity of their connection.

    peers       what the server knows of every connection
    welcome     how this agent introduces itself
    send, bad   put a message on the way, and count a frame that should not have come
    """

    def __init__(
        self,
        peers: Mapping[bytes, Peer],
        welcome: Callable[[], Welcome],
        send: Callable[[bytes, PeerMessage], None],
        bad: Callable[[bytes, HawkError], None],
    ) -> None:
        self._peers = peers
        self._welcome = welcome
        self._send = send
        self._bad = bad
        # What each said, and in which generation; of the latest only, but of all who are there now.
        self._hellos: dict[bytes, tuple[Hello, int]] = {}
        self._draining: set[bytes] = set()

    def name(self, identity: bytes) -> str | None:
        """How the process behind an identity has introduced itself, None before it did.

        It says so once, and does not know when it was taken for lost meanwhile, because it stood still or its frames
        went astray; so that is remembered.
        """
        hello = self._said(identity)
        if hello is None or self._filed(identity) not in ("", hello.name):
            return None  # or its key was given another name meanwhile
        return hello.name

    def _said(self, identity: bytes) -> Hello | None:
        """What the process that is there now has said of itself."""
        peer = self._peers.get(identity)
        hello, generation = self._hellos.get(identity, (None, 0))
        return None if peer is not None and peer.generation != generation else hello

    def _filed(self, identity: bytes) -> str:
        """The name of its key, empty where there are no keys."""
        peer = self._peers.get(identity)
        return "" if peer is None else peer.name

    def endpoint(self, identity: bytes, transport: str) -> Mapping[str, str]:
        """How the memory of the process behind an identity is read over a transport; empty where it did not say."""
        hello, _ = self._hellos.get(identity, (None, 0))
        return {} if hello is None else hello.endpoints.get(transport, {})

    def hello(self, identity: bytes, message: Hello) -> None:
        """An agent introduces itself; it is answered, unless it calls itself by another's name."""
        peer, proven = self._peers.get(identity), self._filed(identity)
        if proven and proven != message.name:
            fault = BadFrame("the peer calls itself by another's name", got=message.name, expected=proven)
            self._bad(identity, fault)
            self._refuse(identity, message.name, proven)
            return
        if self.name(identity) != message.name:
            log.info("peer connected", peer=message.name, role=message.role, software=message.software)
        self._hellos[identity] = message, 0 if peer is None else peer.generation
        if len(self._hellos) > _REMEMBERED:
            del self._hellos[next(known for known in self._hellos if known not in self._peers)]
        self.notice(identity, message.draining)
        self._send(identity, self._welcome())

    def renamed(self, identities: Iterable[bytes]) -> None:
        """Their keys have other names now: who calls itself otherwise is told, and who does not any more is welcome.

        They introduced themselves when they came, and have no reason to do so again.
        """
        for identity in identities:
            hello = self._said(identity)
            if hello is None:
                continue
            if self.name(identity) is None:
                log.warning("peer's key has another name now", peer=hello.name, key_of=self._filed(identity))
                self._refuse(identity, hello.name, self._filed(identity))
            else:
                self._send(identity, self._welcome())

    def unknown(self, identity: bytes, word: str) -> HawkError:
        """Why nobody hears `word` from someone who has no name: it has not said it, or its key has another."""
        hello = self._said(identity)
        if hello is None:
            return BadFrame("the first word is hello", got=word)
        self._refuse(identity, hello.name, self._filed(identity))
        return self._other_name(hello.name, self._filed(identity))

    def _refuse(self, identity: bytes, called: str, filed: str) -> None:
        """Says which name its key has here, which whoever proved that it owns the key may know."""
        if self._knows_notices(identity):
            self._send(identity, Refused(self._other_name(called, filed).to_wire()))

    def _other_name(self, called: str, filed: str) -> PeerUnreachable:
        ours = self._welcome().name
        return PeerUnreachable(
            f"the agent {ours} knows this agent's key by another name, and talks with it by no other",
            field="agent.name",
            got=called,
            expected=filed,
            hint=f"Name both alike: agent.name here, and the key in the security.peers_file of {ours}",
        )

    def notice(self, identity: bytes, draining: bool) -> None:
        """The agent says whether it drains."""
        (self._draining.add if draining else self._draining.discard)(identity)

    def gone(self, identity: bytes) -> str:
        """An agent is gone, or taken for lost; returns its name, empty if it never said one."""
        self._draining.discard(identity)
        entry = self._hellos.get(identity)
        return "" if entry is None else entry[0].name

    def met(self) -> list[tuple[Peer, Hello, bool]]:
        """Those who are connected, what they said of themselves, and whether each drains."""
        return [
            (peer, self._hellos[identity][0], identity in self._draining)
            for identity, peer in list(self._peers.items())
            if self.name(identity) is not None
        ]

    def notify(self, *, draining: bool) -> None:
        """Tells all who know the word whether this agent drains."""
        for peer, _, _ in self.met():
            if self._knows_notices(peer.identity):
                self._send(peer.identity, Notice(draining))

    def greet(self) -> None:
        """Introduces this agent anew to all who are there, since it can be read in another way than it said."""
        for peer, _, _ in self.met():
            self._send(peer.identity, self._welcome())

    def _knows_notices(self, identity: bytes) -> bool:
        peer = self._peers.get(identity)
        return peer is not None and peer.version >= NOTICE_VERSION
