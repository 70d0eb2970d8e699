"""Calibrations: named sets of a few figures, each with bounds, that a simulation is made with.

    transfer    costs of moving KV (`TRANSFER`)
    devices     figures of devices that this calibration sets otherwise than their files do

A calibration is a file of `hawk/serving/calibrations`, or one's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hawk.errors import InvalidArgument
from hawk.serving.device import UNITS, load_device, sound
from hawk.serving.figures import Figure, figures, number, read_shipped, shipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from hawk.serving.device import Device

TRANSFER = {
    "fixed": "s",
    "host_fixed": "s",
    "link_efficiency": "1",
    "request_cost": "s",
    "copy_rate": "bytes/s",
    "adjust_fixed": "s",
    "adjust_rate": "bytes/s",
    "retile_fixed": "s",
    "retile_rate": "bytes/s",
    "chunk": "bytes",
    "staging": "bytes",
    "stalls": "1",
}
"""What a transfer costs.

fixed            asking, answering and releasing, whatever the size
host_fixed       what a staging by way of the host takes beside that, whatever the size
link_efficiency  part of the link's rate that payload reaches
request_cost     building and handing over one work request, beside the bytes on the link
copy_rate        each copy between a device and memory of its host, where KV is staged there
adjust_*         putting into the target's layout what came in the source's, on the target's side
retile_*         what HAWK's conversion on the source takes: before the first byte, and in step with the link
chunk            bytes that are prepared and moved in one go, one behind another
staging          bytes that serving stages by way of the host at a time, each with the fixed costs
stalls           part of a staging during which the engines stand still
"""


@dataclass(frozen=True)
class Calibration:
    """A named set of figures; `device` gives a device as this calibration has it."""

    name: str
    summary: str
    transfer: Mapping[str, Figure]
    devices: Mapping[str, Mapping[str, Figure]] = field(default_factory=dict)

    def value(self, key: str) -> float:
        """A figure of `TRANSFER`."""
        return self.transfer[key].value

    def device(self, name: str | Path | Device) -> Device:
        """The device of that name with the figures that this calibration sets."""
        from hawk.serving.device import Device

        found = name if isinstance(name, Device) else load_device(name)
        return found.with_figures(self.devices.get(found.name, {}))

    def all_figures(self) -> Iterator[tuple[str, Figure]]:
        """Every figure with a name like `transfer.fixed` or `a100.mfu`."""
        for key, one in self.transfer.items():
            yield f"transfer.{key}", one
        for device, table in self.devices.items():
            for key, one in table.items():
                yield f"{device}.{key}", one


def calibration_names() -> list[str]:
    """Names that `load_calibration` knows."""
    return shipped("calibrations")


def load_calibration(name_or_path: str | Path) -> Calibration:
    """The calibration of that name, or that of a `.toml` file; raises `InvalidArgument` naming file and key."""
    table, origin = read_shipped("calibrations", "calibration", name_or_path)
    for key in table:
        if key not in ("name", "summary", "transfer", "devices"):
            raise InvalidArgument(
                "unknown key", field=f"{origin}: {key}"[:200], expected="name, summary, transfer, devices"
            )
    for key in ("name", "summary"):
        if not isinstance(table.get(key), str) or not table[key]:
            raise InvalidArgument(
                "a text is needed", field=f"{origin}: {key}", got=table.get(key), expected="a text"
            )
    devices = table.get("devices", {})
    if not isinstance(devices, dict):
        raise InvalidArgument("tables by device are needed", field=f"{origin}: devices", got=devices)
    costs = figures(table.get("transfer"), f"{origin}: transfer", TRANSFER)
    for key in ("link_efficiency", "stalls"):
        number(costs[key].value, f"{origin}: transfer.{key}", 0.0, 1.0)
    for key in ("link_efficiency", "copy_rate", "adjust_rate", "retile_rate", "chunk", "staging"):
        number(costs[key].value, f"{origin}: transfer.{key}", 1e-6)
    set_here = {}
    for name, found in devices.items():
        field = f"{origin}: devices.{name}"
        set_here[name] = figures(found, field, UNITS, all_of=False)
        sound(set_here[name], field)
    return Calibration(table["name"], table["summary"], costs, set_here)
