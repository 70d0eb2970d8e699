"""The serving side of cuda: shm's server, whose arena is in the memory of a GPU."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, ClassVar

from hawk.errors import HawkError
from hawk.memory.cuda import device
from hawk.memory.cuda_share import export
from hawk.transports.cuda import _wire
from hawk.transports.shm._server import Server

if TYPE_CHECKING:
    from hawk.memory.region import Region


class CudaServer(Server):
    """Hands out the arena's handle, or its descriptors, and knows who is inside what."""

    transport: ClassVar[str] = "cuda"

    def _show_arena(self, sock: socket.socket, region: Region) -> bool:
        try:
            exported = export(device(region.gpu), region.address, region.nbytes, name=region.name)
        except HawkError:
            return False
        try:
            message = _wire.arena(exported)
            sent = socket.send_fds(sock, [message], exported.fds) if exported.fds else sock.send(message)
        except OSError:
            return False
        finally:
            exported.close()
        return sent == len(message)
