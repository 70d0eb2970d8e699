"""Device, port and GID by rule: the routable local entry, with the reason logged, unless the settings say otherwise."""

import dataclasses
import errno
import ipaddress
import logging
from pathlib import Path

import pytest

from hawk.errors import InvalidArgument, NotViable
from hawk.transports.verbs._choose import choose_gid, ip_of, is_local, open_ports
from hawk.transports.verbs._device import INFINIBAND, GidEntry, VerbsError
from hawk.transports.verbs._pyverbs import read_gids
from hawk.transports.verbs.testing import PORT, FakeDriver
from hawk.transports.verbs.testing._driver import FakeDevice

V1, V2 = "IB/RoCE v1", "RoCE v2"


def gid(text: str) -> bytes:
    return ipaddress.IPv6Address(text).packed


def table(*rows: tuple[str, str]) -> list[GidEntry]:
    return [GidEntry(i, gid(address), kind, "eth0") for i, (address, kind) in enumerate(rows)]


LINK_LOCAL = "fe80::5054:ff:fe12:3456"


class LocalUnless:
    def __init__(self, foreign: tuple[str, ...]) -> None:
        self.foreign = foreign

    def __call__(self, address: str) -> bool:
        return address not in self.foreign


@pytest.mark.parametrize(
    ("rows", "foreign", "index", "why"),
    [
        (
            [(LINK_LOCAL, V1), (LINK_LOCAL, V2), ("::ffff:10.1.2.3", V1), ("::ffff:10.1.2.3", V2)],
            (),
            3,
            "IPv4",
        ),
        ([(LINK_LOCAL, V2), ("fc00::7", V2)], (), 1, "IPv6"),
        ([("::ffff:10.1.2.3", V2), ("::ffff:10.9.9.9", V2)], ("10.1.2.3",), 1, "local"),
        ([("::ffff:10.1.2.3", V2), ("::ffff:10.9.9.9", V2)], (), 0, "local"),
        ([("fc00::7", V2), ("::ffff:10.1.2.3", V2)], (), 1, "IPv4"),
        ([("::ffff:10.1.2.3", V1), ("fc00::7", V2)], (), 1, "RoCE v2"),
        ([(LINK_LOCAL, V1), (LINK_LOCAL, V2)], (), 1, "link-local"),
        ([("::ffff:10.1.2.3", V2)], ("10.1.2.3",), 0, "not an address of this machine"),
    ],
)
def test_the_rule(rows: list[tuple[str, str]], foreign: tuple[str, ...], index: int, why: str) -> None:
    chosen, reason = choose_gid(table(*rows), local=LocalUnless(foreign))
    assert chosen.index == index
    assert why in reason


def test_an_override_wins() -> None:
    entries = table((LINK_LOCAL, V2), ("::ffff:10.1.2.3", V2))
    chosen, reason = choose_gid(entries, 0, local=LocalUnless(()))
    assert chosen.index == 0
    assert "gid_index" in reason
    with pytest.raises(InvalidArgument, match="one of 0, 1") as caught:
        choose_gid(entries, 7)
    assert caught.value.field == "transport.verbs.gid_index"
    with pytest.raises(NotViable, match="no GID"):
        choose_gid([])


def test_addresses_of_this_machine() -> None:
    assert is_local("127.0.0.1")
    assert not is_local("192.0.2.1")
    assert ip_of(gid("::ffff:10.1.2.3")) == "10.1.2.3"
    assert ip_of(gid("fc00::7")) == "fc00::7"
    assert ip_of(gid(LINK_LOCAL)) is None


def test_the_fastest_active_port_and_why_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    slow = dataclasses.replace(PORT, rate=25e9)
    down = dataclasses.replace(PORT, rate=400e9, active=False)
    second = dataclasses.replace(PORT, number=2, rate=200e9)
    driver = FakeDriver(["a", "b", "c"], ports={"a": [slow], "b": [down, second], "c": [down]})
    with caplog.at_level(logging.INFO, "hawk.transports.verbs"):
        (chosen,) = open_ports(driver, ())
    assert (chosen.device.name, chosen.port.number) == ("b", 2)
    assert chosen.gid.index == 3
    (told,) = [text for text in caplog.messages if text.startswith("RDMA port device=b port=2 gid_index=3")]
    assert "RoCE v2, local, IPv4" in told
    chosen.device.close()
    assert [d.name for d in driver.opened if not d.closed] == []


