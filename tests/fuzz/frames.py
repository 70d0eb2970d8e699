"""Frames that nobody should send: recorded ones, broken in as many ways as there are dice for."""

from __future__ import annotations

import random

from tests.recorded import recorded, versions

HUGE = [
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xdb\x7f\xff\xff\xff",  # text
    b"\xdd\xff\xff\xff\xff",  # an array
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xc9\x40\x00\x00\x00\x01",  # an extension
    b"\x91" * 3000,  # nested
    b"\x80\x04\x95\x10\x00\x00\x00",  # pickle
]
"""Bodies, or beginnings of them, that claim more than they hold."""


class Mutator:
    """Messages (lists of frames) drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        # A generation of ours, and none of the agent's: what was meant for another run of it is not looked into.
        generations = self._dice.randbytes(8) + bytes(8)
        self._valid = [
            [frame.header[:6] + generations, frame.body]
            for version in versions()
            for frame in recorded(version)["peer"]
        ]

    def message(self) -> list[bytes]:
        """One message: a few ways of breaking a valid one, none at all now and then."""
        dice = self._dice
        header, body = dice.choice(self._valid)
        frames = [header, body]
        for _ in range(dice.choice([0, 1, 1, 1, 2, 4])):
            frames = dice.choice(self.WAYS)(self, frames)
        return frames or [b""]

    def _flip(self, frames: list[bytes]) -> list[bytes]:
        which = self._dice.randrange(len(frames)) if frames else 0
        if not frames or not frames[which]:
            return frames
        changed = bytearray(frames[which])
        for _ in range(self._dice.randint(1, 4)):
            changed[self._dice.randrange(len(changed))] = self._dice.randrange(256)
        return [*frames[:which], bytes(changed), *frames[which + 1 :]]

    def _cut(self, frames: list[bytes]) -> list[bytes]:
        which = self._dice.randrange(len(frames)) if frames else 0
        return [
            frame[: self._dice.randint(0, len(frame))] if i == which else frame
            for i, frame in enumerate(frames)
        ]

    def _splice(self, frames: list[bytes]) -> list[bytes]:
        other = self._dice.choice(self._valid)[1]
        at, end = self._dice.randint(0, len(frames[-1]) if frames else 0), self._dice.randint(0, len(other))
        return [*frames[:-1], (frames[-1] if frames else b"")[:at] + other[end:]]

    def _huge(self, frames: list[bytes]) -> list[bytes]:
        piece = self._dice.choice(HUGE)
        body = frames[-1] if frames else b""
        at = self._dice.choice([0, self._dice.randint(0, len(body))])
        return [*frames[:-1], body[:at] + piece + body[at:]]

    def _more(self, frames: list[bytes]) -> list[bytes]:
        extra = [self._dice.randbytes(self._dice.choice([0, 1, 22, 200]))] * self._dice.choice([1, 2, 30])
        return [*frames, *extra]

    def _fewer(self, frames: list[bytes]) -> list[bytes]:
        return frames[: self._dice.randint(0, len(frames))]

    def _noise(self, frames: list[bytes]) -> list[bytes]:
        return [*frames[:1], self._dice.randbytes(self._dice.randint(0, 400))]

    def _swap(self, frames: list[bytes]) -> list[bytes]:
        return frames[::-1]

    def _other_body(self, frames: list[bytes]) -> list[bytes]:
        return [*frames[:1], self._dice.choice(self._valid)[1]]

    WAYS = (_flip, _flip, _cut, _splice, _huge, _more, _fewer, _noise, _swap, _other_body)
