"""Bad input: each ends with an error that says what and where, and both agents are as before."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

import hawk
from hawk.control.messages import BufferRef, Register, Registered, decode_ticket, encode_ticket
from hawk.errors import (
    Aborted,
    AlreadyClaimed,
    AlreadyOffered,
    BadFrame,
    ConfigError,
    DeadlineExceeded,
    HawkError,
    InvalidArgument,
    LayoutError,
    LeaseExpired,
    PeerUnreachable,
    RangeBusy,
    RegistrationFailed,
    UnknownCache,
    UnknownPeer,
    UnknownRequest,
    Unmappable,
)
from hawk.handles import Cache
from tests.end_to_end import caches as c
from tests.end_to_end.conftest import Decoders
from tests.end_to_end.harness import AgentProcess
from tests.end_to_end.scene import Scene, scene


@pytest.fixture
async def s(prefill: AgentProcess, decoders: Decoders) -> AsyncIterator[Scene]:
    async with scene(prefill, decoders.get("tcp", "direct")) as made:
        yield made


async def refused(s: Scene, error: type[HawkError], **fetch: object) -> HawkError:
    """A fetch that must end with this error, counted as such, and with no byte written."""
    c.paint(s.device)
    before = (await s.hd.status()).endings.get(error.code, 0)
    options = {"into": s.device, "blocks": [1, 2, 3, 4], "timeout": "10s", **fetch}
    ticket = options.pop("ticket", None)
    with pytest.raises(error) as caught:
        await s.hd.fetch(ticket, **options)
    assert type(caught.value) is error
    assert c.untouched(s.device)
    assert (await s.hd.status()).endings[error.code] == before + 1
    return caught.value


async def test_an_unknown_request(s: Scene) -> None:
    error = await refused(s, UnknownRequest, request="never made", source="p0")
    assert (error.field, error.got) == ("request", "never made")


async def test_a_ticket_that_was_consumed(s: Scene) -> None:
    offer = await s.offer()
    await s.hd.fetch(offer, into=s.device, blocks=[1, 2, 3, 4])
    assert "consumed" in str(await refused(s, AlreadyClaimed, ticket=offer))


async def test_a_claim_that_was_guessed(s: Scene) -> None:
    offer = await s.offer()
    ticket = msgspec.structs.replace(decode_ticket(offer.ticket), claim="0" * 32)
    error = await refused(s, UnknownRequest, ticket=encode_ticket(ticket))
    assert error.field == "ticket"
    by_name = await refused(s, UnknownRequest, request=offer.request, source="p0")
    assert by_name.field == "request"


async def test_an_offer_for_another_consumer(s: Scene) -> None:
    offer = await s.offer(consumer="d3")
    error = await refused(s, AlreadyClaimed, ticket=offer)
    assert (error.got, error.expected) == (s.hd.name, "d3")


async def test_a_second_consumer_while_the_first_reads(s: Scene) -> None:
    offer = await s.offer(layers_ready=1)
    async with s.hd.fetch(offer, into=s.device, blocks=[5, 6, 7, 8], timeout="20s") as job:
        async for progress in job.progress():
            if progress.state == "receiving":
                break
        with pytest.raises(AlreadyClaimed):
            await s.hd.fetch(offer, into=s.device, blocks=[1, 2, 3, 4])
        await offer.layers_ready(c.LAYERS)
        assert (await job).tokens == 256


@pytest.mark.parametrize(
    ("blocks", "field"),
    [([0, 1, 2, 40], "blocks[3]"), ([0, 1, 1, 2], "blocks[2]"), ([0, 1, 2], "blocks")],
)
async def test_blocks_of_the_source_that_cannot_be(s: Scene, blocks: list[int], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await s.offer(blocks=blocks, tokens=64)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("blocks", "field"),
    [([0, 1, 14, 2], "blocks[2]"), ([3, 3, 4, 5], "blocks[1]"), ([0, 1], "blocks")],
)
async def test_blocks_of_the_target_that_cannot_be(s: Scene, blocks: list[int], field: str) -> None:
    offer = await s.offer()
    error = await refused(s, InvalidArgument, ticket=offer, blocks=blocks)
    assert error.field == field


@pytest.mark.parametrize("blocks", [[], [-1], [1.5], [[1, 2]], [2**40]])
async def test_what_is_no_block_table(s: Scene, blocks: list[object]) -> None:
    offer = await s.offer()
    with pytest.raises(InvalidArgument) as caught:
        s.hd.fetch(offer, into=s.device, blocks=blocks)
    assert caught.value.field is not None
    assert caught.value.field.startswith("blocks")


@pytest.mark.parametrize(("first", "tokens"), [(0, 257), (256, 1), (200, 100), (250, 2**40)])
async def test_tokens_that_were_not_offered(s: Scene, first: int, tokens: int) -> None:
    offer = await s.offer()
    error = await refused(s, InvalidArgument, ticket=offer, blocks=list(range(8)), first=first, tokens=tokens)
    assert error.field in ("tokens", "blocks")


@pytest.mark.parametrize("what", ["layers", "heads", "dim"])
async def test_caches_of_different_models(s: Scene, what: str) -> None:
    spec = s.spec.replace(**{what: getattr(s.spec, what) * 2, "blocks": 4})
    other = await s.hd.allocate(spec, memory="npu8")
    offer = await s.offer()
    error = await refused(s, Unmappable, ticket=offer, into=other, blocks=[0, 1, 2, 3])
    assert error.field == f"shape.{what}"
    await other.release()


@pytest.mark.parametrize("ticket", ["hawk1.", "hawk1.AAAA", "hawk2.AAAA", "nonsense", "hawk1." + "A" * 3000])
async def test_a_damaged_ticket(s: Scene, ticket: str) -> None:
    with pytest.raises((BadFrame, InvalidArgument)):
        await s.hd.fetch(ticket, into=s.device, blocks=[1])
    assert c.untouched(s.device)


async def test_a_cut_ticket(s: Scene) -> None:
    offer = await s.offer()
    for cut in (offer.ticket[:-9], offer.ticket[:40]):
        with pytest.raises(BadFrame, match="damaged"):
            await s.hd.fetch(cut, into=s.device, blocks=[1])


# -- peers that are not there ----------------------------------------------------------------------------


@contextlib.contextmanager
def refusing_address() -> object:
    """An address where nobody listens, for as long as the block lasts."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{bound.getsockname()[1]}"


