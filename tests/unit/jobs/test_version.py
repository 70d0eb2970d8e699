"""The version that is spoken with a peer reaches the jobs on both sides."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from hawk.control.beat import Beat
from hawk.control.discovery import StaticPeers
from hawk.control.frames import PROTOCOL_VERSION
from hawk.control.messages import Hello, Welcome
from hawk.control.server import Server
from hawk.control.sockets import Sockets
from hawk.jobs.peers import PEER_CODEC, Peers
from tests.unit.jobs.rig import PEER, rig

QUICK = Beat(interval=0.05, timeout=5.0)


@pytest.mark.parametrize("version", [1, PROTOCOL_VERSION])
async def test_a_session_knows_what_its_peer_speaks(version: int) -> None:
    sockets = Sockets(insecure=True)
    server = Server(
        sockets.router("tcp://127.0.0.1:0"),
        PEER_CODEC,
        lambda identity, header, message: server.send(identity, Welcome("p0", "prefill", "t", {})),
        on_bad=lambda identity, error: None,
        on_gone=lambda peer, error: None,
        version=version,
    )
    server.start()
    peers = Peers(
        sockets,
        StaticPeers({"p0": server.address}),
        {},
        lambda: Hello("d0", "decode", "t", {}),
        beat=QUICK,
        generation=7,
        secure=False,
        on_end=lambda session: None,
    )
    try:
        async with peers.session("p0", "", timeout=20) as session:
            assert session.version == version
    finally:
        peers.close()
        server.close()
        sockets.close()


@pytest.mark.parametrize("version", [1, PROTOCOL_VERSION])
async def test_a_serve_knows_what_its_consumer_speaks(version: int) -> None:
    async with rig() as made:
        made.server.peers[PEER] = SimpleNamespace(name="", version=version, generation=0)
        job = made.fetch("", wait=True)
        task = asyncio.create_task(job.run())
        while not made.serving.jobs:
            await asyncio.sleep(0)
        assert [serve.version for serve in made.serving._jobs.values()] == [version]
        made.offer(consumers=("d0",))
        await task
