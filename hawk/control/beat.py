"""Asking the other end whether it is there."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from hawk.control.frames import Codec, Ping, Pong

PING: Codec[Ping] = Codec(msgspec.msgpack.Decoder(Ping))
PONG: Codec[Pong] = Codec(msgspec.msgpack.Decoder(Pong))


@dataclass(frozen=True, slots=True)
class Beat:
    """How often to ask whether the other end is there, and how long it may be silent, in seconds."""

    interval: float = 1.0
    timeout: float = 5.0

    @property
    def most_missed(self) -> int:
        """Beats in a row without a frame after which the other end counts as lost."""
        return max(1, math.ceil(self.timeout / self.interval))


BEAT = Beat()
