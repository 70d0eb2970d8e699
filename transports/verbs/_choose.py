"""Which device, port and GID: by rule, or as the settings say."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hawk.errors import InvalidArgument, NotViable
from hawk.observe.log import get as get_log
from hawk.transports.verbs import _device
from hawk.transports.verbs._device import GidEntry, VerbsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hawk.transports.verbs._device import Device, Driver, Port

log = get_log("hawk.transports.verbs")

_NO_GID = GidEntry(0, bytes(16), "")


@dataclass(frozen=True, slots=True)
class Chosen:
    """One port to use, with its device opened; `node` is the NUMA node that the device is on, -1 if unknown."""

    device: Device
    port: Port
    gid: GidEntry
    node: int = -1


def is_local(address: str) -> bool:
    """Whether an IP address is one of this machine's, by binding a socket to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.bind((address, 0))
        return True
    return False


def ip_of(gid: bytes) -> str | None:
    """The IP address that a GID stands for: IPv4 where mapped, IPv6 otherwise; None for a link-local one."""
    address = ipaddress.IPv6Address(gid)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return None if address.is_link_local or address.is_unspecified else str(address)


def choose_gid(
    entries: Sequence[GidEntry], index: int = -1, local: Callable[[str], bool] = is_local
) -> tuple[GidEntry, str]:
    """The entry of an Ethernet port's GID table to send from, and why.

    The one that `index` names; else of those that can be routed, RoCE v2 before v1, an address of this machine before
    one that it has not (left over from an interface that changed), IPv4 before IPv6, the first of its kind.  A
    link-local entry only where there is no other: peers behind a router cannot answer it.

    Raises `InvalidArgument` for an index that is not in the table, `NotViable` for an empty table.
    """
    if index >= 0:
        for entry in entries:
            if entry.index == index:
                return entry, "transport.verbs.gid_index says so"
        raise InvalidArgument(
            "no such entry in the GID table",
            field="transport.verbs.gid_index",
            got=index,
            expected="one of " + ", ".join(str(e.index) for e in entries)
            if entries
            else "-1; the table is empty",
        )
    if not entries:
        raise NotViable(
            "the port has no GID", field="transport.verbs.devices", hint="Give its interface an address"
        )

    def rank(entry: GidEntry) -> tuple[bool, bool, bool, bool, int]:
        address = ip_of(entry.gid)
        return (
            address is None,
            "v1" in entry.kind,
            address is not None and not local(address),
            address is not None and ":" in address,
            entry.index,
        )

    best = min(entries, key=rank)
    linklocal, old, foreign, six, _ = rank(best)
    why = [
        "link-local, for want of any other" if linklocal else "can be routed",
        "RoCE v1" if old else best.kind or "of unknown type",
    ]
    if not linklocal:
        why += ["not an address of this machine" if foreign else "local", "IPv6" if six else "IPv4"]
    return best, ", ".join(why)


def open_ports(
    driver: Driver, names: Sequence[str], gid_index: int = -1, local: Callable[[str], bool] = is_local
) -> list[Chosen]:
    """The ports to use, opened: those that `names` says ("NAME" or "NAME:PORT", "@NODE"), else the fastest active one.

    Of equally fast ports the first in the order of the driver's names counts.  Without `names` what cannot be opened
    is passed over: a container has often been given one device of several that it sees.

    Raises `InvalidArgument` for a name that is not there, `NotViable` where nothing can be used, `VerbsError` as the
    device said; opens nothing then.
    """
    there = list(driver.devices())
    opened: dict[str, Device] = {}
    chosen: list[Chosen] = []
    kept: set[int] = set()
    failed: VerbsError | None = None
    try:
        for wanted in names or there:
            plain, at, node = wanted.partition("@")
            name, _, number = plain.partition(":")
            if name not in there or (number and not number.isdecimal()) or (at and not node.isdecimal()):
                raise InvalidArgument(
                    "no such RDMA device",
                    field="transport.verbs.devices",
                    got=repr(wanted),
                    expected="NAME or NAME:PORT, with @NODE or without, of "
                    + (", ".join(there) or "none at all"),
                )
            try:
                device = opened.get(name) or opened.setdefault(name, driver.open(name))
                found = _look(device, int(number) if number else 0, gid_index, local)
                chosen.append(dataclasses.replace(found, node=int(node)) if node else found)
            except (NotViable, VerbsError) as error:
                if names:
                    raise
                failed = error if isinstance(error, VerbsError) else failed
                log.info("RDMA device passed over", device=name, reason=str(error))
        if not chosen and failed is not None:
            raise failed
        if not chosen:
            raise NotViable(
                "no port of any RDMA device is active",
                field="transport.verbs.devices",
                got=", ".join(there) or "no device",
            )
        if not names:
            chosen = [max(chosen, key=lambda c: c.port.rate)]
        kept = {id(c.device) for c in chosen}
        return chosen
    finally:
        for device in opened.values():
            if id(device) not in kept:
                try:
                    device.close()
                except VerbsError as error:
                    log.error("a device could not be closed", device=device.name, reason=str(error))


def _look(device: Device, number: int, gid_index: int, local: Callable[[str], bool]) -> Chosen:
    """The device's port of that number, or its fastest active one for 0, and the GID to send from."""
    port = _port(device, number)
    gid, why = _NO_GID, "the port has a local identifier"
    if port.link == _device.ETHERNET:
        gid, why = choose_gid(device.gids(port.number), gid_index, local)
    log.info(
        "RDMA port",
        device=device.name,
        port=port.number,
        gid_index=gid.index,
        gid=str(ipaddress.IPv6Address(gid.gid)),
        reason=why,
    )
    return Chosen(device, port, gid, port.numa)


def _port(device: Device, number: int) -> Port:
    ports = list(device.ports())
    if number:
        ports = [p for p in ports if p.number == number]
        if not ports:
            raise InvalidArgument(
                "the device has no such port",
                field="transport.verbs.devices",
                got=f"{device.name}:{number}",
            )
    active = [p for p in ports if p.active]
    if not active:
        raise NotViable(
            "the port is not active",
            field="transport.verbs.devices",
            got=f"{device.name}:{number or 'any'}",
            hint="Bring its link up, or leave it out",
        )
    return max(active, key=lambda p: p.rate)
