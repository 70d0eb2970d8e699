"""The parts of NIXL's and Mooncake's Python packages that HAWK uses, made up: they copy between processes of one user.

Both keep the rules that the real ones were seen to keep: nothing moves but what both sides registered and told, a NIXL
agent moves only while its owner looks, and takes memory only for the kind that it is, a Mooncake engine that was handed
too much serves that peer no more.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hawk.memory import cuda_driver

STEP = 256 << 10
"""Bytes that a look at a transfer moves, about."""


class FakeError(Exception):
    """As the bindings raise, of a class of their own."""


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)


def copy(pid: int, write: bool, local: int, remote: int, nbytes: int) -> None:
    """Between this process and one that may be another; raises `FakeError` where that one is gone."""
    call = _libc.process_vm_writev if write else _libc.process_vm_readv
    done = 0
    while done < nbytes:
        ours, theirs = (_Vector(at + done, nbytes - done) for at in (local, remote))
        moved = call(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
        if moved <= 0:
            raise FakeError(f"NIXL_ERR_REMOTE_DISCONNECT {os.strerror(ctypes.get_errno())}")
        done += moved


def gpu_of(address: int) -> int:
    """The made-up GPU whose memory is there, or -1."""
    return cuda_driver._known.pointer(address).device if cuda_driver._known is not None else -1


@dataclass
class Descriptors:
    """Rows (address, bytes, device) of one kind of memory."""

    kind: str
    rows: Any

    def lie_in(self, memory: list[tuple[int, int, str, int]]) -> bool:
        """Whether all of it was registered, as the kind and for the device that it says."""
        devices = set(self.rows[:, 2].tolist())
        return all(
            covered(
                [(a, n) for a, n, kind, at in memory if (kind, at) == (self.kind, device)],
                self.rows[self.rows[:, 2] == device],
            )
            for device in devices
        )


def covered(memory: list[tuple[int, int]], rows: Any) -> bool:
    """Whether every row (address, bytes, ..) lies in one of these ranges."""
    low, high = rows[:, 0].astype(np.int64), (rows[:, 0] + rows[:, 1]).astype(np.int64)
    inside = np.zeros(len(rows), bool)
    for address, nbytes in memory:
        inside |= (low >= address) & (high <= address + nbytes)
    return bool(inside.all())


# -- NIXL ---------------------------------------------------------------------------------------------------------

_agents: weakref.WeakValueDictionary[str, nixl_agent] = weakref.WeakValueDictionary()


@dataclass
class Handle:
    write: bool
    ours: Any
    theirs: Any
    peer: str
    notice: bytes
    at: int = 0
    _released: bool = False

    def release(self) -> None:
        if self.at < len(self.ours):
            raise FakeError("NIXL_ERR_REPOST_ACTIVE")
        self._released = True

    __hash__ = object.__hash__


class nixl_agent_config:  # noqa: N801
    def __init__(self, *, enable_prog_thread: bool, backends: list[str]) -> None:
        assert not enable_prog_thread
        assert not backends


class nixl_agent:  # noqa: N801
    def __init__(self, name: str, config: nixl_agent_config) -> None:
        assert isinstance(config, nixl_agent_config)
        self.name = name
        self.backends: dict[str, int] = {}
        self.memory: list[tuple[int, int, str, int]] = []
        self.peers: dict[str, tuple[int, list[tuple[int, int, str, int]]]] = {}
        self.told: dict[str, list[bytes]] = {}
        _agents[name] = self

    def create_backend(self, name: str, options: dict[str, str]) -> None:
        self.backends[name] = len(options)
        # As NIXL does: parted at commas, and what is no NAME=VALUE passed over; the environment has its way.
        said = (each.partition("=") for each in options.get("engine_config", "").split(","))
        self.ucx = {name: value for name, equals, value in said if equals}
        if "UCX_TLS" in os.environ:
            self.ucx["TLS"] = os.environ["UCX_TLS"]

    def register_memory(self, ranges: list[Any], kind: str, backends: list[str]) -> list[Any]:
        made = [(address, nbytes, kind, device) for address, nbytes, device, _ in ranges]
        for address, _, _, device in made:
            if gpu_of(address) != {"DRAM": -1, "VRAM": device}[kind]:
                raise FakeError("NIXL_ERR_BACKEND")
        self.memory += made
        return made

    def deregister_memory(self, made: list[Any], backends: list[str]) -> None:
        for each in made:
            self.memory.remove(each)

    def get_agent_metadata(self) -> bytes:
        return json.dumps([self.name, os.getpid(), self.memory]).encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        try:
            name, pid, memory = json.loads(metadata)
        except ValueError:
            raise FakeError("NIXL_ERR_MISMATCH") from None
        self.peers[name] = (pid, [tuple(each) for each in memory])
        return str(name).encode()

    def remove_remote_agent(self, name: str) -> None:
        del self.peers[name]

    def get_xfer_descs(self, rows: Any, kind: str) -> Descriptors:
        return Descriptors(kind, rows.copy())

    def initialize_xfer(
        self,
        op: str,
        ours: Descriptors,
        theirs: Descriptors,
        peer: str,
        notice: bytes,
        backends: list[str],
    ) -> Handle:
        if peer not in self.peers:
            raise FakeError("NIXL_ERR_NOT_FOUND")
        if not ours.lie_in(self.memory) or not theirs.lie_in(self.peers[peer][1]):
            raise FakeError("NIXL_ERR_NOT_FOUND: not registered")
        return Handle(op == "WRITE", ours.rows, theirs.rows, peer, notice)

    def transfer(self, handle: Handle) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Handle) -> str:
        if handle.peer not in self.peers:
            raise FakeError("NIXL_ERR_CANCELED")
        pid = self.peers[handle.peer][0]
        there = _agents.get(handle.peer)
        if there is None and pid == os.getpid():
            raise FakeError("NIXL_ERR_REMOTE_DISCONNECT")
        moved = 0
        while handle.at < len(handle.ours) and moved < STEP:
            ours, theirs = handle.ours[handle.at], handle.theirs[handle.at]
            copy(pid, handle.write, int(ours[0]), int(theirs[0]), int(ours[1]))
            moved += int(ours[1])
            handle.at += 1
        if handle.at < len(handle.ours):
            return "PROC"
        if handle.notice and there is not None:
            there.told.setdefault(self.name, []).append(handle.notice)
        return "DONE"

    def get_new_notifs(self, backends: list[str]) -> dict[str, list[bytes]]:
        told, self.told = self.told, {}
        return told


# -- Mooncake -----------------------------------------------------------------------------------------------------

_engines: weakref.WeakValueDictionary[int, TransferEngine] = weakref.WeakValueDictionary()
_serial = itertools.count(1)
MOST = 2048


@dataclass
class Faults:
    """`refuse(rows)` says of so many rows whether the engine fails on them; `made` counts engines.

    `devices` are what it finds of RDMA, in that order the nearest first.
    """

    refuse: Callable[[int], bool] = lambda rows: False
    made: int = 0
    asked: list[int] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)


class FakeMooncake:
    """Stands for the module `mooncake.engine`."""

    def __init__(self) -> None:
        self.faults = Faults()

    def TransferEngine(self) -> TransferEngine:  # noqa: N802
        self.faults.made += 1
        return TransferEngine(self.faults)


class TransferEngine:
    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        # No port of TCP, so that it tells its process.
        self._port = os.getpid() * 100_000 + next(_serial)
        self.memory: dict[int, int] = {}
        self._broken = False
        self._flying: dict[int, tuple[int, Any]] = {}
        _engines[self._port] = self

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        assert metadata == "P2PHANDSHAKE"
        return 0

    def get_local_topology(self) -> str:
        return json.dumps({"cpu:0": [self._faults.devices[:1], self._faults.devices[1:]]})

    def get_rpc_port(self) -> int:
        return self._port

    def register_memory(self, address: int, nbytes: int) -> int:
        if address in self.memory:
            return -7
        self.memory[address] = nbytes
        return 0

    def unregister_memory(self, address: int) -> int:
        return 0 if self.memory.pop(address, None) is not None else -6

    def send_probe(self, peer: str) -> int:
        port = int(peer.rpartition(":")[2])
        if port in _engines:
            return 0
        pid = port // 100_000
        if pid == os.getpid() or not pid:
            return -102
        try:
            os.kill(pid, 0)
        except OSError:
            return -102
        return 0

    def batch_transfer_async_read(
        self, peer: str, local: list[int], remote: list[int], nbytes: list[int]
    ) -> int:
        rows = np.asarray([local, nbytes, remote], np.int64).T
        self._faults.asked.append(len(rows))
        if len(rows) + sum(len(flying) for _, flying in self._flying.values()) > MOST:
            self._broken = True
        if self._broken or not covered(list(self.memory.items()), rows):
            return -1
        if self.send_probe(peer) != 0:
            return 0
        number = next(_serial)
        self._flying[number] = (int(peer.rpartition(":")[2]), rows)
        return number

    def get_batch_transfer_status(self, numbers: list[int]) -> int:
        for number in numbers:
            port, rows = self._flying.pop(number)
            if self._faults.refuse(len(rows)):
                self._broken = True
            there = _engines.get(port)
            pid = port // 100_000
            if self._broken or (there is None and pid == os.getpid()):
                return -1
            for local, length, remote in rows.tolist():
                try:
                    copy(pid, False, local, remote, length)
                except FakeError:
                    return -1
        return 0
