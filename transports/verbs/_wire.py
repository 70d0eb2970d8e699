"""What goes over the handshake connection of a link: frames of a length (u32, little-endian) and MessagePack.

    reader -> server   Hello     token, the reader's queue pairs                     once, first
    server -> reader   Welcome   the server's queue pairs, connected to the reader's
    reader -> server   Enter     the key of a grant
    server -> reader   Entered   where its range lies, and a remote key for each queue pair; also unasked, with seq 0
                                 and the grant's key, where the server knows who will read and that this is who:
                                 it has entered a grant that nobody else was told of
    reader -> server   Renew     a queue pair broke; here is a fresh one
    server -> reader   Renewed   the server's fresh one, connected to it
    reader -> server   Push      write these stretches of a grant into memory of the reader's, by these keys
    server -> reader   Pushed    written, and seen to be: every WRITE is acknowledged
    reader -> server   Drop      write no more of a Push, which is answered as soon as nothing of it is under way
    server -> reader   Refused   in place of any of these answers, and why

The token is the serving instance's, and travels in its endpoint through the control plane.  It admits a link and gives
access to nothing; the key of a grant does that.  The connection's end is the link's end, for both sides.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import struct
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

VERSION = 1
MOST_BYTES = 64 << 10
"""A frame has no more; a peer that announces more is cut off."""

_LENGTH = struct.Struct("<I")

DENIED, FULL, FAILED, BROKEN = "denied", "full", "failed", "broken"

PUSHES = 16
"""Pushes of one link that are under way at a time; the reader has a receive for each on each of its queue pairs."""

PUSH_ROWS = 2048
"""Rows of one Push at most, so that it goes into a frame."""

MOST_WINDOWS = 256
"""Windows of one Push at most."""

LEAST_MESSAGE = 4096
"""Bytes that a port carries in one message at the least; whoever says less would have us make a request for a byte."""


class QueueFacts(msgspec.Struct, frozen=True, array_like=True):
    """One end of a queue pair, as the other end has to know it.

    port         index of the serving side's port that it belongs to
    number, psn  queue pair number and first packet number
    gid, lid     address; link is the port's kind
    mtu          enum ibv_mtu
    message      bytes of the largest message
    reads_out    reads that this end would have outstanding
    reads_in     reads that it can answer at a time
    """

    port: int
    number: int
    psn: int
    gid: bytes
    lid: int
    link: str
    mtu: int
    message: int
    reads_out: int
    reads_in: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """`reader` is what `reader_id` makes of the reader's own token, by which its agent is known.

    `inlets` are queue pairs by which it would be written to; a server that writes answers with as many `outlets`.
    """

    version: int
    token: bytes
    queues: list[QueueFacts]
    reader: bytes = b""
    inlets: list[QueueFacts] = []


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    queues: list[QueueFacts]
    outlets: list[QueueFacts] = []


class Enter(msgspec.Struct, frozen=True, tag="enter"):
    seq: int
    key: bytes


class Entered(msgspec.Struct, frozen=True, tag="entered"):
    """A grant's range, and how to read it.

    offset, nbytes  the range in the served region
    base            address that byte 0 of the served region would have
    windows         offsets at which a remote key begins, ascending
    keys            the remote keys of each window for each queue pair; none for one that is broken
    queues          the number of the serving side's queue pair that each of them is for
    key             the grant's key, where nobody asked
    """

    seq: int
    offset: int
    nbytes: int
    base: int
    windows: list[int]
    keys: list[list[int]]
    queues: list[int]
    key: bytes = b""


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """`inlet` says whether the index is one of `Hello.inlets`."""

    seq: int
    index: int
    queue: QueueFacts
    inlet: bool = False


class Renewed(msgspec.Struct, frozen=True, tag="renewed"):
    seq: int
    queue: QueueFacts


class Push(msgspec.Struct, frozen=True, tag="push"):
    """What to write where, by which queue pairs, and what to say on each of them afterwards.

    The reader's memory is one line of bytes, of which windows open parts.

    key       the grant's key
    mark      the immediate datum that each of these queue pairs is to end with (`marks`)
    windows   where in the line a remote key begins, ascending
    bases     the address that byte 0 of the line would have, as each window has it
    keys      the remote keys of each window for each queue pair; a queue pair with keys is a credit, for one WRITE with
              the mark; none for one that is not to be used
    queues    the number of the reader's queue pair that each of them is for
    rows      offset in the served region, place in the line and length of each row: `int64[n, 3]`, little-endian, by
              place in the line
    """

    seq: int
    key: bytes
    mark: int
    windows: list[int]
    bases: list[int]
    keys: list[list[int]]
    queues: list[int]
    rows: bytes


class Pushed(msgspec.Struct, frozen=True, tag="pushed"):
    seq: int


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """`seq` is that of the Push."""

    seq: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """`seq` is that of the question, 0 for Hello.  `broken` are the reader's queue pairs whose other end broke."""

    seq: int
    why: str
    text: str
    broken: list[int] = []


