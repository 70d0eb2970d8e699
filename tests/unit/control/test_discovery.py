import asyncio
import socket

import pytest

from hawk.control.discovery import StaticPeers
from hawk.control.dns import MOST, DnsPeers, lookup
from hawk.errors import PeerUnreachable, UnknownPeer


async def test_a_configured_peer_is_found() -> None:
    peers = StaticPeers({"p0": "tcp://127.0.0.1:7000"})
    assert await peers.resolve("p0") == "tcp://127.0.0.1:7000"
    await peers.close()


async def test_an_unknown_peer_names_the_known_and_the_nearest() -> None:
    peers = StaticPeers({"prefill-0": "tcp://a:1", "decode-0": "tcp://b:1"})
    with pytest.raises(UnknownPeer, match=r"one of decode-0, prefill-0.*Did you mean prefill-0\?"):
        await peers.resolve("prefil-0")
    with pytest.raises(UnknownPeer, match=r"\[peers\]"):
        await StaticPeers({}).resolve("x")


# -- by host name ----------------------------------------------------------------------------------------


class Names:
    """A DNS of the test's own: `hosts` may change at any time, `asked` counts; a host that is None fails."""

    def __init__(self, **hosts: list[str] | None) -> None:
        self.hosts = {name.replace("_", "."): addresses for name, addresses in hosts.items()}
        self.asked = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked += 1
        await self.gate.wait()
        if host not in self.hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        found = self.hosts[host]
        if found is None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return list(found)


async def test_numbers_and_paths_are_not_looked_up() -> None:
    names = Names()
    table = {"a": "tcp://127.0.0.1:1", "b": "tcp://[::1]:2", "c": "ipc:///run/x.sock"}
    peers = DnsPeers(table, lookup=names)
    assert [await peers.resolve(name) for name in table] == list(table.values())
    assert names.asked == 0
    assert peers.configured() == table
    with pytest.raises(UnknownPeer, match="one of a, b, c"):
        await peers.resolve("d")


async def test_a_host_is_looked_up_once_and_again_after_a_loss() -> None:
    names = Names(p0_local=["10.0.0.1"])
    peers = DnsPeers({"p0": "tcp://p0.local:7400"}, lookup=names)
    assert [await peers.resolve("p0") for _ in range(3)] == ["tcp://10.0.0.1:7400"] * 3
    assert names.asked == 1
    names.hosts["p0.local"] = ["10.0.0.9"]
    peers.lost("p0")
    peers.lost("p0")
    assert [await peers.resolve("p0") for _ in range(3)] == ["tcp://10.0.0.9:7400"] * 3
    assert names.asked == 2
    peers.lost("never heard of")


async def test_an_address_is_kept_for_its_time_only() -> None:
    names = Names(p0_local=["10.0.0.1"])
    peers = DnsPeers({"p0": "tcp://p0.local:7400"}, ttl=0.0, lookup=names)
    await peers.resolve("p0")
    names.hosts["p0.local"] = ["10.0.0.2", "10.0.0.1"]
    # In use, and still one of them.
    assert await peers.resolve("p0") == "tcp://10.0.0.1:7400"
    assert names.asked == 2


async def test_of_several_addresses_the_next_is_tried_after_a_loss() -> None:
    peers = DnsPeers({"p0": "tcp://p0.local:7400"}, lookup=Names(p0_local=["10.0.0.1", "10.0.0.2"]))
    tried = []
    for _ in range(3):
        tried.append(await peers.resolve("p0"))
        peers.lost("p0")
    assert tried == ["tcp://10.0.0.1:7400", "tcp://10.0.0.2:7400", "tcp://10.0.0.1:7400"]


async def test_a_lookup_that_fails_leaves_what_is_known() -> None:
    names = Names(p0_local=["10.0.0.1"])
    peers = DnsPeers({"p0": "tcp://p0.local:7400", "p1": "tcp://p1.local:1"}, lookup=names)
    await peers.resolve("p0")
    names.hosts["p0.local"] = None
    peers.lost("p0")
    assert await peers.resolve("p0") == "tcp://10.0.0.1:7400"
    with pytest.raises(PeerUnreachable, match=r"peers\.p1: .*p1\.local"):
        await peers.resolve("p1")


async def test_a_pattern_finds_peers_that_are_not_listed() -> None:
    names = Names(p7_pods=["10.1.0.7"], px_pods=None)
    peers = DnsPeers({"p0": "tcp://127.0.0.1:1"}, "tcp://{name}.pods:7400", lookup=names)
    assert await peers.resolve("p7") == "tcp://10.1.0.7:7400"
    assert await peers.resolve("p0") == "tcp://127.0.0.1:1"
    with pytest.raises(UnknownPeer, match="none is in DNS"):
        await peers.resolve("p8")
    with pytest.raises(PeerUnreachable, match=r"discovery\.dns"):
        await peers.resolve("px")
    asked = names.asked
    for name in ("evil.example:1/", "a b", "", "x" * 65, "../p7"):
        with pytest.raises(UnknownPeer):
            await peers.resolve(name)
    assert names.asked == asked


async def test_one_lookup_serves_all_and_is_bounded_in_time() -> None:
    names = Names(p0_local=["10.0.0.1"])
    names.gate.clear()
    peers = DnsPeers({"p0": "tcp://p0.local:7400"}, lookup=names)
    asking = [asyncio.create_task(peers.resolve("p0")) for _ in range(20)]
    await asyncio.sleep(0)
    asking.pop().cancel()
    while not names.asked:
        await asyncio.sleep(0)
    names.gate.set()
    assert set(await asyncio.gather(*asking)) == {"tcp://10.0.0.1:7400"}
    assert names.asked == 1
    names.gate.clear()
    quick = DnsPeers({"p0": "tcp://p0.local:7400"}, timeout=0.01, lookup=names)
    with pytest.raises(PeerUnreachable, match="in time"):
        await quick.resolve("p0")
    left = asyncio.create_task(peers.resolve("p0"))
    await quick.close()
    await peers.close()
    await asyncio.gather(left, return_exceptions=True)


async def test_names_that_are_kept_are_bounded() -> None:
    async def anybody(host: str, port: int) -> list[str]:
        return ["10.0.0.1"]

    peers = DnsPeers({}, "tcp://{name}.pods:1", lookup=anybody)
    for number in range(MOST + 50):
        await peers.resolve(f"p{number}")
    assert len(peers._known) == MOST
    peers.replace({"p0": "tcp://127.0.0.1:9"})
    assert await peers.resolve("p0") == "tcp://127.0.0.1:9"


async def test_this_machine_is_found_by_its_name() -> None:
    assert "127.0.0.1" in await lookup("localhost", 1)
