"""Frames that earlier versions wrote decode in this one, and this one writes what they can read."""

from __future__ import annotations

import base64
from typing import Any, get_args

import msgspec
import pytest

from hawk.connection import LOCAL_CODEC
from hawk.control.beat import PING, PONG
from hawk.control.frames import PROTOCOL_VERSION, Kind, decode_header, encode_body, refused_version
from hawk.control.messages import LocalMessage, PeerMessage, decode_ticket, encode_ticket
from hawk.jobs.peers import PEER_CODEC
from tests.recorded import Frame, lacks, recorded, versions

CODECS = {"peer": PEER_CODEC, "local": LOCAL_CODEC}
FAMILIES = {"peer": PeerMessage, "local": LocalMessage}


def frames(family: str) -> list[Any]:
    return [
        pytest.param(version, frame, id=f"{version}-{frame.type or frame.kind.name}-{number}")
        for version in versions()
        for number, frame in enumerate(recorded(version)[family])
    ]


def test_every_version_is_recorded() -> None:
    """The newest too: what is added to it from now on has to be optional."""
    assert versions() == list(range(1, PROTOCOL_VERSION + 1))


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize("family", CODECS)
def test_every_type_is_recorded(family: str, version: int) -> None:
    """Types that a later version added are its own."""
    tags = {msgspec.inspect.type_info(kind).tag for kind in get_args(FAMILIES[family])}
    seen = {frame.type for frame in recorded(version)[family]} - {""}
    assert seen <= tags
    assert len(seen) == {"peer": {1: 12, 2: 15}, "local": {1: 21, 2: 29}}[family][version]


def same(old: Any, new: Any) -> bool:
    """Whether everything that was said is understood as it was meant; later versions may know of more."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(key in new and same(value, new[key]) for key, value in old.items())
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(same, old, new))
    return bool(old == new)


def meaning(family: str, frame: Frame) -> Any:
    return msgspec.to_builtins(CODECS[family].decode(frame.body), builtin_types=(bytes,))


@pytest.mark.parametrize(("version", "frame"), frames("peer"))
def test_a_peers_frame_means_what_it_meant(version: int, frame: Frame) -> None:
    if frame.kind is Kind.VERSION:
        assert refused_version(frame.header) == version
        return
    if version >= PROTOCOL_VERSION - 1:
        header = decode_header(frame.header)
        assert (header.version, header.kind) == (version, frame.kind)
    if frame.kind is Kind.MESSAGE:
        understood = meaning("peer", frame)
        assert same(frame.fields, understood)
    else:
        (PING if frame.kind is Kind.PING else PONG).decode(frame.body)


@pytest.mark.parametrize(("version", "frame"), frames("local"))
def test_a_clients_frame_means_what_it_meant(version: int, frame: Frame) -> None:
    assert version == decode_header(frame.header, version).version
    understood = meaning("local", frame)
    assert not lacks(frame.fields, understood)
    assert same(frame.fields, understood)


@pytest.mark.parametrize("version", versions()[-2:])
@pytest.mark.parametrize("family", CODECS)
def test_what_is_written_now_can_be_read_by_earlier_ones(family: str, version: int) -> None:
    """Nothing that the version before reads, or one of this version before this, is left out or of another type."""
    for frame in recorded(version)[family]:
        if frame.kind is Kind.MESSAGE:
            again = msgspec.msgpack.decode(encode_body(CODECS[family].decode(frame.body)))
            assert not lacks({"type": frame.type, **frame.fields}, again)


def test_old_tickets_are_read() -> None:
    (offered,) = (frame for frame in recorded(1)["local"] if frame.type == "offered")
    ticket = decode_ticket(offered.fields["ticket"])
    assert (ticket.agent, ticket.tokens, len(ticket.claim)) == ("p0", 32, 32)
    # Read as an array, of which an older reader takes the entries that it knows.
    old, new = _entries(offered.fields["ticket"]), _entries(encode_ticket(ticket))
    assert new[: len(old)] == old


def _entries(ticket: str) -> list[Any]:
    raw = ticket.removeprefix("hawk1.")
    return list(msgspec.msgpack.decode(base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4))))
