"""Four senders, one receiver: a request is ready when four distinct parts have arrived, and not before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import hawk
from hawk.agent import Agent
from hawk.client import Client
from hawk.config import load_config
from hawk.control.messages import PeerMessage, Release
from hawk.errors import (
    Aborted,
    AlreadyClaimed,
    AlreadyOffered,
    InvalidArgument,
    LeaseExpired,
    PartsMismatch,
    PeerLost,
    UnknownRequest,
)
from hawk.handles import DeviceCache, Fetch
from hawk.jobs.serve import ServeJob
from tests.end_to_end import caches as c
from tests.end_to_end.harness import AgentProcess, Site, back_to, clients, counts, npu, until
from tests.end_to_end.ranks import Model, Sender, receivers, senders
from tests.end_to_end.scene import idle

BLOCKS = [2, 0]
MODEL = Model(layers=4, heads=8)
GIVE = [MODEL.spec().shard(tp_rank=r, tp_size=4) for r in range(4)]
WHOLE = MODEL.target()


@dataclass
class Group:
    """The agents; `again` starts one anew that has died, at the address that it had."""

    site: Site
    prefill: list[AgentProcess]
    decode: AgentProcess

    def again(self, number: int) -> AgentProcess:
        old = self.prefill[number]
        made = self.site.start(old.name, role="prefill", control=old.control)
        self.prefill[number] = made
        return made


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    site = Site()
    prefill = [site.start(f"p{i}", role="prefill") for i in range(4)]
    known = {agent.name: agent.control for agent in prefill}
    decode = site.start("d0", {"peers": known, "memory.npu8": npu(8)}, role="decode")
    yield Group(site, prefill, decode)
    site.close()


@dataclass
class Scene:
    group: Group
    sent: list[Sender]
    hd: Client
    device: DeviceCache

    def fetch(self, what: object = None, *, into: DeviceCache | None = None, **options: object) -> Fetch:
        options = {"blocks": BLOCKS, "timeout": "20s", **options}
        return self.hd.fetch(what, into=into or self.device, **options)  # type: ignore[arg-type]

    def check(self) -> None:
        MODEL.check(self.device, WHOLE, BLOCKS)
        c.paint(self.device)


@pytest.fixture
async def scene(group: Group) -> AsyncIterator[Scene]:
    """Four workers with an agent each, and one receiver; the receiver's agent is as before at the end."""
    async with clients(*group.prefill) as givers, clients(group.decode) as (hd,):
        before = await until(hd, idle, "no job")
        sent = await senders(givers, MODEL, GIVE)
        (device,) = await receivers(hd, [WHOLE])
        made = Scene(group, sent, hd, device)
        yield made
        await device.release()
        await back_to(before, hd)


async def seen(job: Fetch, nbytes: int, total: int = 0) -> int:
    """Returns the job's total once so many of its bytes are there, and so many are known to come."""
    async for p in job.progress():
        if p.nbytes >= nbytes and p.total >= total:
            return p.total
    await job  # raises what it ended with
    raise AssertionError("the job ended before")


async def test_ready_after_four_distinct_parts_and_not_before(scene: Scene) -> None:
    offers = [
        await sender.offer(MODEL, layers_ready=0 if i == 3 else None) for i, sender in enumerate(scene.sent)
    ]
    part = scene.device.layout.channel_bytes * 8 * len(scene.device.offsets) * len(BLOCKS) // 4 // 4
    async with scene.fetch([offers[0], offers[2], *offers, offers[1]]) as job:  # the same tickets again
        assert await seen(job, 3 * part, 4 * part) == 4 * part
        assert not job._result.done()  # type: ignore[union-attr]
        # Nothing of the three was released: their blocks are still the offers'.
        for sender in scene.sent:
            assert (await sender.client.status()).offers == 1
        await offers[3].layers_ready(4)
        ready = await job
    assert (ready.parts, ready.nbytes, ready.tokens) == (4, 4 * part, MODEL.tokens)
    assert set(ready.phases) >= {"retile", "read", "flush", "release", "total"}
    scene.check()
    assert [await offer.ended() for offer in offers] == ["consumed"] * 4
    with pytest.raises(AlreadyClaimed):
        await scene.fetch(offers)


