import asyncio
import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from hawk.control.keys import KeyPair
from hawk.control.receive import ReceiveLoop
from hawk.control.sockets import Endpoint, Limits, Sockets
from hawk.errors import Busy, ConfigError, ControlError, InvalidArgument, PeerLost
from tests.descriptors import fds

MakeSockets = Callable[..., Sockets]


async def _first(endpoint: Endpoint) -> tuple[bytes, list[bytes]]:
    """The next message at an endpoint."""
    got: asyncio.Future[tuple[bytes, list[bytes]]] = asyncio.get_running_loop().create_future()
    loop = ReceiveLoop(
        endpoint.raw, lambda identity, frames: got.done() or got.set_result((identity, frames))
    )
    loop.start()
    try:
        async with asyncio.timeout(30):
            return await got
    finally:
        loop.stop()


async def _send_when_connected(endpoint: Endpoint, frames: list[bytes]) -> None:
    """Sends as soon as there is a connection; the socket's descriptor tells of it."""
    woken = asyncio.Event()
    loop = ReceiveLoop(endpoint.raw, lambda *_: None, on_wake=woken.set)
    loop.start()
    try:
        async with asyncio.timeout(30):
            while True:
                woken.clear()
                try:
                    endpoint.send(frames)
                except Busy:
                    await woken.wait()
                else:
                    return
    finally:
        loop.stop()


async def _pass(router: Endpoint, dealer: Endpoint) -> bytes:
    """One message from the dealer to the router; returns the dealer's identity."""
    await _send_when_connected(dealer, [b"h", b"b"])
    identity, frames = await _first(router)
    assert frames == [b"h", b"b"]
    return identity


def test_every_socket_has_its_bounds(make_sockets: MakeSockets, tmp_path: Path) -> None:
    limits = Limits(send_queue=7, receive_queue=8, frame_bytes=9999)
    sockets = make_sockets(insecure=True, limits=limits)
    router = sockets.router("tcp://127.0.0.1:0")
    ends = [router, sockets.router(f"ipc://{tmp_path}/s"), sockets.dealer(router.address)]
    for end in ends:
        raw = end.raw
        assert (raw.linger, raw.sndhwm, raw.rcvhwm, raw.maxmsgsize) == (0, 7, 8, 9999)
        assert raw.handshake_ivl == 5000
        assert raw.heartbeat_ivl > 0
        assert raw.heartbeat_timeout > raw.heartbeat_ivl


async def test_ipc(make_sockets: MakeSockets, tmp_path: Path) -> None:
    sockets = make_sockets()
    address = f"ipc://{tmp_path}/in/d0.sock"
    router = sockets.router(address)
    assert router.address == address
    assert (tmp_path / "in").stat().st_mode & 0o777 == 0o700
    identity = await _pass(router, sockets.dealer(address))
    assert len(identity) == 17
    with pytest.raises(ControlError, match="in use"):
        make_sockets().router(address)
    router.close()
    assert not list((tmp_path / "in").iterdir())
    # The path is free again at once, and the first socket's late closing takes nothing away from the second.
    again = make_sockets().router(address)
    sockets.close()
    assert (tmp_path / "in" / "d0.sock").is_socket()
    again.close()


def test_ipc_addresses_that_cannot_be(make_sockets: MakeSockets, tmp_path: Path) -> None:
    sockets = make_sockets()
    with pytest.raises(ConfigError, match="107 bytes at most"):
        sockets.router(f"ipc://{tmp_path}/{'x' * 107}")
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        sockets.router(f"ipc://{tmp_path}/s")
    for address in ("inproc://x", "udp://127.0.0.1:1", "127.0.0.1:1", ""):
        with pytest.raises(ConfigError, match=r"agent\.control.*no control address"):
            sockets.router(address)
        with pytest.raises(ConfigError, match="no control address"):
            sockets.dealer(address)


