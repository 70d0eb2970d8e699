import pytest

from hawk.control.discovery import StaticPeers
from hawk.errors import UnknownPeer


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
