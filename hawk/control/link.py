"""Typed messages between two processes: `Server` on the side that listens, `Channel` on the side that connects.

Both send and receive msgspec messages with a header, ask each other whether they are there (`Ping`, `Pong`), and
tell when the other end fell silent or is another process than before.  No job is known here.

Silence is counted in beats of one's own clock, not in seconds since the last frame: a process whose loop stood
still for a while finds the answers waiting in its socket, and must not take its own pause for the peer's death.

Nothing is sent twice and nothing is kept: a frame that was sent when a connection broke may be lost, and the layer
above must stand that.  What is promised is that the loss of the *peer* is told, within `Beat.timeout`.
"""

from hawk.control.beat import BEAT, Beat
from hawk.control.channel import Channel, State
from hawk.control.server import Peer, Server

__all__ = ["BEAT", "Beat", "Channel", "Peer", "Server", "State"]