Question = Hello | Enter | Renew | Push | Drop
Answer = Welcome | Entered | Renewed | Pushed | Refused

_ENCODER = msgspec.msgpack.Encoder()
_QUESTION: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Question)
_ANSWER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)


def reader_id(token: bytes) -> bytes:
    """What a reader calls itself: it follows from its instance's token, and does not give it away."""
    return hashlib.blake2b(token, digest_size=16, person=b"hawk-verbs").digest()


class BadWire(ConnectionError):
    """The far side does not speak this protocol."""


def write(writer: asyncio.StreamWriter, message: Question | Answer) -> None:
    """Puts a message on its way."""
    body = _ENCODER.encode(message)
    writer.write(_LENGTH.pack(len(body)) + body)


async def read_question(reader: asyncio.StreamReader, most: int = MOST_BYTES) -> Question:
    """The next question.  Raises `OSError`, or `BadWire` for what is none."""
    found: Question = await _read(reader, _QUESTION, most)
    return found


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """The next answer.  Raises `OSError`, or `BadWire` for what is none."""
    found: Answer = await _read(reader, _ANSWER, MOST_BYTES)
    return found


async def _read(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Any], most: int) -> Any:
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if not 0 < length <= most:
            raise BadWire(f"a frame of {length} bytes")
        return decoder.decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("the far side ended") from error
    except msgspec.DecodeError as error:
        raise BadWire(f"no frame of this protocol: {error}") from error


def check(facts: QueueFacts, ports: int) -> None:
    """Raises `BadWire` unless a queue pair can be connected to these."""
    if (
        not 0 <= facts.port < ports
        or not 0 < facts.number < 1 << 24
        or not 0 <= facts.psn < 1 << 24
        or len(facts.gid) != 16
        or not 0 <= facts.lid < 1 << 16
        or not 1 <= facts.mtu <= 5
        or not LEAST_MESSAGE <= facts.message < 1 << 62
        or not 0 < facts.reads_out < 256
        or not 0 < facts.reads_in < 256
    ):
        raise BadWire("a queue pair is impossible")


def check_entered(entered: Entered, queues: int) -> None:
    """Raises `BadWire` unless a link of so many queue pairs can read by it: addresses fit, windows are in order."""
    windows, end = entered.windows, entered.offset + entered.nbytes
    if (
        not len(entered.keys) == len(entered.queues) == queues
        or any(len(keys) not in (0, len(windows)) for keys in entered.keys)
        or not all(0 <= key < 1 << 32 for keys in entered.keys for key in keys)
        or entered.nbytes <= 0
        or entered.offset < 0
        or entered.base < 0
        or entered.base + end >= 1 << 63
        or windows[:1] != [entered.offset]
        or windows[-1] >= end
        or any(a >= b for a, b in itertools.pairwise(windows))
    ):
        raise BadWire("an impossible range")


def rows_of(push: Push) -> NDArray[np.int64]:
    """The rows, `int64[n, 3]`.  Raises `BadWire` for a Push that nobody could do, whatever the grant is."""
    if not push.rows or len(push.rows) % 24 or len(push.rows) > PUSH_ROWS * 24:
        raise BadWire("no rows, or too many")
    rows = np.frombuffer(push.rows, "<i8").reshape(-1, 3).astype(np.int64)
    windows = push.windows
    high = (1 << 62) - 1
    if (
        not 0 < len(windows) == len(push.bases) <= MOST_WINDOWS
        or len(push.keys) != len(push.queues)
        or not any(push.keys)
        or any(len(keys) not in (0, len(windows)) for keys in push.keys)
        or not all(0 <= key < 1 << 32 for keys in push.keys for key in keys)
        or not 0 <= push.mark < 1 << 32
        or any(a >= b for a, b in itertools.pairwise(windows))
        or windows[0] < 0
        or windows[-1] > high
        or not all(-high <= base <= high for base in push.bases)
        or bool((rows < 0).any() or (rows > high).any())
        or int(rows[:, 2].min()) == 0
        or int((rows[:, 0] + rows[:, 2]).max()) > high
        or int((rows[:, 1] + rows[:, 2]).max()) > high
        or int(rows[:, 1].min()) < windows[0]
        or int(rows[:, 2].sum(dtype=np.float64)) > high
        or push.bases[0] + windows[0] < 0
    ):
        raise BadWire("an impossible push")
    base = np.asarray(push.bases, np.int64)[np.asarray(windows).searchsorted(rows[:, 1], "right") - 1]
    if bool((base + rows[:, 1] < 0).any()):
        raise BadWire("a push to no address")
    return rows


def fits(windows: int, queues: int) -> bool:
    """Whether an `Entered` of so many windows on so many queue pairs goes into one frame."""
    return windows * (9 + 5 * queues) + 20 * queues + 256 <= MOST_BYTES


def asks(windows: int, queues: int) -> bool:
    """Whether a `Push` of so many windows for so many queue pairs goes into one frame with all its rows."""
    return 24 * PUSH_ROWS + windows * (18 + 5 * queues) + 20 * queues + 256 <= MOST_BYTES
