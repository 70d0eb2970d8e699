"""What callers hand in wrongly: a typed error that names the field, the value and what would be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

import hawk
from hawk import arguments as a
from hawk.cache import CacheSpec, KVCache
from hawk.connection import _checked
from hawk.control.messages import CacheDescr, Offer, Register
from hawk.errors import BadFrame, HawkError, InvalidArgument, LayoutError

SPEC = CacheSpec(layers=1, heads=2, dim=8, block_size=4, blocks=2)


@pytest.mark.parametrize(
    ("call", "error", "field", "got"),
    [
        (lambda: a.small_note(None), InvalidArgument, "note", "None"),
        (lambda: SPEC.replace(layout="vllm/ndh"), LayoutError, "layout", "vllm/ndh"),
        (lambda: SPEC.replace(codec="bf17"), LayoutError, "codec", "'bf17'"),
        (
            lambda: KVCache.from_torch([np.zeros((2, 3), np.uint16)]),
            InvalidArgument,
            "tensors[0]",
            "a numpy.ndarray of shape (2, 3), uint16",
        ),
        (
            lambda: KVCache.from_torch(np.zeros((4, 4))),
            InvalidArgument,
            "tensors",
            "a numpy.ndarray of shape (4, 4), float64",
        ),
        (lambda: a.small_note("text"), InvalidArgument, "note", "'text'"),
        (lambda: a.small_note(bytes(4097)), InvalidArgument, "note", "4097 bytes"),
        (lambda: a.request_id(None), InvalidArgument, "request", "None"),
        (lambda: a.request_id(5), InvalidArgument, "request", "5"),
        (lambda: a.request_id("x" * 513), InvalidArgument, "request", "513 characters"),
        (lambda: a.request_id("\ud800"), InvalidArgument, "request", repr("\ud800")),
        (lambda: a.text(None, "consumer", 128), InvalidArgument, "consumer", "None"),
        (lambda: a.duration("1000000000h", "ttl"), InvalidArgument, "ttl", "'1000000000h'"),
        (lambda: a.duration(None, "ttl"), InvalidArgument, "ttl", "None"),
        (lambda: a.count(True, "tokens"), InvalidArgument, "tokens", "True"),
        (lambda: a.ticket_text("hawk1." + "x" * 2043), BadFrame, "ticket", "2049 characters"),
        (lambda: a.ticket_text(5), InvalidArgument, "ticket", "5"),
        (lambda: a.ticket_texts([]), InvalidArgument, "ticket", "0 tickets"),
        (lambda: a.ticket_texts(["x"] * 1025), InvalidArgument, "ticket", "1025 tickets"),
        (lambda: a.ticket_texts(["x", None]), InvalidArgument, "ticket[1]", "''"),
        (lambda: a.ticket_texts(["x", 3]), InvalidArgument, "ticket", "3"),
        (lambda: a.source_names([]), InvalidArgument, "source", "0 names"),
        (lambda: a.source_names(["p0", ""]), InvalidArgument, "source[1]", "''"),
        (lambda: a.source_names(None), InvalidArgument, "source", "None"),
        (lambda: SPEC.replace(part=3), InvalidArgument, "part", "3"),
        (lambda: a.block_table([[1, 2], [3]]), InvalidArgument, "blocks", "[[1, 2], [3]]"),
        (lambda: hawk.connect(5), InvalidArgument, "address", "5"),
        (lambda: SPEC.replace(layout=3), LayoutError, "layout", "3"),
        (lambda: SPEC.replace(layers=0), InvalidArgument, "layers", "0"),
        (lambda: SPEC.replace(kvs=3), InvalidArgument, "kvs", "3"),
        (lambda: SPEC.replace(heads="2"), InvalidArgument, "heads", "'2'"),
        (lambda: SPEC.replace(blocks=2**31), InvalidArgument, "blocks", str(2**31)),
        (lambda: SPEC.replace(codec=7), InvalidArgument, "codec", "7"),
        (lambda: SPEC.replace(channels=0), InvalidArgument, "channels", "0"),
        (lambda: SPEC.replace(align=-1), InvalidArgument, "align", "-1"),
        (lambda: SPEC.replace(params=None), InvalidArgument, "params", "None"),
        (lambda: SPEC.replace(params={"x": "1"}), InvalidArgument, "params.x", "'1'"),
        (lambda: KVCache.from_numpy([[1, 2]], SPEC), InvalidArgument, "arrays[0]", "[1, 2]"),
        (lambda: KVCache.from_numpy(None, SPEC), InvalidArgument, "arrays", "None"),
        (lambda: KVCache.from_numpy([np.array([None])], SPEC), InvalidArgument, "arrays[0]", "object"),
        (lambda: KVCache.from_numpy([], None), InvalidArgument, "spec", "None"),
        (lambda: KVCache.alloc(None), InvalidArgument, "spec", "None"),
        (lambda: KVCache.from_torch([3]), InvalidArgument, "tensors[0]", "3"),
    ],
)
def test_what_is_handed_in_wrongly(
    call: Callable[[], object], error: type[HawkError], field: str, got: str
) -> None:
    with pytest.raises(HawkError) as caught:
        call()
    assert type(caught.value) is error
    assert (caught.value.field, caught.value.got) == (field, got)
    assert caught.value.expected


def offer(**changes: Any) -> Offer:
    good = Offer(
        id=1, request="r", cache="0" * 32, blocks=b"", tokens=1, ttl=1.0, note=b"", layers=1, consumer=""
    )
    return msgspec.structs.replace(good, **changes)


def descr(**changes: Any) -> Register:
    good = CacheDescr(layout="", codec="", layers=1, heads=1, dim=1, block_size=1, blocks=1)
    return Register(id=1, cache=msgspec.structs.replace(good, **changes), buffers=[])


@pytest.mark.parametrize(
    ("message", "field", "got"),
    [
        (offer(tokens=-5), "tokens", "-5"),
        (offer(note=None), "note", "None"),
        (descr(layers=0), "cache.layers", "0"),
        (descr(codec="c" * 33), "cache.codec", repr("c" * 33)),
        (descr(params={"n": "many"}), "cache.params[...]", "{'n': 'many'}"),
        (offer(tokens=2**70), "tokens", str(2**70)),
        (descr(params={"n": SPEC.__class__}), "cache.params.n", repr(CacheSpec)),
    ],
)
def test_the_schema_names_the_field_and_the_value(message: msgspec.Struct, field: str, got: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        _checked(message)
    assert (caught.value.field, caught.value.got) == (field, got)
    assert caught.value.expected
    assert "decoded" not in str(caught.value)


def test_what_is_right_passes() -> None:
    _checked(offer())
    assert a.ticket_text(None) == ""
    assert a.ticket_text("hawk1.x") == "hawk1.x"
    assert a.small_note(bytearray(b"ab")) == b"ab"
    assert a.duration("7d", "ttl") == a.LONGEST


def test_a_path_is_an_address() -> None:
    assert hawk.connect("/run/hawk/p0.sock").address == "ipc:///run/hawk/p0.sock"
