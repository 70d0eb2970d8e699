"""What is said of arguments that cannot be right."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hawk.arguments import block_table
from hawk.cache import CacheSpec, KVCache
from hawk.control.messages import Attach
from hawk.errors import Busy, DeadlineExceeded, InvalidArgument, OutOfMemory, from_wire
from hawk.memory import shared

SPEC = CacheSpec(layers=1, heads=1, dim=8, block_size=16, blocks=2)
ELEMENTS = 2 * 2 * 16 * 8


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        ("bf16", "uint16"),
        ("bf16", "int16"),
        ("bf16", "V2"),
        ("bf16", "uint8"),
        ("fp16", "float16"),
        ("fp16", "uint16"),
        ("fp32", "float32"),
        ("fp32", "uint32"),
        ("fp8_e4m3fn", "uint8"),
        ("int8", "int8"),
    ],
)
def test_arrays_that_can_hold_the_codec(codec: str, dtype: str) -> None:
    spec = SPEC.replace(codec=codec)
    nbytes = spec.compile().buffer_bytes[0]
    made = KVCache.from_numpy([np.zeros(nbytes // np.dtype(dtype).itemsize, dtype)], spec)
    assert len(made.buffers[0]) == nbytes


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        ("bf16", "float16"),
        ("bf16", "float32"),
        ("bf16", "uint32"),
        ("bf16", "bool"),
        ("bf16", "complex64"),
        ("fp16", "float32"),
        ("fp16", "float64"),
        ("fp32", "float16"),
        ("fp32", "uint16"),
        ("fp8_e4m3fn", "float16"),
        ("fp8_e4m3fn", "uint16"),
        ("int8", "bool"),
    ],
)
def test_arrays_of_other_numbers_are_refused(codec: str, dtype: str) -> None:
    spec = SPEC.replace(codec=codec)
    nbytes = spec.compile().buffer_bytes[0]
    with pytest.raises(InvalidArgument, match=rf"arrays\[0\]\.dtype: .*{codec}; got {dtype}; expected "):
        KVCache.from_numpy([np.zeros(nbytes // np.dtype(dtype).itemsize, dtype)], spec)


@pytest.mark.parametrize("empty", [[], (), np.empty(0, np.int64), np.empty((0, 3))])
def test_an_empty_block_table_is_called_empty(empty: object) -> None:
    with pytest.raises(InvalidArgument, match="blocks: the block table is empty"):
        block_table(empty)  # type: ignore[arg-type]


def test_floats_are_said_without_their_binary_tail() -> None:
    error = DeadlineExceeded("late", got=np.float64(0.1) + 0.2, expected=1e-7, seconds=5.6000000000000005)
    assert str(error) == "late; got 0.3; expected 1e-07 (seconds=5.6)"
    assert str(from_wire(error.to_wire())) == str(error)
    assert Busy("full", retry_after=0.1 + 0.2).facts == {"retry_after": "0.3"}
    assert DeadlineExceeded("late", seconds=20.0, count=10**12 + 1).facts == {
        "seconds": "20.0",
        "count": "1000000000001",
    }


def test_how_much_could_not_be_allocated_is_readable() -> None:
    with pytest.raises(OutOfMemory, match="cannot allocate 1024 TiB of"):
        shared.alloc(1 << 50)


def test_what_a_peer_wrote_moves_no_cursor() -> None:
    """An error from the wire is shown in terminals and logs, whatever its writer put into it."""
    wire = {"code": "peer-lost", "message": "full\x1b[2J\nready", "got": "\x07é\u202e", "fact.peer": "p\r0"}
    error = from_wire(wire)
    assert str(error) == r"full\x1b[2J\nready; got \x07é\u202e (peer=p\r0)"
    assert from_wire(error.to_wire()).to_wire() == error.to_wire()


@pytest.mark.parametrize("software", ["hawk/1\x1b[2J", "hawk\n", "hawk/\xe9", "x" * 65])
def test_what_a_program_says_it_is_can_be_shown(software: str) -> None:
    decode = msgspec.msgpack.Decoder(Attach).decode
    good = Attach(0, b"t" * 16, 1, "hawk/0.1.0, looking on")
    assert decode(msgspec.msgpack.encode(good)) == good
    with pytest.raises(msgspec.ValidationError, match="software"):
        decode(msgspec.msgpack.encode(msgspec.structs.replace(good, software=software)))
