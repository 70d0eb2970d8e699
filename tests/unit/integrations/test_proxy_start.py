"""What a user hears who starts a proxy: addresses that cannot be, a port in use, engines that are not up."""

import socket

import pytest

from hawk.errors import InvalidArgument
from hawk.integrations.http import Server
from hawk.integrations.proxy import Proxy, silent
from tests.unit.integrations.test_proxy import Fake, ask, says


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("", "the host is missing"),
        ("8000", "the host is missing"),
        (":8000", "the host is missing"),
        ("http://h", "the port is missing"),
        ("https://h:1", "plain http, not by https"),
        ("http://h:1/v1", "the path is each request's own"),
        ("h:99999", "up to 65535"),
        ("h:x", "up to 65535"),
        ("http://[h:1", "no address"),
    ],
)
def test_addresses_are_judged(address: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as caught:
        Server.parse(address, "--prefill", "HOST:PORT")
    assert "--prefill" in str(caught.value)
    assert "HOST:PORT" in str(caught.value)


def closed() -> Server:
    """Where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Server("127.0.0.1", probe.getsockname()[1])


async def test_a_port_in_use_and_servers_that_are_not_there() -> None:
    async with Fake(says({})) as there:
        proxy, gone = Proxy([there.address], [there.address]), closed()
        with pytest.raises(InvalidArgument, match="another program listens there"):
            await proxy.start(there.address.host, there.address.port)
        assert await silent([there.address, gone]) == [gone]


async def test_both_engines_down_are_both_named() -> None:
    p, d = closed(), closed()
    proxy = Proxy([p], [d])
    port = await proxy.start("127.0.0.1", 0)
    try:
        status, answer = await ask(Server("127.0.0.1", port), prompt="x")
    finally:
        await proxy.close()
    assert status == 502
    assert str(p) in answer["error"]["message"]
    assert str(d) in answer["error"]["message"]