async def test_nobody_at_the_address(s: Scene) -> None:
    offer = await s.offer()
    with refusing_address() as address:
        ticket = msgspec.structs.replace(decode_ticket(offer.ticket), agent="d3", address=address)
        error = await refused(s, PeerUnreachable, ticket=encode_ticket(ticket), timeout="2s")
    assert error.facts["address"] == address
    assert error.facts["peer"] == "d3"
    assert "d3" not in (await s.hd.status()).peers


async def test_somebody_else_at_the_address(s: Scene) -> None:
    """The address of one agent under the name of another: CURVE tells them apart."""
    offer = await s.offer()
    ticket = msgspec.structs.replace(decode_ticket(offer.ticket), agent="d3", address=s.prefill.control)
    await refused(s, PeerUnreachable, ticket=encode_ticket(ticket), timeout="2s")


async def test_a_name_that_nobody_has(s: Scene) -> None:
    error = await refused(s, UnknownPeer, request="r", source="p00")
    assert error.got == "'p00'"
    assert "p0" in str(error.hint)


async def test_a_peer_without_a_key(s: Scene) -> None:
    offer = await s.offer()
    ticket = msgspec.structs.replace(decode_ticket(offer.ticket), agent="nobody", address="tcp://127.0.0.1:9")
    await refused(s, ConfigError, ticket=encode_ticket(ticket))


async def test_an_early_fetch_whose_offer_never_comes(s: Scene) -> None:
    error = await refused(s, DeadlineExceeded, request="never", source="p0", wait=True, timeout="0.5s")
    assert (error.facts["request"], error.facts["source"]) == ("never", "p0")
    assert "no offer of it" in error.facts["waited_for"]
    assert error.facts["state"] == "requested"
    assert isinstance(error, TimeoutError)