def test_named_ports() -> None:
    ports = {"a": [PORT, dataclasses.replace(PORT, number=2)], "b": [dataclasses.replace(PORT, active=False)]}
    driver = FakeDriver(["a", "b"], ports=ports)
    chosen = open_ports(driver, ["a:2", "a:1"])
    assert [(c.device.name, c.port.number) for c in chosen] == [("a", 2), ("a", 1)]
    assert chosen[0].device is chosen[1].device
    chosen[0].device.close()
    for names, error, text in (
        (["c"], InvalidArgument, "NAME:PORT, with @NODE or without, of a, b"),
        (["a:7"], InvalidArgument, "no such port"),
        (["a", "b"], NotViable, "not active"),
    ):
        with pytest.raises(error, match=text) as caught:
            open_ports(driver, names)
        assert caught.value.field == "transport.verbs.devices"
    assert all(d.closed for d in driver.opened), "what was opened on the way is closed"


def test_a_device_that_cannot_be_used_is_passed_over_unless_it_was_named() -> None:
    bare = FakeDriver(["bare", "good"], gids={"bare": []})
    (chosen,) = open_ports(bare, ())
    assert chosen.device.name == "good"
    chosen.device.close()
    with pytest.raises(NotViable, match="no GID"):
        open_ports(bare, ["bare"])
    with pytest.raises(NotViable, match="no port of any RDMA device is active; got bare"):
        open_ports(FakeDriver(["bare"], gids={"bare": []}), ())
    with pytest.raises(NotViable, match="no device"):
        open_ports(FakeDriver([]), ())


def test_a_device_that_cannot_be_opened_is_passed_over_unless_it_was_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container that sees two devices and was given one."""
    driver = FakeDriver(["shut", "good"])
    opening = driver.open

    def open_(name: str) -> FakeDevice:
        if name == "shut":
            raise VerbsError(errno.EACCES, "ibv_open_device")
        return opening(name)

    monkeypatch.setattr(driver, "open", open_)
    (chosen,) = open_ports(driver, ())
    assert chosen.device.name == "good"
    chosen.device.close()
    with pytest.raises(VerbsError):
        open_ports(driver, ["good", "shut"])
    assert all(device.closed for device in driver.opened)
    monkeypatch.setattr(driver, "devices", lambda: ["shut"])
    with pytest.raises(VerbsError, match="ibv_open_device"):
        open_ports(driver, ())


def test_infiniband_needs_no_gid() -> None:
    driver = FakeDriver(
        ["ib"], ports={"ib": [dataclasses.replace(PORT, link=INFINIBAND, lid=7)]}, gids={"ib": []}
    )
    (chosen,) = open_ports(driver, ())
    assert chosen.port.lid == 7
    chosen.device.close()


def test_the_table_in_sysfs(tmp_path: Path) -> None:
    folder = tmp_path
    for name, values in {
        "gids": {
            "0": "fe80:0000:0000:0000:5054:00ff:fe12:3456",
            "1": "0000:0000:0000:0000:0000:ffff:0a01:0203",
            "2": "0000:0000:0000:0000:0000:0000:0000:0000",
            "10": "fc00:0000:0000:0000:0000:0000:0000:0007",
        },
        "gid_attrs/types": {"0": "RoCE v2", "1": "RoCE v2"},
        "gid_attrs/ndevs": {"0": "eth0", "1": "eth0"},
    }.items():
        (folder / name).mkdir(parents=True)
        for entry, text in values.items():
            (folder / name / entry).write_text(text + "\n")
    found = read_gids(folder)
    assert [(e.index, ip_of(e.gid), e.kind, e.netdev) for e in found] == [
        (0, None, "RoCE v2", "eth0"),
        (1, "10.1.2.3", "RoCE v2", "eth0"),
        (10, "fc00::7", "", ""),
    ]
    assert read_gids(folder / "absent") == []
