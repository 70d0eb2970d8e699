"""Whether descriptors are left.  ZeroMQ does not survive everywhere that they are not.

A socket that gets only some of those it wants can leave the I/O thread waiting for ever, and with it every socket
of its context; a local client that cannot be accepted for want of one ends the process.  So whoever is about to
make a socket, or to let a client in, asks here first.
"""

from __future__ import annotations

import os

SPARE = 16
"""More than a socket takes together with its context, its monitor and its connection."""


def shortage() -> str | None:
    """Why `SPARE` descriptors cannot be had just now, or None if they can."""
    taken: list[int] = []
    try:
        while len(taken) < SPARE:
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return os.strerror(error.errno or 0)
    finally:
        for descriptor in taken:
            os.close(descriptor)
    return None
