"""Connections whose end says that their process is gone: a forked child must not keep them open."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def ends_with_process(sock: socket.socket) -> None:
    """From now on children that are forked close their copy of the socket at once."""
    _open.add(sock)


def _after_fork_in_child() -> None:
    for sock in list(_open):
        with contextlib.suppress(OSError):
            sock.close()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
