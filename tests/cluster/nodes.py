"""The agents of the cluster, and the clients by which the work is given to them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hawk.cache import KVCache
from hawk.client import Client, connect
from hawk.handles import Cache, DeviceCache
from tests.cluster.network import Network
from tests.end_to_end import caches as c
from tests.end_to_end.harness import COMMAND, AgentProcess, Site, npu

LEASE = "3s"
WORKERS = 2
"""Jobs under way at each decode agent, each into a cache of its own."""


@dataclass
class Counts:
    """What came of a node's jobs."""

    ready: int = 0
    refused: int = 0
    failed: int = 0
    seconds: float = 0.0


@dataclass
class Node:
    """One agent; `there` while work may be given to it."""

    name: str
    role: str
    state: str = "starting"
    counts: Counts = field(default_factory=Counts)
    there: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    runs: int = 0
    agent: AgentProcess | None = None
    client: Client | None = None
    cache: Cache | None = None
    source: KVCache | None = None
    devices: list[DeviceCache] = field(default_factory=list)


class Cluster:
    """Starts and restarts nodes; none of their configurations names another one."""

    def __init__(self, site: Site, network: Network, directory: str, *, hasty: bool = False) -> None:
        self._site, self._network, self._directory = site, network, directory
        self._hasty = hasty

    async def start(self, node: Node) -> None:
        """Starts the node's agent, and gives it what its jobs need."""
        host = self._network.address(node.name)
        tables = {
            "transport": {"prefer": ["tcp"]},
            "transport.tcp": {"host": host, "port": 7401},
            "discovery": {"etcd": [self._directory], "etcd_lease": LEASE},
            "jobs": {"lease": "3s", "chunk": "256KiB"},
            **({"memory.npu0": npu(8, "12MiB")} if node.role == "decode" else {}),
        }
        command = (*self._network.within(node.name), *COMMAND)
        node.agent = await asyncio.to_thread(
            self._site.start, node.name, tables, command=command, role=node.role, control=f"tcp://{host}:7400"
        )
        node.runs += 1
        node.client = connect(node.agent.local)
        await node.client.open()
        if node.role == "prefill":
            node.source = c.filled(seed=node.runs)
            node.cache = await node.client.register(node.source)
        else:
            node.devices = [
                await node.client.allocate(c.target_spec(), memory="npu0") for _ in range(WORKERS)
            ]
        node.state = "up"
        node.there.set()

    async def restart(self, node: Node) -> None:
        """Takes the node out, lets it keep what it promised (unless `hasty`), and starts its next run."""
        assert node.client is not None
        assert node.agent is not None
        node.there.clear()
        if self._hasty:
            node.agent.kill()
            await node.client.close()
        else:
            node.state = "draining"
            await node.client.drain()
            while node.running:
                await asyncio.sleep(0.02)
            await self.end(node)
        node.state = "starting"
        await self.start(node)

    async def end(self, node: Node) -> None:
        """Ends the node's agent in good order."""
        assert node.client is not None
        assert node.agent is not None
        node.there.clear()
        node.state = "ending"
        await node.client.close()
        node.agent.send(15)
        await node.agent.ended()
        node.state = "down"
