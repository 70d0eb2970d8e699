"""Who may speak on CURVE sockets: the ZeroMQ authentication protocol (RFC 27), answered on the event loop.

ZeroMQ's I/O thread asks over `inproc://zeromq.zap.01` whenever a client has proved that it owns a public key.
The answer is yes only for a key on the list; without an answer nobody gets in.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from hawk.control.receive import ReceiveLoop
from hawk.errors import ConfigError
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Mapping

log = get_log("hawk.control.zap")

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"hawk"
SILENCE = 60.0
"""Seconds in which a refused key is named once: a peer that is refused tries again at once, for ever."""

MOST_NAMED = 64
"""Refused keys named in that time; keys cost nothing, and a stranger shall not fill the log with them."""

_FRAMES = 8
"""An empty delimiter, version, request id, domain, address, routing id of the peer, mechanism, key."""


class Zap:
    """Answers for every CURVE socket of one ZeroMQ context.  Denies by default, and counts what it denies.

    `denied` counts by reason: `"unknown-key"` or `"bad-request"`.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.denied: Counter[str] = Counter()
        self.admitted = 0
        self._names: dict[str, str] = {}
        self._named: dict[str, float] = {}
        self._raw = context.socket(zmq.ROUTER)
        self._raw.linger = 0
        self._raw.bind(ZAP_ADDRESS)
        self._loop = ReceiveLoop(self._raw, self._answer, max_frames=_FRAMES, max_bytes=4096)

    def start(self) -> None:
        """Begins to answer, on the running event loop."""
        self._loop.start()

    def authorise(self, peers: Mapping[str, str]) -> None:
        """Replaces the list of peers (name to public key) from now on.

        A connection that was let in before stays open, but `name_of` no longer knows its key; the server link
        refuses its messages by that.
        """
        names: dict[str, str] = {}
        for name, key in peers.items():
            if key in names:
                raise ConfigError(
                    "two peers have the same key", field=f"peers.{name}", got=f"the key of {names[key]}"
                )
            names[key] = name
        self._names = names

    def name_of(self, key: str) -> str | None:
        """The name of the peer with that public key, None if it is not (or no longer) on the list."""
        return self._names.get(key)

    def look(self) -> None:
        """Sees whether somebody waits for an answer; to be called now and then.

        A newcomer has no other way to be heard than by this socket's descriptor, and nothing else uses the socket.
        """
        self._loop.poke()

    def close(self) -> None:
        """Stops answering; from then on nobody new gets in.  Safe to call twice."""
        self._loop.stop()
        self._raw.close(linger=0)

    def _warn(self, key: str, address: str) -> None:
        """Says whose key was refused, if that was not said lately."""
        now = time.monotonic()
        self._named = {named: until for named, until in self._named.items() if until > now}
        if key in self._named or len(self._named) > MOST_NAMED:
            return
        self._named[key] = now + SILENCE
        if len(self._named) > MOST_NAMED:
            log.warning("many keys are refused; for a minute no more of them are named", keys=MOST_NAMED)
            return
        log.warning(
            "a peer was refused: its key is not in the peers file",
            key=key,
            address=address,
            hint="If the peer is yours, add this public key to security.peers_file and send this agent SIGHUP",
        )

    def _answer(self, identity: bytes, frames: list[bytes]) -> None:
        request = frames[2] if len(frames) > 2 else b""
        known: str | None = None
        if (
            len(frames) == _FRAMES
            and frames[1] == b"1.0"
            and frames[3] == ZAP_DOMAIN
            and frames[6] == b"CURVE"
            and len(frames[7]) == 32
        ):
            key = z85.encode(frames[7]).decode("ascii")
            if key in self._names:
                known = key
            else:
                self.denied["unknown-key"] += 1
                self._warn(key, frames[4].decode("ascii", "replace")[:64])
        else:
            self.denied["bad-request"] += 1
        # The user id is the key, not the name: a name may get another key while this connection lasts.
        if known is None:
            verdict = [b"400", b"this key is not authorised", b"", b""]
        else:
            self.admitted += 1
            verdict = [b"200", b"", known.encode("ascii"), b""]
        # If the connection is gone by now, so is the need for an answer.
        with contextlib.suppress(zmq.ZMQError):
            self._raw.send_multipart([identity, b"", b"1.0", request, *verdict], zmq.NOBLOCK)
        self._loop.poke()
