"""Values of the wrong kind at a client: refused where they are handed in, by field, value and expectation."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from hawk.errors import BadFrame, HawkError, InvalidArgument
from tests.end_to_end.conftest import Decoders
from tests.end_to_end.harness import AgentProcess
from tests.end_to_end.scene import Scene, scene


@pytest.fixture
async def s(prefill: AgentProcess, decoders: Decoders) -> AsyncIterator[Scene]:
    async with scene(prefill, decoders.get("tcp", "direct")) as made:
        yield made


@pytest.mark.parametrize(
    ("field", "value"),
    [("note", None), ("consumer", None), ("ttl", "1000000000h"), ("layers_ready", "all")],
)
async def test_what_an_offer_cannot_say(s: Scene, field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await s.offer(**{field: value})
    assert caught.value.field == field
    assert caught.value.got == repr(value)
    assert caught.value.expected


@pytest.mark.parametrize("request_name", [None, 5])
async def test_what_is_no_request(s: Scene, request_name: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await s.hp.offer(request_name, s.cache, [1], tokens=4)
    assert (caught.value.field, caught.value.got) == ("request", repr(request_name))
    with pytest.raises(InvalidArgument):
        s.hd.fetch(request=request_name, source="p0", into=s.device, blocks=[1])
    with pytest.raises(InvalidArgument) as caught:
        s.hd.fetch(request="r", source=None, into=s.device, blocks=[1])
    assert caught.value.field == "source"


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("into", None, InvalidArgument),
        ("source", "p0", InvalidArgument),
        ("request", "another", InvalidArgument),
        ("timeout", "1000000000h", InvalidArgument),
        ("wait", "yes", InvalidArgument),
        ("ticket", "hawk1." + "x" * 2043, BadFrame),
        ("ticket", 5, InvalidArgument),
    ],
)
async def test_what_a_fetch_cannot_say(s: Scene, field: str, value: object, error: type[HawkError]) -> None:
    good = {"ticket": "hawk1.x", "into": s.device, "blocks": [1]}
    with pytest.raises(error) as caught:
        s.hd.fetch(**{**good, field: value})
    assert caught.value.field == field
    assert caught.value.expected


async def test_what_is_no_cache_and_no_spec(s: Scene) -> None:
    for call, field in (
        (s.hp.register(None), "cache"),
        (s.hd.allocate(None, memory="npu0"), "spec"),
        (s.hd.allocate(s.spec, memory=None), "memory"),
        (s.hp.offer("r", None, [1], tokens=1), "cache"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            await call
        assert caught.value.field == field
