"""Who sends them: one peer with a good key by ZeroMQ, and strangers by bare TCP."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time

import msgspec
import zmq

from hawk.control.frames import Header, Kind, encode_body, encode_header, new_generation
from tests.end_to_end.harness import AgentProcess, Site
from tests.fuzz.frames import Mutator

BURST = 128
"""Frames between two questions whether the agent still answers; fewer than a queue holds."""

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
SOURCES = 20_000
"""Connections from one address, which has less than 28,232 ports."""


def flood(site: Site, agent: AgentProcess, frames: int, seed: int) -> float:
    """Sends so many messages with a key that the agent knows, who answers all the while; returns seconds."""
    mutator, began = Mutator(seed), time.monotonic()
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    try:
        sock.linger, sock.rcvtimeo, sock.sndtimeo, sock.rcvhwm = 0, 60_000, 60_000, 0
        mallory, server = site.keys["mallory"], site.keys[agent.name]
        sock.curve_publickey, sock.curve_secretkey = mallory.public.encode(), mallory.secret.encode()
        sock.curve_serverkey = server.public.encode()
        sock.connect(agent.control)
        ping = encode_header(Header(2, Kind.PING, new_generation(), 0))
        for number, done in enumerate(range(0, frames, BURST)):
            for _ in range(min(BURST, frames - done)):
                sock.send_multipart(mutator.message())
            sock.send_multipart([ping, encode_body([number])])
            while not _answers(sock.recv_multipart(), number):
                continue
    finally:
        context.destroy(linger=0)
    return time.monotonic() - began


def _answers(frames: list[bytes], number: int) -> bool:
    return (
        len(frames) == 2
        and frames[0][5:6] == bytes([Kind.PONG])
        and msgspec.msgpack.decode(frames[1]) == [number]
    )


class Strangers:
    """Bare TCP to an agent's control port, by who says nothing, begins a handshake and leaves it, or drips it."""

    def __init__(self, address: str, seed: int) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._to = (host, int(port))
        self._dice = random.Random(seed)
        self._open: list[socket.socket] = []

    def __len__(self) -> int:
        return len(self._open)

    def come(self, count: int) -> int:
        """So many more; returns how many the machine and the agent let connect."""
        made = 0
        for _ in range(count):
            sock = socket.socket()
            try:
                sock.bind((f"127.0.0.{2 + len(self._open) // SOURCES}", 0))
                sock.settimeout(10)
                sock.connect(self._to)
                say = self._dice.choice(
                    [b"", GREETING[:1], GREETING, GREETING + b"CURVE" + bytes(48), _junk(self._dice)]
                )
                with contextlib.suppress(OSError):
                    sock.sendall(say)
            except OSError:
                sock.close()
                continue
            self._open.append(sock)
            made += 1
        return made

    def drip(self) -> None:
        """Each sends one more byte, if anybody still listens."""
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.send(b"\x00", socket.MSG_DONTWAIT)

    def go(self) -> None:
        """All hang up, without a word."""
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        self._open.clear()


def _junk(dice: random.Random) -> bytes:
    return dice.randbytes(dice.randint(1, 300))