# -- caches ----------------------------------------------------------------------------------------------


async def test_descriptions_that_lie(s: Scene) -> None:
    descr = c.source_spec().descr()
    here = BufferRef(bytes(16), 1 << 20, 0, 1 << 20)
    for changes, error in (
        ({"layout": "name = "}, LayoutError),
        ({"layout": descr.layout.replace("slot head", "slot slot")}, LayoutError),
        ({"codec": "fp99"}, LayoutError),
        ({"channels": 3}, HawkError),
        ({"blocks": 2**31 - 1}, HawkError),
        ({"heads": 65_536, "dim": 1_048_576, "block_size": 1_048_576, "layers": 65_536}, HawkError),
    ):
        bad = msgspec.structs.replace(descr, **changes)
        with pytest.raises(error):
            await s.hp.call(Register(id=0, cache=bad, buffers=[here] * c.LAYERS), Registered)
    # A foreign process cannot have the agent read the agent's own addresses.
    with pytest.raises(RegistrationFailed, match="another process"):
        size = s.cache.layout.channel_bytes
        await s.hp.call(
            Register(id=0, cache=descr, buffers=[BufferRef(bytes(16), size, 4096, size)] * c.LAYERS),
            Registered,
        )


async def test_buffers_that_are_too_small(s: Scene) -> None:
    with pytest.raises(InvalidArgument) as caught:
        hawk.KVCache.from_numpy([np.zeros(64, np.uint8)] * c.LAYERS, c.source_spec())
    assert caught.value.field == "buffers[0]"


async def test_caches_of_somebody_else(s: Scene) -> None:
    async with hawk.connect(s.decode.local) as other:
        stolen = Cache(other, s.device.id, s.device.layout)
        offer = await s.offer()
        with pytest.raises(UnknownCache):
            await other.fetch(offer, into=stolen, blocks=[1, 2, 3, 4])
        with pytest.raises(InvalidArgument, match="another client"):
            other.fetch(offer, into=s.device, blocks=[1, 2, 3, 4])
        with pytest.raises(UnknownCache):
            await stolen.release()
    async with hawk.connect(s.prefill.local) as other:
        with pytest.raises(UnknownRequest):
            await type(offer)(other, offer.request, offer.ticket).withdraw()


async def test_a_memory_that_is_not_there(s: Scene) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await s.hd.allocate(s.spec, memory="npu9")
    assert "npu8" in str(caught.value.expected)
    with pytest.raises(InvalidArgument, match="channels"):
        await s.hd.allocate(s.spec.replace(channels=5), memory="npu8")


# -- ranges ----------------------------------------------------------------------------------------------


async def test_blocks_that_another_fetch_writes(s: Scene) -> None:
    offer, second = await s.offer(layers_ready=1), await s.offer()
    async with s.hd.fetch(offer, into=s.device, blocks=[5, 6, 7, 8], timeout="20s") as job:
        async for progress in job.progress():
            if progress.state == "receiving":
                break
        with pytest.raises(RangeBusy) as caught:
            await s.hd.fetch(second, into=s.device, blocks=[1, 2, 3, 7])
        assert (caught.value.field, caught.value.got) == ("blocks[3]", "7")
    # Leaving the block ended the first one, so that its blocks are free again.
    assert (await s.hd.fetch(second, into=s.device, blocks=[1, 2, 3, 7])).tokens == 256
    await offer.layers_ready(c.LAYERS)
    assert (await s.hd.fetch(offer, into=s.device, blocks=[5, 6, 7, 8])).tokens == 256


async def test_a_released_cache(s: Scene) -> None:
    other = await s.hd.allocate(s.spec.replace(blocks=2), memory="npu8")
    await other.release()
    await other.release()
    offer = await s.offer()
    with pytest.raises(InvalidArgument, match="released"):
        s.hd.fetch(offer, into=other, blocks=[0, 1])


