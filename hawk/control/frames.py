"""What one control frame looks like, and how it is read without trusting it.

A message on the wire is two ZeroMQ frames: a header of 22 bytes and a body of msgpack.

    offset  size  header
    0       4     magic, "HAWK"
    4       1     protocol version of the sender
    5       1     kind
    6       8     generation of the sender, never 0
    14      8     generation that the sender believes the receiver to have, 0 if it knows none

Numbers are big-endian.  The first six bytes mean the same in every version, so that two sides that share no
version can still say so.  The kinds VERSION, PING and PONG belong to the link; MESSAGE is everything else.
"""

from __future__ import annotations

import enum
import os
import secrets
import struct
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec

from hawk.errors import BadFrame, InvalidArgument, VersionMismatch

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

MAGIC = b"HAWK"
PROTOCOL_VERSION = 2
_PREFIX = struct.Struct("!4sBB")
_HEADER = struct.Struct("!4sBBQQ")
HEADER_BYTES = _HEADER.size


class Kind(enum.IntEnum):
    """What the body of a frame is."""

    MESSAGE = 1
    """A message of the layer above, decoded by its codec."""
    PING = 2
    """`Ping`; answered with a PONG whatever generation it was meant for."""
    PONG = 3
    """`Pong`."""
    VERSION = 4
    """Empty; the header's version is the newest that the sender speaks.  Never answered."""


_KINDS = {int(kind): kind for kind in Kind}


class Header(NamedTuple):
    """The header of a frame that was accepted."""

    version: int
    kind: Kind
    from_generation: int
    to_generation: int


