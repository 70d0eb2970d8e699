"""A prefill side that lies never makes a job ready, and costs its own job only."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import pytest

from hawk.control.messages import Accepted, PeerMessage, Prepared, Released
from hawk.errors import AccessDenied, BadFrame, HawkError, InvalidArgument
from tests.unit.jobs.rig import TOKENS, rig

Lie = Callable[[PeerMessage], Iterable[PeerMessage]]

pytestmark = pytest.mark.usefixtures("impatient")


def change(kind: type[PeerMessage], number: int | None = None, **fields: object) -> Lie:
    """Other values in all frames of a kind, or in the chunk of that number."""

    def lie(message: PeerMessage) -> Iterable[PeerMessage]:
        if isinstance(message, kind) and number in (None, getattr(message, "chunk", None)):
            message = msgspec.structs.replace(message, **fields)
        return (message,)

    return lie


def other(field: str, by: int, kind: type[PeerMessage] = Prepared) -> Lie:
    """A number off by so much."""

    def lie(message: PeerMessage) -> Iterable[PeerMessage]:
        if isinstance(message, kind):
            message = msgspec.structs.replace(message, **{field: getattr(message, field) + by})
        return (message,)

    return lie


def first_again() -> Lie:
    """Every later chunk is the first one of its job once more, with a number of its own."""
    first: dict[str, Prepared] = {}

    def lie(message: PeerMessage) -> Iterable[PeerMessage]:
        if isinstance(message, Prepared):
            kept = first.setdefault(message.job, message)
            message = msgspec.structs.replace(kept, chunk=message.chunk)
        return (message,)

    return lie


def released_with(kind: type[PeerMessage]) -> Lie:
    """`Released` is said right after a frame of that kind, long before anybody asked."""

    def lie(message: PeerMessage) -> Iterable[PeerMessage]:
        return (message, Released(message.job)) if isinstance(message, kind) else (message,)  # type: ignore[union-attr]

    return lie


LIES: dict[str, tuple[Lie, type[HawkError], str]] = {
    "fewer bytes": (other("nbytes", -64), BadFrame, "plan of this chunk differs"),
    "more bytes": (other("nbytes", 64), BadFrame, "plan of this chunk differs"),
    "a chunk twice": (first_again(), BadFrame, "came before"),
    "another layer": (other("layer", 1), BadFrame, "no part|came before"),
    "a layer beyond": (other("layer", 1000), BadFrame, "no part"),
    "no layers": (change(Prepared, layers=0), BadFrame, "no part"),
    "blocks beyond": (other("block", 2), BadFrame, "no part"),
    "huge": (change(Prepared, block=2**47, layer=2**47, layers=2**47, blocks=2**47), BadFrame, "no part"),
    "an unpromised chunk": (change(Prepared, 1, chunk=9999), BadFrame, "did not promise"),
    "one chunk less": (other("chunks", -1, Accepted), BadFrame, "did not promise|less than it promised"),
    "no chunk": (change(Accepted, chunks=0), BadFrame, "so many chunks"),
    "endless chunks": (change(Accepted, chunks=2**40), BadFrame, "so many chunks"),
    "other tokens": (change(Accepted, tokens=TOKENS - 1), BadFrame, "other tokens"),
    "other first": (change(Accepted, first=1), BadFrame, "other tokens"),
    "no tokens": (change(Accepted, tokens=0), HawkError, "tokens"),
    "released at accepted": (released_with(Accepted), BadFrame, "before it was asked"),
    "released at prepared": (released_with(Prepared), BadFrame, "before it was asked"),
    "a wrong key": (change(Prepared, key=bytes(32)), AccessDenied, "grant"),
    "elsewhere in the arena": (other("offset", 1 << 17), AccessDenied, "grant"),
    "outside everything": (change(Prepared, offset=2**47), AccessDenied, "grant"),
}


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize("mode", ["direct", "staged"])
async def test_a_lie_has_a_name_and_is_never_ready(name: str, mode: str) -> None:
    lie, error, text = LIES[name]
    async with rig(mode=mode) as made:
        made.to_d.change = lie
        entry = made.offer()
        with pytest.raises(error, match=text):
            await made.fetch(entry.claim).run()
        assert made.progress[-1][0] == "failed"
        await made.serving.idle()
        assert entry.outcome is None
        # The truth afterwards, with the same offer, by the same parts.
        made.to_d.change = lambda message: (message,)
        await made.fetch(entry.claim).run()
        made.check_bytes()


async def test_a_lease_that_was_never_meant() -> None:
    async with rig() as made:
        made.to_d.change = change(Accepted, lease=0.0)
        entry = made.offer(layers=1)
        with pytest.raises(HawkError) as caught:
            await made.fetch(entry.claim).run()
        assert caught.value.code == "lease-expired"
        await made.serving.idle()


async def test_junk_in_a_fetch_is_named_to_who_sent_it() -> None:
    """The other direction: a decode side whose fetch cannot be right."""
    for fields, code in (
        ({"blocks": b"123"}, "bad-frame"),
        ({"chunk": 0}, "out-of-memory"),
        ({"transport": "carrier pigeon"}, "not-viable"),
        ({"first": TOKENS}, "invalid-argument"),
        ({"tokens": 2**47}, "invalid-argument"),
        ({"deadline": 0.0}, "deadline-exceeded"),
    ):
        async with rig() as made:
            made.to_p.change = lambda message, fields=fields: (
                (msgspec.structs.replace(message, **fields),)
                if type(message).__name__ == "Fetch"
                else (message,)
            )
            entry = made.offer()
            with pytest.raises(HawkError) as caught:
                await made.fetch(entry.claim).run()
            assert caught.value.code == code, caught.value
            await made.serving.idle()
            assert entry.outcome is None
    assert issubclass(InvalidArgument, HawkError)
