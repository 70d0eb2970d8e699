"""Transports by name, plug-ins that break, and the choice between two agents."""

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from hawk.errors import InvalidArgument, NotViable
from hawk.transports import registry
from hawk.transports.base import Transport, Viability
from hawk.transports.shm import ShmTransport
from hawk.transports.tcp import TcpConfig, TcpTransport

PLUG_INS = {
    "mine": "hawk.transports.tcp:TcpTransport",
    "broken": "no_such_module_anywhere:Transport",
    "odd": "os:path",
    "tcp": "hawk.transports.shm:ShmTransport",
}


@pytest.fixture
def _plugged(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [importlib.metadata.EntryPoint(n, v, registry.GROUP) for n, v in PLUG_INS.items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: entries)


def test_the_built_in_ones() -> None:
    assert registry.transport_class("tcp") is TcpTransport
    assert registry.transport_class("shm") is ShmTransport
    assert {"tcp", "shm"} <= set(registry.names())
    for name in ("tcp", "shm"):
        assert registry.viability(name).ok
        transport = registry.make(name)
        assert transport.name == name
        assert is_dataclass(transport.Config)
        assert all(hasattr(transport.Config(), item.name) for item in fields(transport.Config))


def test_an_unknown_name_gets_the_nearest() -> None:
    for ask in (registry.transport_class, registry.viability, registry.make):
        with pytest.raises(InvalidArgument, match="Did you mean 'tcp'"):
            ask("tpc")
    with pytest.raises(InvalidArgument, match="one of tcp, shm"):
        registry.make("")


@pytest.mark.usefixtures("_plugged")
def test_a_plug_in_that_breaks_says_why_and_leaves_the_others_alone() -> None:
    survey = registry.survey()
    assert set(survey) == {"tcp", "shm", "verbs", "cuda", "nixl", "mooncake", "mine", "broken", "odd"}
    assert survey["mine"].ok
    assert survey["tcp"].ok
    assert not survey["broken"].ok
    assert "no_such_module_anywhere" in survey["broken"].reason
    assert "no Transport class" in survey["odd"].reason
    with pytest.raises(NotViable, match="no_such_module_anywhere"):
        registry.make("broken")
    assert isinstance(registry.make("mine"), TcpTransport)
    assert isinstance(registry.make("tcp"), TcpTransport), "a plug-in cannot take a built-in name"


def test_a_transport_that_cannot_be_used_here_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TcpTransport, "probe", classmethod(lambda cls: Viability(False, "no cable")))
    with pytest.raises(NotViable, match="no cable"):
        registry.make("tcp")

    def explode(cls: type[Transport]) -> Viability:
        raise OSError("driver on fire")

    monkeypatch.setattr(TcpTransport, "probe", classmethod(explode))
    assert "driver on fire" in registry.viability("tcp").reason


def test_settings_are_typed() -> None:
    config = registry.configure("tcp", {"streams": 3, "host": "127.0.0.1"})
    assert config == TcpConfig(streams=3)
    with pytest.raises(FrozenInstanceError):
        config.streams = 4  # type: ignore[attr-defined]
    with pytest.raises(InvalidArgument, match=r"tcp\.stream: .*Did you mean 'streams'"):
        registry.configure("tcp", {"stream": 3})
    with pytest.raises(InvalidArgument, match="not this transport's settings"):
        registry.make("shm", config)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("tcp", "streams", 0),
        ("tcp", "streams", "2"),
        ("tcp", "streams", True),
        ("tcp", "port", 65536),
        ("tcp", "port", -1),
        ("tcp", "chunk", 0),
        ("tcp", "piece", 1.5),
        ("tcp", "host", ""),
        ("tcp", "handshake_timeout", 0),
        ("tcp", "stall_timeout", float("nan")),
        ("tcp", "connect_timeout", float("inf")),
        ("shm", "threads", 0),
        ("shm", "grace", -1),
        ("shm", "chunk", 1),
    ],
)
def test_bad_values_are_named(name: str, setting: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"{name}.{setting}")):
        registry.configure(name, {setting: value})


def test_a_wildcard_needs_an_address_to_advertise() -> None:
    for host in ("0.0.0.0", "::", "*"):
        with pytest.raises(InvalidArgument, match=r"tcp\.advertise"):
            TcpConfig(host=host)
    assert TcpTransport(TcpConfig(host="0.0.0.0", advertise="10.1.2.3")).endpoint["host"] == "10.1.2.3"


class Fake(TcpTransport):
    """Reaches only whom it is told to."""

    def __init__(self, verdict: Viability) -> None:
        super().__init__()
        self.verdict = verdict

    def reachable(self, endpoint: Mapping[str, str]) -> Viability:
        return self.verdict


YES, NO = Viability(True), Viability(False, "another host")


def test_the_first_that_both_sides_have_is_chosen() -> None:
    local = {"a": Fake(YES), "b": Fake(YES), "c": Fake(NO)}
    remote: dict[str, dict[str, str]] = {"b": {}, "c": {}, "d": {}}
    choice = registry.choose(["a", "d", "c", "b", "x"], local, remote)
    assert choice.name == "b"
    assert choice.rejected == {
        "a": "not offered by the peer",
        "d": "not in use on this side",
        "c": "another host",
    }
    assert "c" in choice.reason
    assert registry.choose(["b"], local, remote) == registry.Choice("b", "the first choice", {})


def test_no_choice_gives_every_reason() -> None:
    local = {"a": Fake(YES), "b": Fake(YES), "c": Fake(NO)}
    remote: dict[str, dict[str, str]] = {"b": {}, "c": {}}
    with pytest.raises(NotViable) as caught:
        registry.choose(["a", "c", "x"], local, remote)
    for part in ("a: not offered", "c: another host", "x: not in use", "Both sides also have b"):
        assert part in str(caught.value)
    with pytest.raises(NotViable, match="no preference"):
        registry.choose([], local, remote)
