"""Facts about this machine that an endpoint carries, so that a peer can say whether it is the same one."""

from __future__ import annotations

import functools
import os
import socket
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from hawk.transports import _checks

if TYPE_CHECKING:
    from collections.abc import Mapping


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


def listening(path: str, token: bytes) -> dict[str, str]:
    """What the endpoint says of a Unix socket: its path, the token that admits a connection, which machine and user."""
    return {
        "path": path,
        "token": token.hex(),
        "boot": boot_id(),
        "mounts": mounts(),
        "uid": str(os.geteuid()),
    }


def objection(endpoint: Mapping[str, str]) -> str | None:
    """Why the socket that `listening` told of is out of reach: another host, another user, or nowhere we can see."""
    path = endpoint.get("path", "")
    if not path or _checks.token_of(endpoint.get("token", "")) is None:
        return "the peer does not listen: its endpoint has no path or no token"
    if endpoint.get("boot") != boot_id():
        return "the peer runs on another host"
    if endpoint.get("uid") != str(os.geteuid()):
        return f"the peer runs as user {endpoint.get('uid')}, we as {os.geteuid()}"
    if endpoint.get("mounts") != mounts() and not os.path.exists(path):
        return f"the peer runs in another container; share {os.path.dirname(path)} with this one"
    return None