class Ping(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Asks whether the other end is there; `seq` (0 to 2**64 - 1) comes back in the answer."""

    seq: Annotated[int, msgspec.Meta(ge=0)] = 0


class Pong(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answers a `Ping`; a `seq` of 0 answers a message that was meant for an earlier generation."""

    seq: Annotated[int, msgspec.Meta(ge=0)] = 0


# -- generations -----------------------------------------------------------------------------------------


def new_generation() -> int:
    """A random number from 1 to 2**64 - 1."""
    return 1 + secrets.randbelow((1 << 64) - 1)


_generation = new_generation()


def generation() -> int:
    """The generation of this process: random, never 0, the same until the process ends.

    A forked child has one of its own, since it shares no state with the peers of its parent.
    """
    return _generation


def _renew_generation() -> None:
    global _generation
    _generation = new_generation()


os.register_at_fork(after_in_child=_renew_generation)


# -- headers ---------------------------------------------------------------------------------------------


def accepts(version: int, newest: int = PROTOCOL_VERSION) -> bool:
    """Whether a side whose newest version is `newest` understands `version`: that one and the one before."""
    return version >= 1 and newest - 1 <= version <= newest


def encode_header(header: Header) -> bytes:
    """The 22 bytes of a header.  Raises `InvalidArgument` for a value that has no place in them."""
    if header.from_generation == 0:
        raise InvalidArgument("a sender's generation is never 0", field="from_generation", got=0)
    try:
        return _HEADER.pack(MAGIC, header.version, header.kind, header.from_generation, header.to_generation)
    except struct.error as error:
        raise InvalidArgument(f"the header cannot be written: {error}", field="header", got=header) from None


def decode_header(frame: bytes, newest: int = PROTOCOL_VERSION) -> Header:
    """Reads a header.

    Raises `BadFrame` if these are not the 22 bytes of one, and `VersionMismatch` if the sender's version is
    neither `newest` nor the one before it.
    """
    # The magic and the version come first: a later version may have a longer header.
    if len(frame) < _PREFIX.size or frame[:4] != MAGIC:
        raise BadFrame("this is no HAWK frame", got=_shown(frame), expected=f"{MAGIC!r} and a version")
    version = frame[4]
    if not accepts(version, newest):
        raise VersionMismatch(
            "the peer speaks a protocol version that this side does not",
            got=version,
            expected=newest if newest <= 1 else f"{newest - 1} or {newest}",
            hint="Update the older of the two agents; neighbouring versions understand each other",
        )
    if len(frame) != _HEADER.size:
        raise BadFrame("the header has the wrong length", got=len(frame), expected=f"{_HEADER.size} bytes")
    _, _, kind, sender, receiver = _HEADER.unpack(frame)
    known = _KINDS.get(kind)
    if known is None:
        raise BadFrame("the frame is of no known kind", field="kind", got=kind)
    if sender == 0:
        raise BadFrame("the sender gave no generation", field="from_generation", got=0)
    return Header(version, known, sender, receiver)


def refused_version(frame: bytes) -> int | None:
    """The newest version of a peer that says by a VERSION frame that it refused ours; None for other frames.

    Reads the six bytes only whose meaning never changes.
    """
    if len(frame) < _PREFIX.size:
        return None
    magic, version, kind = _PREFIX.unpack_from(frame)
    return int(version) if magic == MAGIC and kind == Kind.VERSION else None


# -- bodies ----------------------------------------------------------------------------------------------


class Codec(Generic[T]):
    """Reads and writes the bodies of one family of messages.

    `decoder` is a typed msgspec decoder, mostly of a union of tagged structs.  A type that lets a peer decide
    what an object is (`Any`, `object`, a raw or extension value, a type that needs a hook) is refused with
    `InvalidArgument`: what may come in is then always what the types say.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        for path, what in _open_types(msgspec.inspect.type_info(decoder.type), "message", set()):
            raise InvalidArgument(
                "the type leaves open what a peer may send", field=path, got=what, expected="a closed type"
            )
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: T) -> bytes:
        """The message as msgpack.  Raises `InvalidArgument` if a value does not fit msgpack."""
        return encode_body(message, self._encoder)

    def decode(self, body: bytes) -> T:
        """The message in `body`.  Whatever is wrong with it, raises `BadFrame`.

        Lengths claimed by the body are checked against its size before anything is allocated for them.
        """
        try:
            return self._decoder.decode(body)
        except (
            msgspec.MsgspecError,
            ValueError,
            TypeError,
            OverflowError,
            RecursionError,
            MemoryError,
        ) as error:
            # The text of the fault names a field and a type, never the value, so it is safe to pass on.
            raise BadFrame(f"the body cannot be decoded: {str(error)[:200]}", got=_shown(body)) from None


_plain_encoder = msgspec.msgpack.Encoder()


def encode_body(message: object, encoder: msgspec.msgpack.Encoder = _plain_encoder) -> bytes:
    """A message of any type as msgpack.  Raises `InvalidArgument` if a value does not fit msgpack."""
    try:
        return encoder.encode(message)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidArgument(
            f"the message cannot be encoded: {error}", field=type(message).__name__
        ) from error


def _open_types(node: object, path: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Paths to the types below `node` (as `msgspec.inspect` describes them) that accept anything."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(
        node,
        msgspec.inspect.AnyType
        | msgspec.inspect.RawType
        | msgspec.inspect.ExtType
        | msgspec.inspect.CustomType,
    ):
        yield path, type(node).__name__
    elif isinstance(node, msgspec.inspect.Field):
        yield from _open_types(node.type, f"{path}.{node.name}", seen)
    elif isinstance(node, tuple):
        for item in node:
            yield from _open_types(item, path, seen)
    elif isinstance(node, msgspec.inspect.Type):
        below = node.cls.__name__ if isinstance(node, msgspec.inspect.StructType) else path
        for name in node.__struct_fields__:
            value: Any = getattr(node, name)
            if isinstance(value, msgspec.inspect.Type | tuple):
                yield from _open_types(value, below, seen)


def _shown(data: bytes) -> str:
    """The first bytes for an error text, escaped and short, since they are a stranger's."""
    return f"{len(data)} bytes: {bytes(data[:16]).hex()}{'...' if len(data) > 16 else ''}"
