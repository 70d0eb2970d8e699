"""nixl meets the contract over NIXL itself: pulled and pushed over TCP, and over shared memory."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

pytest.importorskip("nixl")

from hawk.transports._engine._seam import EngineFailed
from hawk.transports.nixl import NixlConfig, NixlTransport, _vram
from hawk.transports.nixl._agent import NixlAgent
from hawk.transports.testing import MovingContract, TransportContract

SMALL = {"chunk": 1 << 20, "piece": 4 << 20, "grace": 0.2}


def test_memory_of_gpus_is_refused_by_nixl_itself_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not _vram.driver():
        pytest.skip("there is a GPU: tests/device/test_nixl_vram.py")
    memory = np.zeros(1 << 20, np.uint8)
    plain = NixlAgent("tcp,cuda")
    assert plain.gpus == _vram.driver()
    assert _vram.modules(), "the wheel brings UCX's module for CUDA"
    assert "libcuda" in _vram.loaded()
    plain.close()
    monkeypatch.setattr(_vram, "current", lambda gpu: contextlib.nullcontext())
    agent = NixlAgent("tcp,cuda", gpus_why=lambda tls: "")
    with pytest.raises(EngineFailed, match="cannot be registered"):
        agent.register(memory.ctypes.data, memory.nbytes, 0)
    agent.register(memory.ctypes.data, memory.nbytes)
    agent.close()


class TestPull(TransportContract):
    takes_turns = True
    large = 12 << 20

    def make(self) -> NixlTransport:
        return NixlTransport(NixlConfig(tls="tcp", direction="pull", **SMALL))


class TestPush(TransportContract):
    takes_turns = True
    large = 12 << 20

    def make(self) -> NixlTransport:
        return NixlTransport(NixlConfig(tls="tcp", direction="push", **SMALL))


class TestSharedMemory(MovingContract):
    def make(self) -> NixlTransport:
        return NixlTransport()
