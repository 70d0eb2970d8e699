"""Bare ZMTP by strangers, where no keys keep them out: messages that never end, frames that claim a gigabyte."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.end_to_end.harness import AgentProcess, Site, npu
from tests.end_to_end.scene import Scene, scene

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY" + b"\x0bSocket-Type" + struct.pack("!I", 6) + b"DEALER"


@pytest.fixture
async def s(site: Site) -> AsyncIterator[Scene]:
    open_to_all = {"security": None, "transport": {"prefer": ["tcp"]}}
    prefill = site.start("p0", open_to_all, role="prefill", insecure=True)
    tables = {**open_to_all, "peers": {"p0": prefill.control}, "memory.npu8": npu(8)}
    decode = site.start("d0", tables, role="decode", insecure=True)
    async with scene(prefill, decode) as made:
        yield made


@contextlib.contextmanager
def stranger(agent: AgentProcess) -> Iterator[socket.socket]:
    """A connection whose handshake is done."""
    host, _, port = agent.control.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(GREETING + bytes([4, len(READY)]) + READY)
        left = len(GREETING)
        while left:
            left -= len(sock.recv(left))
        assert sock.recv(2)[0] == 4  # its READY
        yield sock


async def test_messages_that_never_end(s: Scene) -> None:
    """Others work while they stand there, and when the strangers have gone."""
    part = bytes([1, 255]) + bytes(255)
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            sock = stack.enter_context(stranger(s.prefill))
            sock.sendall(part * 4000)
            sock.sendall(part[:100])  # the last in the middle
        for _ in range(3):
            await s.good_job()


async def test_frames_that_claim_a_gigabyte(s: Scene) -> None:
    """The connection ends before any of it is kept, be it a message's last frame or not."""
    for more in (0, 1):
        with stranger(s.prefill) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(bytes([2 | more]) + struct.pack("!Q", 1 << 30) + bytes(1 << 16))
            while sock.recv(4096):
                continue
        await s.good_job()
