"""Two agents in two guests: node 1 has the prefill side, node 2 the decode side with an emulated device."""

from __future__ import annotations

import asyncio
from typing import Any

from hawk.client import Client
from hawk.handles import DeviceCache
from tests.end_to_end import caches as c
from tests.end_to_end.harness import AgentProcess, Site, npu
from tests.lab.guest.meet import Meeting
from tests.lab.guest.rdma import address, node

NAMES = {1: "p0", 2: "d0"}
CONTROL = f"tcp://{address(1)}:7400"
JOBS = {"lease": "20s", "chunk": "256KiB"}
VERBS = {"handshake_timeout": "30s"}
"""As the lease: an emulated machine that shares its processors stands still for seconds."""

LAYERS = 24
"""Of a cache whose transfer takes long enough to be interrupted: some 8 MB."""

TOKENS = 600
LIMIT = 180.0
FETCH = "150s"
"""What a fetch may take: it is over long before, or something is wrong."""


class Side:
    """This guest's site, its agent, and the line to the other guest's test.

    prefill     whether this is the prefill side
    """

    def __init__(self, meeting: Meeting, transport: str) -> None:
        self.meeting = meeting
        self.prefill = node() == 1
        self.site = Site()
        self._transport = transport
        # Each guest has made keys for everybody; of the other one its own count.
        name, other = NAMES[node()], NAMES[3 - node()]
        theirs = meeting.exchange(self.site.keys[name].public)
        keys = {name: self.site.keys[name].public, other: theirs}
        rows = [f'{who} = "{key}"\n' for who, key in keys.items()]
        (self.site.folder / "peers.toml").write_text("[peers]\n" + "".join(rows))
        self.agent = self.start()

    def start(self) -> AgentProcess:
        """Starts this side's agent, or starts it anew."""
        tables: dict[str, Any] = {
            "transport": {"prefer": [self._transport]},
            "transport.verbs": VERBS,
            "jobs": JOBS,
            "arena": {"size": "16MiB"},
        }
        if self.prefill:
            self.agent = self.site.start("p0", tables, role="prefill", control=CONTROL)
        else:
            tables |= {
                "peers": {"p0": CONTROL},
                "memory.npu0": npu(8, "16MiB"),
            }
            self.agent = self.site.start("d0", tables, role="decode", control=f"tcp://{address(2)}:7400")
        return self.agent

    async def tell(self, value: Any = None) -> None:
        """Says something to the other guest's test."""
        self.meeting.tell(value)

    async def hear(self) -> Any:
        """What the other guest's test says next."""
        return await asyncio.to_thread(self.meeting.hear)

    async def together(self) -> None:
        """Returns when the other guest's test has come as far."""
        await asyncio.to_thread(self.meeting.exchange)


def source(layers: int = c.LAYERS) -> c.KVCache:
    """The same cache in both guests."""
    return c.filled(c.source_spec(layers=layers))


def moved(of: c.KVCache, tokens: int = TOKENS) -> c.Moved:
    """The request that all tests move, with the same block tables in both guests."""
    src, dst = c.tables(0, 0, 0, tokens, src=of.spec, dst=c.target_spec(layers=of.spec.layers))
    return c.Moved(of, src, dst, 0, tokens)


async def device(hd: Client, layers: int = c.LAYERS, codec: str = "bf16") -> DeviceCache:
    """A cache in the emulated device, painted."""
    made = await hd.allocate(c.target_spec(layers=layers, codec=codec), memory="npu0")
    c.paint(made)
    return made


async def send(side: Side, hp: Client, name: str) -> None:
    """The prefill side of a job that goes well: offers it, and waits until it was consumed."""
    of = source()
    cache = await hp.register(of)
    offer = await hp.offer(name, cache, moved(of).source_blocks, tokens=TOKENS, ttl="5min")
    await side.tell(offer.ticket)
    assert await offer.ended() == "consumed"
    await cache.release()


async def receive(side: Side, hd: Client, transport: str, codec: str = "bf16", *, begun: str = "") -> None:
    """The decode side of it: fetches it, and looks at every byte of the device; tells `begun` once it has begun."""
    made = await device(hd, codec=codec)
    wanted = moved(source())
    job = hd.fetch(await side.hear(), into=made, blocks=wanted.target_blocks, timeout=FETCH)
    if begun:
        await job.start()
        await side.tell(begun)
    ready = await job
    assert ready.transport == transport
    c.check(made, c.target_spec(codec=codec), wanted, guards=[made])
    await made.release()
