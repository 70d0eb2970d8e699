"""Two agents in two guests, over RDMA: the main job, and what may happen to the other side or to the way there."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator

import pytest

from hawk.client import Client
from hawk.errors import Aborted, HawkError, LeaseExpired, PeerLost, PeerUnreachable, TransferFailed
from hawk.handles import Cache, DeviceCache, Fetch, OfferHandle
from tests.end_to_end import caches as c
from tests.end_to_end.harness import back_to, clients, counts
from tests.end_to_end.test_operate import hawk
from tests.lab.guest.meet import Meeting
from tests.lab.guest.sides import FETCH, LAYERS, LIMIT, TOKENS, Side, device, moved, receive, send, source

LOST = (PeerLost, PeerUnreachable, TransferFailed, LeaseExpired)
DOWN_SECONDS = 3.0


@pytest.fixture(scope="module")
def side() -> Iterator[Side]:
    with Meeting() as meeting:
        made = Side(meeting, "verbs")
        yield made
        made.site.close()


async def _offer_half(side: Side, hp: Client, name: str) -> tuple[OfferHandle, Cache]:
    """Offers a request of which the last layer has not come yet, and tells the other side."""
    of = source(LAYERS)
    cache = await hp.register(of)
    blocks = moved(of).source_blocks
    offer = await hp.offer(name, cache, blocks, tokens=TOKENS, layers_ready=LAYERS - 1, ttl="5min")
    await side.tell(offer.ticket)
    return offer, cache


async def _half(side: Side, hd: Client) -> tuple[Fetch, DeviceCache]:
    """Fetches it, and returns as soon as its first bytes are there, with reads under way."""
    made = await device(hd, LAYERS)
    wanted = moved(source(LAYERS))
    job = hd.fetch(await side.hear(), into=made, blocks=wanted.target_blocks, timeout=FETCH)
    await job.start()
    async for progress in job.progress():
        if progress.nbytes:
            break
    return job, made


@pytest.mark.parametrize("codec", ["bf16", "bfp8_b"])
async def test_every_byte_arrives_and_no_other_changes(side: Side, codec: str) -> None:
    async with clients(side.agent) as (client,):
        before = await counts(client)
        if side.prefill:
            await send(side, client, f"main-{codec}")
        else:
            await receive(side, client, "verbs", codec)
        await back_to(before, client, LIMIT)
    await side.together()


async def test_the_doctor_moves_a_few_bytes_from_the_peer(side: Side) -> None:
    if not side.prefill:
        way = ("--peer", "p0", "--timeout", FETCH, "--local", side.agent.local)
        found = {
            line["name"]: (line["level"], line["text"])
            for line in json.loads(await hawk("doctor", "--json", *way))
        }
        assert found["peer p0 by verbs"][0] == "ok", found
        assert "were the right ones" in found["peer p0 by verbs"][1]
        assert found["rxe0 port 1 GID"] == ("ok", "10.77.0.2 at index 1")
        assert found["transport verbs"][0] == "ok", found
    await side.together()


async def test_an_offer_is_withdrawn_from_one_of_two_jobs(side: Side) -> None:
    """Both read over one link: the one whose key is taken back ends by that, and the other ready."""
    async with clients(side.agent) as (client,):
        if side.prefill:
            offer, cache = await _offer_half(side, client, "withdrawn")
            assert await side.hear() == "some"
            sending = asyncio.get_running_loop().create_task(send(side, client, "kept"))
            assert await side.hear() == "both"
            await offer.withdraw()
            await sending
            assert await offer.ended() == "withdrawn"
            await cache.release()
        else:
            job, made = await _half(side, client)
            await side.tell("some")
            receiving = asyncio.get_running_loop().create_task(receive(side, client, "verbs", begun="both"))
            with pytest.raises(Aborted, match="withdrew"):
                await job
            await receiving
            await made.release()
    await side.together()


async def test_the_prefill_agent_is_killed_in_mid_batch_and_comes_back(side: Side) -> None:
    if side.prefill:
        async with clients(side.agent) as (hp,):
            await _offer_half(side, hp, "killed")
            assert await side.hear() == "some"
            side.agent.kill()
        side.start()
        async with clients(side.agent) as (hp,):
            await side.together()
            await send(side, hp, "again")
    else:
        async with clients(side.agent) as (hd,):
            before = await counts(hd)
            job, made = await _half(side, hd)
            await side.tell("some")
            with pytest.raises(LOST):
                await job
            await made.release()
            await back_to(before, hd, LIMIT)
            await side.together()
            await receive(side, hd, "verbs")
    await side.together()


async def test_the_decode_agent_is_killed_in_mid_batch_and_comes_back(side: Side) -> None:
    if side.prefill:
        async with clients(side.agent) as (hp,):
            before = await counts(hp)
            await _offer_half(side, hp, "orphan")
            assert await side.hear() == "some"
            await side.together()
        async with clients(side.agent) as (hp,):
            await back_to(before, hp, LIMIT)  # its reader is gone, and so is the client that offered
            await side.together()
            await send(side, hp, "once more")
    else:
        async with clients(side.agent) as (hd,):
            await _half(side, hd)
            await side.tell("some")
            side.agent.kill()
        side.start()
        await side.together()
        async with clients(side.agent) as (hd,):
            await side.together()
            await receive(side, hd, "verbs")
    await side.together()


def _interface(state: str) -> None:
    subprocess.run(["ip", "link", "set", "eth0", state], check=True, timeout=30)


async def test_the_link_goes_down_and_comes_up_again(side: Side) -> None:
    """What was under way ends ready, with the right bytes, or by an error with a name; what comes next goes well."""
    async with clients(side.agent) as (client,):
        if side.prefill:
            offer, cache = await _offer_half(side, client, "cut")
            assert await side.hear() == "up again"
            try:
                await offer.layers_ready(LAYERS)
            except HawkError as error:  # it may have ended meanwhile
                print(f"the offer had ended: {error}")
            print("the fetch ended:", await side.hear())
            await cache.release()
            await side.together()
            await send(side, client, "after")
        else:
            job, made = await _half(side, client)
            _interface("down")
            await asyncio.sleep(DOWN_SECONDS)  # longer than the device goes on asking
            _interface("up")
            await side.tell("up again")
            ending = "ready"
            try:
                await job
                c.check(made, c.target_spec(layers=LAYERS), moved(source(LAYERS)), guards=[made])
            except LOST as error:
                ending = str(error)
            await side.tell(ending)
            await made.release()
            await side.together()
            await receive(side, client, "verbs")
    await side.together()