async def test_releasing_a_source_ends_its_offers(s: Scene) -> None:
    cache = await s.hp.register(c.filled(seed=5))
    offer = await s.hp.offer("held", cache, np.arange(16), tokens=256, layers_ready=1)
    job = s.hd.fetch(offer, into=s.device, blocks=[5, 6, 7, 8], timeout="20s")
    await job.start()
    async for progress in job.progress():
        if progress.nbytes:
            break
    await cache.release()
    with pytest.raises(Aborted, match="released the cache"):
        await job
    assert await offer.ended() == "withdrawn"


# -- offers ----------------------------------------------------------------------------------------------


async def test_two_offers_of_one_name(s: Scene) -> None:
    await s.offer("twice")
    with pytest.raises(AlreadyOffered) as caught:
        await s.hp.offer("twice", s.cache, np.arange(16), tokens=256)
    assert caught.value.got == "twice"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tokens": 0}, "tokens"),
        ({"tokens": -1}, "tokens"),
        ({"ttl": 0}, "ttl"),
        ({"layers_ready": 4}, "layers"),
        ({"note": bytes(5000)}, "note"),
    ],
)
async def test_offers_that_cannot_be(s: Scene, options: dict[str, object], field: str) -> None:
    with pytest.raises((InvalidArgument, ConfigError)) as caught:
        await s.hp.offer("bad", s.cache, np.arange(16), **{"tokens": 256, **options})
    assert caught.value.field == field


async def test_layers_go_forward_only(s: Scene) -> None:
    offer = await s.offer(layers_ready=2)
    for layers in (1, 4):
        with pytest.raises(InvalidArgument) as caught:
            await offer.layers_ready(layers)
        assert caught.value.expected == "2..3"


async def test_a_withdrawn_offer_ends_its_reader(s: Scene) -> None:
    offer = await s.offer(layers_ready=1)
    job = s.hd.fetch(offer, into=s.device, blocks=[5, 6, 7, 8], timeout="20s")
    await job.start()
    async for progress in job.progress():
        if progress.state == "receiving":
            break
    await offer.withdraw()
    with pytest.raises(Aborted, match="withdrew"):
        await job
    assert await offer.ended() == "withdrawn"
    with pytest.raises(UnknownRequest, match="withdrawn"):
        await s.hd.fetch(offer, into=s.device, blocks=[5, 6, 7, 8])
    await offer.withdraw()


async def test_an_offer_whose_time_is_over(s: Scene) -> None:
    offer = await s.offer(ttl=0.05)
    assert await offer.ended() == "expired"
    await refused(s, LeaseExpired, ticket=offer)


async def test_an_offer_that_expires_while_it_is_read_lives_on(s: Scene) -> None:
    offer, other = await s.offer(ttl=0.3, layers_ready=1), await s.offer(ttl=0.35)
    async with s.hd.fetch(offer, into=s.device, blocks=[5, 6, 7, 8], timeout="20s") as job:
        async for progress in job.progress():
            if progress.state == "receiving":
                break
        assert await other.ended() == "expired"  # so the first one's time is over, too
        await offer.layers_ready(c.LAYERS)
        await job
    assert await offer.ended() == "consumed"


# -- roles -----------------------------------------------------------------------------------------------


async def test_each_side_keeps_to_its_role(s: Scene) -> None:
    async with hawk.connect(s.prefill.local) as hp, hawk.connect(s.decode.local) as hd:
        cache = await hd.register(c.filled())
        with pytest.raises(InvalidArgument) as caught:
            await hd.offer("r", cache, np.arange(4), tokens=64)
        assert (caught.value.field, caught.value.got) == ("agent.role", "decode")
        own = await hp.register(c.filled())
        with pytest.raises(InvalidArgument) as caught:
            await hp.fetch(request="r", source="p0", into=own, blocks=[1])
        assert (caught.value.field, caught.value.got) == ("agent.role", "prefill")
    ticket = msgspec.structs.replace(
        decode_ticket((await s.offer()).ticket), agent=s.decode.name, address=s.decode.control
    )
    s.kept = 16
    error = await refused(s, InvalidArgument, ticket=encode_ticket(ticket))
    assert error.field == "agent.role"
