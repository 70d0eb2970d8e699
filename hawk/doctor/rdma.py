"""RDMA devices as sysfs shows them, and the Python package that drives them.

The files are those of `Documentation/ABI/stable/sysfs-class-infiniband` in the kernel's sources.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hawk.doctor.findings import Finding, ok, warn
from hawk.transports.verbs import _find

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hawk.doctor.machine import Machine

SYSFS = "/sys/class/infiniband"

ROCE_HEADERS = 96
"""Bytes of a RoCE packet beside what it carries, as the kernel counts them (`iboe_get_mtu`): GRH or IP 40, UDP 8,
BTH 12, XRC 4, atomic 28, ICRC 4."""

PATH_MTUS = (4096, 2048, 1024, 512, 256)

PYVERBS_PACKAGE = _find.PACKAGE


@dataclass(frozen=True, slots=True)
class Gid:
    """One address of a port: its index in the port's table, its kind, and the network interface it is of."""

    index: int
    address: ipaddress.IPv6Address
    kind: str
    interface: str

    def usable(self, layer: str) -> bool:
        """Whether peers are reached from it: on Ethernet by routed packets, so that it has to be of RoCE v2."""
        if layer != "Ethernet":
            return True
        return self.kind == "RoCE v2" and not self.address.is_link_local

    def __str__(self) -> str:
        mapped = self.address.ipv4_mapped
        return f"{mapped or self.address} at index {self.index}"


def has_devices(machine: Machine) -> bool:
    """Whether the kernel knows any RDMA device."""
    return bool(machine.names(SYSFS))


def gids(machine: Machine, port: str) -> list[Gid]:
    """The addresses of a port (its folder), without the empty places of its table."""
    found = []
    for index in machine.names(f"{port}/gids"):
        text = machine.read(f"{port}/gids/{index}")
        try:
            address = ipaddress.IPv6Address(text)
        except ValueError:
            continue
        if int(address) & (2**64 - 1) == 0:
            continue
        kind = machine.read(f"{port}/gid_attrs/types/{index}")
        found.append(Gid(int(index), address, kind, machine.read(f"{port}/gid_attrs/ndevs/{index}")))
    return found


def devices(machine: Machine) -> Iterator[Finding]:
    """Every port of every device: whether it is up, its addresses, and the packets it can carry."""
    names = machine.names(SYSFS)
    if not names:
        yield warn(
            "RDMA",
            "no device",
            "Agents use tcp and shm without one; load the card's driver, or `rdma link add` for Soft-RoCE",
        )
    for name in names:
        for number in machine.names(f"{SYSFS}/{name}/ports"):
            yield from _port(machine, f"{name} port {number}", f"{SYSFS}/{name}/ports/{number}")


def _port(machine: Machine, name: str, port: str) -> Iterator[Finding]:
    state = machine.read(f"{port}/state").rpartition(":")[2].strip() or "unknown"
    layer = machine.read(f"{port}/link_layer") or "unknown link"
    rate = machine.read(f"{port}/rate")
    about = ", ".join(part for part in (state, layer, rate) if part)
    addresses = gids(machine, port)
    interfaces = list(dict.fromkeys(gid.interface for gid in addresses if gid.interface))
    interface = interfaces[0] if interfaces else "its network interface"
    if state != "ACTIVE":
        up = f"`ip link set {interface} up`" if layer == "Ethernet" else "is a subnet manager running?"
        yield warn(name, about, f"The port carries nothing: look at the cable, and {up}")
        return
    yield ok(name, about)
    usable = [gid for gid in addresses if gid.usable(layer)]
    if usable:
        yield ok(f"{name} GID", "; ".join(map(str, usable)))
    else:
        yield warn(
            f"{name} GID",
            f"none of {len(addresses)} can be routed",
            f"Give {interface} an address that peers reach: `ip addr add ADDRESS/LENGTH dev {interface}`",
        )
    if layer == "Ethernet" and interfaces:
        yield from _mtu(machine, name, interface)


def _mtu(machine: Machine, name: str, interface: str) -> Iterator[Finding]:
    text = machine.read(f"/sys/class/net/{interface}/mtu")
    if not text.isdecimal():
        return
    path = next((size for size in PATH_MTUS if size <= int(text) - ROCE_HEADERS), PATH_MTUS[-1])
    about = f"path MTU {path}, for {interface} carries {text}"
    if path == PATH_MTUS[0]:
        yield ok(f"{name} MTU", about)
        return
    yield warn(
        f"{name} MTU",
        about,
        f"`ip link set {interface} mtu 4200`, and as much on every switch and host between, for a path MTU of 4096",
    )


def pyverbs(machine: Machine) -> Iterator[Finding]:
    """Whether the package is there, where the transport looks for it, and is for this Python."""
    ours = f"cpython-{sys.version_info[0]}{sys.version_info[1]}"
    found = [(str(place), _built(machine, str(place))) for place in _find.places()]
    found.sort(key=lambda each: (not any(ours in name for name in each[1]), not each[1]))  # usable, then any
    place, built = found[0]
    if not built:
        if named := os.environ.get(_find.VARIABLE):
            yield warn(
                "pyverbs", f"none in {named}", f"{_find.VARIABLE} names the folder that has `pyverbs` in it"
            )
        elif has_devices(machine):
            remedy = f"`apt-get install {PYVERBS_PACKAGE}`, for the verbs transport"
            yield warn("pyverbs", "not installed", remedy)
        else:
            yield ok(
                "pyverbs", f"not installed; the package is {PYVERBS_PACKAGE}, should there be an RDMA device"
            )
        return
    if any(ours in name for name in built):
        yield ok("pyverbs", f"in {place}")
        return
    versions = sorted({match[1] for name in built if (match := re.search(r"cpython-(\d+)", name))})
    wanted = ", ".join(f"{version[0]}.{version[1:]}" for version in versions) or "another Python"
    yield warn("pyverbs", f"that in {place} is for Python {wanted}", "Run HAWK with that Python to use verbs")


def _built(machine: Machine, place: str) -> list[str]:
    """Compiled files of the package in a folder, of whichever Python."""
    return [name for name in machine.names(f"{place}/pyverbs") if name.startswith("device.")]
