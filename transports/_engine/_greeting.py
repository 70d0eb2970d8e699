"""The first words of a connection, as the reader says and hears them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hawk.errors import PeerUnreachable
from hawk.transports._engine import _wire

if TYPE_CHECKING:
    import socket


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a server says of itself.

    address        the served region's first byte, as its engine calls it
    gpu            the GPU that this is memory of, as the server numbers them, or -1
    pushes         it writes for us
    fills_gpus     it can be asked to write into memory of GPUs
    description    what its engine is met by
    """

    address: int
    nbytes: int
    gpu: int
    pushes: bool
    fills_gpus: bool
    description: bytes


def greet(sock: socket.socket, peer: str, token: bytes, ours: bytes) -> Welcome:
    """Says hello, with our engine's description where pushes are asked for, and hears the answer.

    Raises `PeerUnreachable` where we are not let in, `OSError` where the connection breaks.
    """
    flags = _wire.GPUS | (_wire.PUSHES if ours else 0)
    sock.sendall(_wire.HELLO.pack(_wire.HELLO_MAGIC, _wire.VERSION, token, flags, len(ours)) + ours)
    said = exactly(sock, _wire.WELCOME.size)
    if len(said) < _wire.WELCOME.size:
        raise PeerUnreachable(
            "whoever listens there turned us away",
            peer=peer,
            hint="The peer was restarted or another program has its port; its endpoint is out of date",
        )
    magic, status, address, nbytes, flags, length = _wire.WELCOME.unpack(said)
    beyond = address + nbytes >= 1 << 63  # no address of a process is there
    if magic != _wire.WELCOME_MAGIC or length > _wire.MAX_DESCRIPTION or beyond:
        raise PeerUnreachable("whoever listens there speaks another protocol", peer=peer)
    if status == _wire.FULL:
        raise PeerUnreachable("the peer serves as many connections as it may", peer=peer)
    if status != _wire.OK:
        raise PeerUnreachable("the peer serves no arena", peer=peer)
    theirs = exactly(sock, length)
    if len(theirs) < length:
        raise ConnectionResetError("the peer ended before it answered")
    pushes, fills_gpus = bool(ours) and bool(flags & _wire.PUSHES), bool(flags & _wire.GPUS)
    return Welcome(address, nbytes, _wire.gpu_of(flags), pushes, fills_gpus, theirs)


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    """So many bytes; fewer where the peer has closed the connection."""
    got = bytearray()
    while len(got) < nbytes and (data := sock.recv(nbytes - len(got))):
        got += data
    return bytes(got)
