import os
import pickle
import struct
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawk.control.frames import (
    HEADER_BYTES,
    MAGIC,
    PROTOCOL_VERSION,
    Codec,
    Header,
    Kind,
    accepts,
    decode_header,
    encode_header,
    generation,
    refused_version,
)
from hawk.errors import BadFrame, InvalidArgument, VersionMismatch


class Move(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    names: list[str]
    blob: bytes
    sizes: tuple[int, ...] = ()
    facts: dict[str, int] = {}


class Stop(msgspec.Struct, tag=True):
    why: str = ""


Message = Move | Stop
CODEC: Codec[Message] = Codec(msgspec.msgpack.Decoder(Message))
U64 = st.integers(1, 2**64 - 1)


@given(st.sampled_from(Kind), U64, st.integers(0, 2**64 - 1))
def test_a_header_comes_back_as_it_was(kind: Kind, sender: int, receiver: int) -> None:
    header = Header(PROTOCOL_VERSION, kind, sender, receiver)
    raw = encode_header(header)
    assert len(raw) == HEADER_BYTES == 22
    assert raw[:4] == MAGIC
    assert decode_header(raw) == header


def test_the_bytes_of_a_header_are_those_that_the_protocol_says() -> None:
    raw = encode_header(Header(1, Kind.PING, 0x0102030405060708, 0x090A0B0C0D0E0F10))
    assert raw == b"HAWK\x01\x02" + bytes(range(1, 17))


@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_no_header(raw: bytes) -> None:
    try:
        header = decode_header(raw)
    except (BadFrame, VersionMismatch):
        return
    assert encode_header(header) == raw


@given(st.binary(max_size=40))
def test_arbitrary_bytes_after_the_magic(tail: bytes) -> None:
    raw = MAGIC + tail
    try:
        header = decode_header(raw)
    except (BadFrame, VersionMismatch):
        return
    assert encode_header(header) == raw


def test_versions() -> None:
    assert [v for v in range(8) if accepts(v, 1)] == [1]
    assert [v for v in range(8) if accepts(v, 2)] == [1, 2]
    assert [v for v in range(8) if accepts(v, 5)] == [4, 5]
    for version in (0, 3, 255):
        raw = bytearray(encode_header(Header(1, Kind.MESSAGE, 1, 0)))
        raw[4] = version
        with pytest.raises(VersionMismatch, match=f"got {version}"):
            decode_header(bytes(raw))
        # A later version may have a longer header, and is a mismatch all the same, not junk.
        with pytest.raises(VersionMismatch):
            decode_header(bytes(raw) + b"more")


def test_a_refusal_is_read_whatever_its_version() -> None:
    assert refused_version(b"HAWK\x09\x04") == 9
    assert refused_version(b"HAWK\x09\x04 and what later versions add") == 9
    assert refused_version(b"HAWK\x09\x01") is None
    assert refused_version(b"JUNK\x09\x04") is None
    assert refused_version(b"HAWK") is None


@pytest.mark.parametrize(
    ("change", "match"),
    [((5, 0), "kind"), ((5, 99), "kind"), ((0, 65), "no HAWK frame")],
)
def test_damaged_headers(change: tuple[int, int], match: str) -> None:
    raw = bytearray(encode_header(Header(1, Kind.MESSAGE, 7, 0)))
    raw[change[0]] = change[1]
    with pytest.raises(BadFrame, match=match):
        decode_header(bytes(raw))


def test_a_generation_of_zero_is_neither_sent_nor_taken() -> None:
    with pytest.raises(InvalidArgument, match="never 0"):
        encode_header(Header(1, Kind.MESSAGE, 0, 0))
    with pytest.raises(BadFrame, match="generation"):
        decode_header(b"HAWK\x01\x01" + bytes(16))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_a_bad_body_or_a_message(raw: bytes) -> None:
    try:
        message = CODEC.decode(raw)
    except BadFrame:
        return
    assert isinstance(message, Move | Stop)


@given(
    st.builds(
        Move,
        st.lists(st.text(max_size=9), max_size=5),
        st.binary(max_size=50),
        st.lists(st.integers(0, 2**63 - 1), max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=5), st.integers(-5, 5), max_size=3),
    ),
    st.data(),
)
def test_bodies_come_back_and_truncated_ones_are_bad(message: Move, data: st.DataObject) -> None:
    raw = CODEC.encode(message)
    assert CODEC.decode(raw) == message
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(BadFrame):
        CODEC.decode(raw[:cut])
    with pytest.raises(BadFrame):
        CODEC.decode(raw + b"\x00")


class _Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.abort, ())


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_bad_bodies(protocol: int) -> None:
    with pytest.raises(BadFrame):
        CODEC.decode(pickle.dumps(_Trap(), protocol))


def _claim(field: str, header: bytes) -> bytes:
    """A Move whose `field` starts with a msgpack header, and ends there."""
    return b"\x82\xa4type\xa4Move" + bytes([0xA0 + len(field)]) + field.encode() + header


GIGA = struct.pack(">I", 1 << 30)


@pytest.mark.parametrize(
    ("field", "first"),
    [
        ("names", b"\xdd"),
        ("sizes", b"\xdd"),
        ("facts", b"\xdf"),
        ("blob", b"\xc6"),
        ("blob", b"\xc9"),
        ("unknown", b"\xdd"),
    ],
)
def test_a_claimed_length_of_a_gigabyte_costs_nothing(field: str, first: bytes) -> None:
    raw = _claim(field, first + GIGA)
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame):
            CODEC.decode(raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("nest", [b"\x91", b"\x81\xa1a"])
def test_deep_nesting_is_a_bad_body(nest: bytes) -> None:
    with pytest.raises(BadFrame):
        CODEC.decode(_claim("unknown", nest * 100_000))
    with pytest.raises(BadFrame):
        CODEC.decode(nest * 100_000)


class Holder(msgspec.Struct):
    inner: "list[Open]"


class Open(msgspec.Struct):
    anything: dict[str, Any]


class Tree(msgspec.Struct):
    below: "list[Tree]"


@pytest.mark.parametrize("kind", [Any, object, Holder, msgspec.Raw, msgspec.msgpack.Ext, list[Open], _Trap])
def test_types_that_leave_open_what_comes_are_refused(kind: Any) -> None:
    with pytest.raises(InvalidArgument, match="closed type"):
        Codec(msgspec.msgpack.Decoder(kind))


def test_recursive_types_are_fine() -> None:
    assert Codec(msgspec.msgpack.Decoder(Tree)).decode(b"\x81\xa5below\x90") == Tree([])


def test_what_msgpack_cannot_hold_is_the_callers_fault() -> None:
    with pytest.raises(InvalidArgument, match="Move"):
        CODEC.encode(Move(names=[], blob=b"", sizes=(1 << 70,)))


def test_a_generation_is_one_per_process() -> None:
    mine = generation()
    assert 0 < mine < 1 << 64
    assert generation() == mine
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, struct.pack("Q", generation()))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        theirs = struct.unpack("Q", pipe.read())[0]
    os.waitpid(child, 0)
    assert theirs not in (0, mine)
