"""How bad things are inside one agent: read there at every frame, set from outside, and what came of it.

A file that both map, because an agent that is killed with SIGKILL tells nobody what it did.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Weather(ctypes.Structure):
    """Chances between 0 and 1, durations in seconds, and counts.

    drop, delay, repeat     chance of each for a frame that is sent
    last                    chance that a frame is dropped with which a side ends a job: those are few
    longest                 a delayed frame comes this much later at most
    slow, slowest           chance that a step of a transport's thread, or a retile, takes up to so much longer
    """

    _fields_ = [
        ("drop", ctypes.c_double),
        ("delay", ctypes.c_double),
        ("repeat", ctypes.c_double),
        ("last", ctypes.c_double),
        ("longest", ctypes.c_double),
        ("slow", ctypes.c_double),
        ("slowest", ctypes.c_double),
        ("frames", ctypes.c_uint64),
        ("dropped", ctypes.c_uint64),
        ("delayed", ctypes.c_uint64),
        ("repeated", ctypes.c_uint64),
        ("slowed", ctypes.c_uint64),
    ]
    drop: float
    delay: float
    repeat: float
    last: float
    longest: float
    slow: float
    slowest: float
    frames: int
    dropped: int
    delayed: int
    repeated: int
    slowed: int


COUNTS = ("frames", "dropped", "delayed", "repeated", "slowed")


@dataclass(frozen=True)
class Sky:
    """A weather to set; the default is calm."""

    drop: float = 0.0
    delay: float = 0.0
    repeat: float = 0.0
    last: float = 0.0
    longest: float = 0.0
    slow: float = 0.0
    slowest: float = 0.0

    def set(self, weather: Weather) -> None:
        """Makes it so."""
        for name, value in vars(self).items():
            setattr(weather, name, value)


CALM = Sky()


def make(path: Path) -> Weather:
    """A new file, calm; and opens it."""
    path.write_bytes(bytes(ctypes.sizeof(Weather)))
    return load(path)


def load(path: Path) -> Weather:
    """Opens a weather file."""
    with path.open("r+b") as file:
        return Weather.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(Weather)))
