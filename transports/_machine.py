"""Facts about this machine that an endpoint carries, so that a peer can say whether it is the same one."""

from __future__ import annotations

import functools
import os
import socket
import uuid
from pathlib import Path


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{socket.gethostname()}-{uuid.getnode():x}"


# Read when this is imported: at a later time the process may have no descriptor left to read it with, and would
# take itself for another machine from then on.
_BOOT_ID = _read_boot_id()


def boot_id() -> str:
    """A string that two processes share only if one kernel runs both."""
    return _BOOT_ID


def _namespace(kind: str) -> str:
    try:
        return str(os.stat(f"/proc/self/ns/{kind}").st_ino)
    except OSError:
        return "0"


@functools.cache
def network() -> str:
    """A string that two processes share only if 127.0.0.1 is the same for both."""
    return f"{boot_id()}:{_namespace('net')}"


@functools.cache
def mounts() -> str:
    """A string that two processes share only if they see the same files."""
    return f"{boot_id()}:{_namespace('mnt')}"
