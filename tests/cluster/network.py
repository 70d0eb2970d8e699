"""A network of one machine: a namespace for each node, all on one bridge, and links that can be cut."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

INSIDE = "HAWK_CLUSTER_INSIDE"
"""Set in the process that has namespaces of its own.  Not a setting of HAWK's, which knows tables only."""

_NET = "10.213.0"
_NEEDED = (("ip", "iproute2"), ("unshare", "util-linux"))
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


class NoNetwork(Exception):
    """What is missing here, in one line."""


def enter(module: str, arguments: Sequence[str]) -> None:
    """Comes back in a process that is root in namespaces of its own; the first one is replaced by it.

    Nothing in there reaches another network, or is seen from outside.  Raises `NoNetwork`.
    """
    if os.environ.get(INSIDE):
        _mount()
        return
    for program, package in _NEEDED:
        if shutil.which(program) is None:
            raise NoNetwork(f"the program {program} is not here; install {package}")
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--kill-child", "--fork"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        raise NoNetwork(
            "this user may not make namespaces; allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
            "kernel.apparmor_restrict_unprivileged_userns=0), or run this as root"
        )
    os.environ[INSIDE] = "1"
    os.execvp(unshare[0], [*unshare, sys.executable, "-m", module, *arguments])


def _mount() -> None:
    """A /run of our own: `ip netns` keeps its names there."""
    libc = ctypes.CDLL(None, use_errno=True)
    for source, target, kind, flags in (
        (b"none", b"/", None, _MS_REC | _MS_PRIVATE),
        (b"tmpfs", b"/run", b"tmpfs", 0),
    ):
        if libc.mount(source, target, kind, ctypes.c_ulong(flags), None):
            problem = os.strerror(ctypes.get_errno())
            raise NoNetwork(f"{target.decode()} cannot be mounted here: {problem}")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoNetwork(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Network:
    """Namespaces by name, each with one address."""

    def __init__(self, names: Sequence[str]) -> None:
        self._addresses = {name: f"{_NET}.{number}" for number, name in enumerate(names, 10)}
        _ip("link", "add", "bridge0", "type", "bridge")
        _ip("link", "set", "bridge0", "up")
        _ip("link", "set", "lo", "up")
        for name, address in self._addresses.items():
            _ip("netns", "add", name)
            _ip("link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"to-{name}", "master", "bridge0", "up")
            for words in (("addr", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
                _ip("-n", name, *words)
            _ip("-n", name, "link", "set", "lo", "up")

    def address(self, name: str) -> str:
        """Of a node."""
        return self._addresses[name]

    @staticmethod
    def within(name: str) -> tuple[str, ...]:
        """What a command line begins with that runs in a node."""
        return ("ip", "netns", "exec", name)

    @staticmethod
    def cut(name: str) -> None:
        """The node reaches nobody, and nobody reaches it."""
        _ip("link", "set", f"to-{name}", "down")

    @staticmethod
    def heal(name: str) -> None:
        """As before."""
        _ip("link", "set", f"to-{name}", "up")
