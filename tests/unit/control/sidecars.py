"""An agent's descriptor socket and raw clients of it, for the tests of the sidecar."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

from hawk.control.descriptors import DescriptorLink
from hawk.control.sidecar import Sidecar
from hawk.errors import (
    AccessDenied,
)

TOKEN = bytes(range(16))
TAG = b"t" * 16
HELLO = b"HWFD\x01"


class Agent:
    """A sidecar and what it said."""

    def __init__(self, path: Path, **kw: Any) -> None:
        self.links: asyncio.Queue[tuple[bytes, DescriptorLink]] = asyncio.Queue()
        self.ended: asyncio.Queue[bytes] = asyncio.Queue()
        self.refuse = False
        self.sidecar = Sidecar(path, on_session=self._session, on_closed=self.ended.put_nowait, **kw)
        self.sidecar.start()

    def _session(self, token: bytes, link: DescriptorLink) -> None:
        if self.refuse:
            raise AccessDenied("no such session")
        self.links.put_nowait((token, link))

    async def link(self) -> DescriptorLink:
        async with asyncio.timeout(30):
            return (await self.links.get())[1]

    async def end(self) -> bytes:
        async with asyncio.timeout(30):
            return await self.ended.get()


def _memfd(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def _raw(agent: Agent) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    sock.connect(str(agent.sidecar.path))
    return sock


async def _ends(sock: socket.socket) -> bytes:
    """What comes on a raw socket until the far side closes it."""
    loop = asyncio.get_running_loop()
    data = b""
    while True:
        readable = loop.create_future()
        loop.add_reader(sock, readable.set_result, None)
        async with asyncio.timeout(30):
            await readable
        loop.remove_reader(sock)
        try:
            part = sock.recv(100)
        except ConnectionError:
            return data
        if not part:
            return data
        data += part