async def test_by_name_before_any_offer_and_the_same_part_twice(scene: Scene) -> None:
    """p3 offers what p0 has offered, then its own part: the repeated part is left alone, and stays on offer."""
    names = ["p0", "p1", "p2", "p3", "p3"]
    twin = await scene.sent[3].client.register(MODEL.cache(GIVE[0], scene.sent[0].table))
    async with scene.fetch(request="early", source=names, wait=True) as job:
        async for p in job.progress():
            if p.state == "requested":
                break
        offers = [await scene.sent[0].offer(MODEL, "early", consumer="d0")]
        await seen(job, 1)
        offers += [await sender.offer(MODEL, "early", consumer="d0") for sender in scene.sent[1:3]]
        again = await scene.sent[3].client.offer(
            "early", twin, scene.sent[0].table, tokens=MODEL.tokens, consumer="d0"
        )
        offers.append(await scene.sent[3].offer(MODEL, "early", consumer="d0"))
        ready = await job
    assert ready.parts == 4
    scene.check()
    assert [await offer.ended() for offer in offers] == ["consumed"] * 4
    await until(
        scene.sent[3].client, lambda now: now.serving == 0 and now.offers == 1, "the repeated part on offer"
    )
    await again.withdraw()


async def test_one_dies_and_the_others_are_drained(scene: Scene) -> None:
    """F4 with a death: the fetch fails, the three others are on offer again, and nothing else was touched."""
    offers = [
        await sender.offer(MODEL, layers_ready=0 if i == 3 else None) for i, sender in enumerate(scene.sent)
    ]
    guard = (await receivers(scene.hd, [WHOLE]))[0]
    job = scene.fetch(offers)
    await job.start()
    await seen(job, 1)
    scene.group.prefill[3].kill()
    with pytest.raises(PeerLost) as caught:
        await job
    assert caught.value.facts["source"] == "p3"
    assert caught.value.facts["part"].startswith("heads 6..7 of 8")
    assert c.untouched(guard)
    await until(
        scene.hd, lambda now: now.blocks_owned == now.blocks_quarantined == now.fetching == 0, "no block held"
    )
    for sender in scene.sent[:3]:
        await until(sender.client, lambda now: now.serving == 0 and now.offers == 1, "its offer open again")
    # The same three tickets, and one of the worker that took the dead one's place.
    async with clients(scene.group.again(3)) as fresh:
        (late,) = await senders(fresh, MODEL, [GIVE[3]])
        offers[3] = await late.offer(MODEL)
        c.paint(scene.device)
        assert (await scene.fetch(offers)).parts == 4
        scene.check()
    await guard.release()


async def test_parts_that_do_not_make_up_the_whole(scene: Scene) -> None:
    offers = [await sender.offer(MODEL) for sender in scene.sent]
    with pytest.raises(PartsMismatch, match="missing") as caught:
        await scene.fetch([offers[0], offers[3], offers[0]])
    assert caught.value.got == "nothing for heads 2..5 of layers 0..3"
    with pytest.raises(PartsMismatch, match="missing"):
        await scene.fetch(offers[1])
    # Nobody was asked: all four are as they were.
    assert [(await sender.client.status()).serving for sender in scene.sent] == [0] * 4
    # A part of another model, and one that is cut in another way.
    hp = scene.sent[0].client
    for changes, field in (({"heads": 16}, "heads"), ({"layers": 8}, "layers")):
        spec = MODEL.spec(**changes).shard(heads=range(2), layers=range(4))
        odd = await hp.register(c.KVCache.alloc(spec))
        other = await hp.offer(f"odd {field}", odd, range(8), tokens=MODEL.tokens)
        with pytest.raises(PartsMismatch, match=f"differ in {field}"):
            await scene.fetch(other)
        await other.withdraw()
    wide = await hp.register(c.KVCache.alloc(MODEL.spec().shard(heads=range(1, 8))))
    with pytest.raises(AlreadyOffered, match=r"an offer for this request is open.*heads 0\.\.1 of 8"):
        await hp.offer("r", wide, range(8), tokens=MODEL.tokens)
    clash = await hp.offer("s", wide, range(8), tokens=MODEL.tokens)
    with pytest.raises(InvalidArgument, match="differ in request"):
        await scene.fetch([offers[0], clash])
    await offers[0].withdraw()
    clash = await hp.offer("r", wide, range(8), tokens=MODEL.tokens)
    with pytest.raises(PartsMismatch, match="overlap") as caught:
        await scene.fetch([*offers[1:], clash])
    assert caught.value.field == "tickets[3].part"
    assert c.untouched(scene.device)
    # The rest is asked for by name: who holds no part of it says so.
    with pytest.raises(UnknownRequest):
        await scene.fetch(request="nothing", source=["p0", "p1"])


