"""Kinds of memory by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from hawk.errors import HawkMemoryError, InvalidArgument
from hawk.memory import registry
from hawk.memory.host import HostConfig, HostMemory
from hawk.memory.npu import EmulatedNpu, EmulatedNpuConfig


class Fancy(HostMemory):
    kind = "fancy"


@pytest.fixture
def plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        "fancy": EntryPoint("fancy", f"{__name__}:Fancy", registry.GROUP),
        "broken": EntryPoint("broken", "no_such_module_anywhere:X", registry.GROUP),
        "odd": EntryPoint("odd", "json:dumps", registry.GROUP),
    }
    monkeypatch.setattr(registry, "_plug_ins", lambda: entries)
    monkeypatch.setattr(EntryPoint, "load", _load)


def _load(entry: EntryPoint) -> object:
    # The tests are no importable package; the rest of loading is the real thing.
    return Fancy if entry.name == "fancy" else _real_load(entry)


_real_load = EntryPoint.load


def test_built_in() -> None:
    assert {"host", "emulated-npu"} <= set(registry.kinds())
    assert registry.get("host") is HostMemory
    assert registry.config_class("emulated-npu") is EmulatedNpuConfig


@pytest.mark.parametrize("channels", [7, 8])
def test_create(channels: int) -> None:
    config = EmulatedNpuConfig(capacity=1 << 20, channels=channels)
    memory = registry.create("emulated-npu", "npu0", config)
    try:
        assert isinstance(memory, EmulatedNpu)
        assert (memory.name, memory.channels, memory.alignment) == ("npu0", channels, 64)
    finally:
        memory.close()


def test_create_host() -> None:
    memory = registry.create("host", "h", HostConfig(capacity=1 << 20, alignment=128))
    try:
        assert (memory.kind, memory.channel_bytes, memory.alignment) == ("host", 1 << 20, 128)
    finally:
        memory.close()


def test_unknown_names_the_nearest() -> None:
    with pytest.raises(InvalidArgument, match="Did you mean 'emulated-npu'") as e:
        registry.get("emulated-gpu", field="memory.npu0.kind")
    assert e.value.field == "memory.npu0.kind"


def test_config_of_another_kind() -> None:
    with pytest.raises(InvalidArgument, match="HostConfig"):
        registry.create("host", "h", EmulatedNpuConfig(capacity=1 << 20))


@pytest.mark.usefixtures("plug_ins")
def test_plug_ins() -> None:
    assert {"fancy", "broken", "odd", "host"} <= set(registry.kinds())
    memory = registry.create("fancy", "f", HostConfig(capacity=4096))
    memory.close()
    assert memory.kind == "fancy"
    with pytest.raises(HawkMemoryError, match=r"cannot be imported.*no_such_module_anywhere"):
        registry.get("broken")
    with pytest.raises(HawkMemoryError, match="no kind of memory"):
        registry.get("odd")
    assert registry.get("host") is HostMemory  # a broken plug-in breaks nothing else
