"""Settings of transports on foreign engines, and what is said where an engine is not to be had."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest

from hawk.errors import InvalidArgument, NotViable
from hawk.transports import _machine, registry
from hawk.transports._engine._seam import EngineFailed
from hawk.transports.mooncake import MooncakeConfig, MooncakeTransport, _te
from hawk.transports.mooncake._te import MooncakeEngine
from hawk.transports.nixl import NixlConfig, NixlTransport, _agent
from hawk.transports.nixl._agent import NixlAgent
from tests import fake_engines
from tests.fake_engines import FakeMooncake


async def test_who_pushes() -> None:
    def asks(direction: str, tls: str, same: bool) -> bool:
        transport = NixlTransport(NixlConfig(direction=direction, tls=tls))  # type: ignore[arg-type]
        endpoint = {**transport.endpoint, **({} if same else {"boot": "another"})}
        return transport._asks(endpoint)

    assert not asks("pull", "tcp", same=False)
    assert asks("auto", "", same=False)
    assert asks("auto", "tcp", same=True), (
        "READs over TCP are slow, and cost a server its life where a reader vanishes"
    )
    assert not asks("auto", "", same=True)
    assert asks("push", "tcp", same=True)
    assert not asks("push", "", same=True), "shared memory is written by a peer that nobody can stop"
    assert not asks("push", "cma,tcp", same=True)
    assert not asks("push", "^ib", same=True)
    assert not asks("push", "tcp,cuda", same=True), "memory of a GPU is shared as well"
    assert asks("push", "tcp,cuda_copy", same=True)


def test_what_ucx_is_told_unless_somebody_else_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TCP_TX_SEG_SIZE", raising=False)
    assert _agent._defaults(()) == _agent._defaults(["NET_DEVICES=eth0"]) == ["TCP_TX_SEG_SIZE=64k"]
    assert _agent._defaults(["tcp_tx_seg_size=8k"]) == []
    monkeypatch.setenv("UCX_TCP_TX_SEG_SIZE", "8k")
    assert _agent._defaults(()) == []


@pytest.mark.parametrize(
    ("tls", "told"),
    [
        ("", None),
        ("tcp", "tcp"),
        ("tcp,cuda_copy", "tcp,cuda_copy"),
        ("rc,cuda", "rc,cuda"),
        ("rc,ud,tcp", "rc,ud,tcp,cuda_copy"),
        ("^cuda,ib", "^ib"),
        ("^cuda,cuda_copy", "all"),
        ("^ib,knem", "^ib,knem"),
    ],
)
def test_ucx_is_told_of_every_way_that_was_chosen(
    tls: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    agent = NixlAgent(tls, ["NET_DEVICES=eth0"], package=fake_engines)
    assert agent._agent.ucx.pop("TLS", None) == told
    assert agent._agent.ucx["NET_DEVICES"] == "eth0"
    assert "UCX_TLS" not in os.environ, "nobody else's agents, nor programs that are started here, hear of it"
    agent.close()
    monkeypatch.setenv("UCX_TLS", "ud")
    agent = NixlAgent(tls, package=fake_engines)
    assert agent._agent.ucx["TLS"] == os.environ["UCX_TLS"] == "ud"
    agent.close()


@pytest.mark.parametrize("nbytes", [[1], [512 << 10, 3], [(512 << 10) + 1, 7, 3 << 20], [1 << 20, 700_000]])
def test_long_rows_are_parted_and_their_bytes_are_the_same(nbytes: list[int]) -> None:
    lengths = np.asarray(nbytes, np.int64)
    local = np.cumsum(lengths) * 2
    rows = _agent._parted(local, local + 77, lengths)
    assert 0 < rows[2].min() <= rows[2].max() <= 512 << 10
    assert (rows[1] == rows[0] + 77).all()
    asked = {(int(at), int(at + n)) for at, n in zip(local, lengths, strict=True)}
    got: list[tuple[int, int]] = []
    for at, n in zip(rows[0].tolist(), rows[2].tolist(), strict=True):
        if got and got[-1][1] == at:
            got[-1] = (got[-1][0], at + n)
        else:
            got.append((at, at + n))
    assert set(got) == asked


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_a_missing_package_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    verdict = registry.viability(name)
    assert not verdict.ok
    assert f"[{name}]" in verdict.reason
    with pytest.raises(NotViable, match=name):
        registry.make(name)


async def test_a_package_that_does_not_load_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"{name}: libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(_agent.importlib, "import_module", missing)
    _agent.load.cache_clear()
    with pytest.raises(NotViable, match="libcudart"):
        await NixlTransport().start()


@pytest.mark.parametrize(
    ("there", "asked", "said"),
    [
        ([], (), "no RDMA device, and would go over TCP"),
        ([], ("mlx5_0",), "no RDMA device mlx5_0 .*there are none"),
        (["mlx5_1", "mlx5_2"], ("mlx5_2", "mlx5_7"), "mlx5_7 .*mlx5_1, mlx5_2"),
        (["mlx5_1"], (), ""),
        (["mlx5_1", "mlx5_2"], ("mlx5_2",), ""),
    ],
)
async def test_rdma_without_its_devices_is_refused_and_not_replaced(
    there: list[str], asked: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    config, module = MooncakeConfig(protocol="rdma", devices=asked), FakeMooncake()
    module.faults.devices = there
    transport = MooncakeTransport(config, opener=lambda: MooncakeEngine(config, module=module))
    if said:
        with pytest.raises(NotViable, match=said):
            await transport.start()
    else:
        await transport.start()
        monkeypatch.setenv("MC_FORCE_TCP", "1")
        with pytest.raises(EngineFailed, match="MC_FORCE_TCP"):
            MooncakeEngine(config, module=module)
    await transport.close()


def test_what_the_engine_says_of_its_devices() -> None:
    assert _te.devices('{"cpu:0": [["mlx5_0"], ["mlx5_1"]], "cpu:1": [[], ["mlx5_0"]]}') == {
        "mlx5_0",
        "mlx5_1",
    }
    for text in ("", "[]", '{"cpu:0": 3}'):
        with pytest.raises(EngineFailed, match="cannot be read"):
            _te.devices(text)


async def test_an_engine_that_does_not_start_is_told_at_the_start() -> None:
    def fails() -> NixlAgent:
        raise EngineFailed("no back end")

    transport = NixlTransport(opener=fails)
    with pytest.raises(NotViable, match="no back end"):
        await transport.start()
    await transport.close()


@pytest.mark.parametrize(
    ("config", "settings", "field"),
    [
        (NixlConfig, {"direction": "sideways"}, "transport.nixl.direction"),
        (NixlConfig, {"chunk": 1}, "transport.nixl.chunk"),
        (NixlConfig, {"host": "0.0.0.0"}, "transport.nixl.advertise"),
        (NixlConfig, {"ucx": ("UCX_TLS=tcp",)}, "transport.nixl.ucx"),
        (NixlConfig, {"ucx": ("TLS",)}, "transport.nixl.ucx"),
        (MooncakeConfig, {"host": "10.0.0.7"}, "transport.mooncake.open_ports"),
        (MooncakeConfig, {"host": "", "open_ports": True}, "transport.mooncake.host"),
        (MooncakeConfig, {"batch": 2049}, "transport.mooncake.batch"),
        (MooncakeConfig, {"protocol": "udp"}, "transport.mooncake.protocol"),
        (MooncakeConfig, {"host": "::1"}, "transport.mooncake.host"),
        (MooncakeConfig, {"advertise": "fe80::7", "open_ports": True}, "transport.mooncake.advertise"),
    ],
)
def test_settings_that_cannot_be(config: Any, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        config(**settings)
    assert caught.value.field == field


def test_beyond_loopback_if_allowed() -> None:
    assert MooncakeConfig(host="10.0.0.7", open_ports=True).host == "10.0.0.7"


async def test_peers_whose_engines_speak_otherwise_are_refused() -> None:
    transport = MooncakeTransport()
    verdict = transport.reachable({**transport.endpoint, "port": "7000", "protocol": "rdma"})
    assert "rdma" in verdict.reason


@pytest.mark.parametrize(
    ("tls", "environment", "asks"),
    [
        ("tcp", None, True),
        ("tcp,self", None, True),
        ("", None, False),
        ("^rc", None, False),
        ("tcp,cma", None, False),
        ("tcp,sm", None, False),
        ("tcp, shm", None, False),
        ("tcp,\\sysv", None, False),
        ("tcp", "tcp,sm", False),
        ("tcp", "all", False),
        ("", "tcp", True),
    ],
)
def test_nobody_who_gets_at_our_memory_is_asked_to_write_there(
    monkeypatch: pytest.MonkeyPatch, tls: str, environment: str | None, asks: bool
) -> None:
    """By whatever name UCX knows the way, and from wherever: the end of a connection keeps no such writer out."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    if environment is not None:
        monkeypatch.setenv("UCX_TLS", environment)
    transport = NixlTransport(NixlConfig(tls=tls))
    assert transport._asks({"boot": _machine.boot_id()}) == asks
    assert transport._asks({"boot": "another"})
    assert transport._lanes({"boot": _machine.boot_id()}) == (1 if asks else transport.config.copiers)


def test_what_is_said_to_ucx_while_an_agent_is_made_is_no_word_of_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    with _agent._chosen("tcp,sm"):
        assert os.environ["UCX_TLS"]
        assert NixlTransport(NixlConfig(tls="tcp"))._asks({"boot": _machine.boot_id()})