async def test_an_abort_of_all_returns_the_blocks_when_all_have_drained(scene: Scene) -> None:
    offers = [await sender.offer(MODEL, layers_ready=1) for sender in scene.sent]
    job = scene.fetch(offers)
    await job.start()
    await seen(job, 1)
    await job.abort()
    now = await counts(scene.hd)
    assert now.blocks_owned == now.blocks_quarantined == now.fetching == 0
    with pytest.raises(Aborted):
        await job
    c.paint(scene.device)
    for offer in offers:
        await offer.layers_ready(4)
    assert (await scene.fetch(offers)).parts == 4
    scene.check()


def embedded(folder: Path, name: str, role: str, more: str = "") -> Agent:
    """An agent in this process."""
    path = folder / f"{name}.toml"
    path.write_text(
        f'[agent]\nname = "{name}"\nrole = "{role}"\nlocal = "ipc://{folder}/{name}.sock"\ninsecure = true\n{more}'
    )
    return Agent(load_config(path, {})[0])


async def test_a_lease_that_is_lost_between_the_last_byte_and_the_release_uses_up_no_offer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both parts are there, the first agent keeps its offer for the fetch, and the second has run out of patience."""
    real, late = ServeJob.on_message, True

    def on_message(job: ServeJob, message: PeerMessage) -> None:
        if late and isinstance(message, Release) and job.context is second.serving.context:
            assert message.hold
            job._lease_ran_out()
        else:
            real(job, message)

    monkeypatch.setattr(ServeJob, "on_message", on_message)
    give = [MODEL.spec().shard(tp_rank=r, tp_size=2) for r in range(2)]
    async with (
        embedded(tmp_path, "p0", "prefill") as first,
        embedded(tmp_path, "p1", "prefill") as second,
    ):
        memory = '[memory.npu0]\nkind = "emulated-npu"\ncapacity = "16MiB"\nchannels = 8\n'
        peers = f'[peers]\np0 = "{first.control_address}"\np1 = "{second.control_address}"\n'
        async with (
            embedded(tmp_path, "d0", "decode", memory + peers) as agent,
            hawk.connect(first) as h0,
            hawk.connect(second) as h1,
            hawk.connect(agent) as hd,
        ):
            sent = await senders([h0, h1], MODEL, give)
            (device,) = await receivers(hd, [WHOLE], memory="npu0")
            offers = [await sender.offer(MODEL) for sender in sent]
            with pytest.raises(LeaseExpired):
                await hd.fetch(offers, into=device, blocks=BLOCKS, timeout="20s")
            for client in (h0, h1):
                await until(client, lambda now: now.serving == 0 and now.offers == 1, "its offer open again")
            late = False
            c.paint(device)
            assert (await hd.fetch(offers, into=device, blocks=BLOCKS, timeout="20s")).parts == 2
            MODEL.check(device, WHOLE, BLOCKS)
            assert [await offer.ended() for offer in offers] == ["consumed"] * 2