def test_tcp_needs_keys_or_the_word_insecure(
    make_sockets: MakeSockets, new_key: Callable[[str], KeyPair]
) -> None:
    with pytest.raises(ConfigError, match=r"needs CURVE keys.*hawk keys new.*insecure = true"):
        make_sockets().router("tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match="needs CURVE keys"):
        make_sockets().dealer("tcp://127.0.0.1:1")
    keyed = make_sockets(keys=new_key("d0"))
    with pytest.raises(ConfigError, match=r"public key is not known.*peers_file"):
        keyed.dealer("tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="no public key"):
        keyed.dealer("tcp://127.0.0.1:1", server_key="short")


def test_a_port_in_use_is_named(make_sockets: MakeSockets) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ControlError, match=f"in use; got {address}") as caught:
            make_sockets(insecure=True).router(address)
        assert caught.value.field == "agent.control"


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1", "tcp://", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:x"]
)
def test_tcp_addresses_that_are_none(make_sockets: MakeSockets, address: str) -> None:
    sockets = make_sockets(insecure=True)
    with pytest.raises(ConfigError, match=r"agent\.control"):
        sockets.router(address)
    with pytest.raises(ConfigError):
        sockets.dealer(address)


def test_an_address_of_another_machine(make_sockets: MakeSockets) -> None:
    with pytest.raises(ControlError, match="no such address"):
        make_sockets(insecure=True).router("tcp://192.0.2.1:0")


async def test_what_cannot_be_delivered_is_told(make_sockets: MakeSockets) -> None:
    sockets = make_sockets(insecure=True, limits=Limits(send_queue=4, receive_queue=4, frame_bytes=1 << 20))
    router = sockets.router("tcp://127.0.0.1:0")
    with pytest.raises(PeerLost):
        router.send([b"h", b"b"], b"nobody")
    lonely = sockets.dealer("tcp://127.0.0.1:1")
    with pytest.raises(Busy):
        lonely.send([b"h", b"b"])
    dealer = sockets.dealer(router.address)
    identity = await _pass(router, dealer)
    # Nobody reads at the dealer: its queue, the kernel's buffers and ours fill up.
    sent = 0
    with pytest.raises(Busy) as caught:
        while sent < 1000:
            router.send([b"h", bytes(1 << 20)], identity)
            sent += 1
    assert caught.value.retry_after > 0
    with pytest.raises(InvalidArgument, match="too large"):
        router.send([b"h", bytes((1 << 20) + 1)], identity)
    dealer.close()
    with pytest.raises(ControlError, match="cannot send"):
        dealer.send([b"h", b"b"])


async def test_a_reconnecting_peer_keeps_its_identity(make_sockets: MakeSockets) -> None:
    sockets = make_sockets(insecure=True)
    router = sockets.router("tcp://127.0.0.1:0")
    first = sockets.dealer(router.address)
    identity = await _pass(router, first)
    # The same identity from a second connection while the first is open, as after a half-open break.
    second = sockets.context.socket(zmq.DEALER)
    second.linger = 0
    second.routing_id = identity
    second.connect(router.address)
    second.send_multipart([b"h", b"again"])
    assert await _first(router) == (identity, [b"h", b"again"])
    second.close()


def test_closing_leaves_no_descriptor(tmp_path: Path, new_key: Callable[[str], KeyPair]) -> None:
    async def once() -> None:
        sockets = Sockets(keys=new_key("d0"))
        sockets.authorise({})
        sockets.router(f"ipc://{tmp_path}/s")
        sockets.router("tcp://127.0.0.1:0")
        sockets.dealer("tcp://127.0.0.1:1", server_key=new_key("p0").public)
        sockets.close()
        sockets.close()

    asyncio.run(once())
    before = fds()
    for _ in range(3):
        asyncio.run(once())
    assert fds() == before


@pytest.mark.parametrize("left", range(16))
def test_no_socket_is_begun_that_may_lack_descriptors(make_sockets: MakeSockets, left: int) -> None:
    sockets = make_sockets(insecure=True)
    bound = sockets.router("tcp://127.0.0.1:0")
    opened = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    top = opened[-1] + 1
    fillers = [os.open(os.devnull, os.O_RDONLY) for _ in range(top - len(opened) + 2)]
    top = max(top, *fillers) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (top + left, hard))
    try:
        with pytest.raises(Busy, match="too few descriptors"):
            sockets.dealer(bound.address)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)
    sockets.dealer(bound.address).close()
