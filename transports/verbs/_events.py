"""What devices say by themselves: ports that go down and come up, queue pairs and devices that fail.

Read on the event loop, from the descriptor that each device has for it.  An event names its kind alone, so after one
about a port all ports of the device are looked at.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hawk.observe.log import get as get_log
from hawk.transports.verbs import _device
from hawk.transports.verbs._device import VerbsError
from hawk.transports.verbs._shared import DEVICE_FAILED, PORT_DOWN, QUEUE_PAIR_EVENT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hawk.transports.verbs._device import Device, Port
    from hawk.transports.verbs._shared import Shared

log = get_log("hawk.transports.verbs")


_EMPTY = 100
"""Times in a row that a descriptor is readable and nothing comes of it, after which it is let go: that of a device that
was taken out of the machine stays readable for ever."""


class Watch:
    """The events of all devices of a transport; `on_failed` is told of a device that failed as a whole."""

    def __init__(self, shared: Shared, on_failed: Callable[[Device], None]) -> None:
        self._ports = shared.ports
        self._worker = shared.worker
        self._counts = shared.counts
        self._on_failed = on_failed
        self._devices = {d.name: d for d in (p.device for p in shared.ports)}
        self._down: set[tuple[str, int]] = set()
        self._failed: set[str] = set()
        self._watched: list[int] = []
        self._empty: dict[str, int] = {}
        self._looking = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """From now on events are read."""
        loop = asyncio.get_running_loop()
        for device in self._devices.values():
            if device.event_fd >= 0:
                loop.add_reader(device.event_fd, self._read, device)
                self._watched.append(device.event_fd)

    def _read(self, device: Device) -> None:
        self._empty[device.name] = self._empty.get(device.name, 0) + 1
        while (kind := device.take_event()) is not None:
            self._empty[device.name] = 0
            what = _device.EVENTS.get(kind, f"event {kind}")
            if kind in _device.PORT_EVENTS:
                log.info("an RDMA device says something of a port", device=device.name, what=what)
                task = asyncio.get_running_loop().create_task(self._look(device))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif kind == _device.DEVICE_FATAL:
                log.error("an RDMA device failed", device=device.name)
                self._counts[DEVICE_FAILED] += 1
                self._failed.add(device.name)
                self._ignore(device)  # nothing may be asked of it while what it had is given back
                self._on_failed(device)
                return
            elif kind in _device.QUEUE_EVENTS:
                log.warning("an RDMA device says something of a queue pair", device=device.name, what=what)
                self._counts[QUEUE_PAIR_EVENT] += 1
            else:
                log.debug("an RDMA device says something", device=device.name, what=what)
        if self._empty[device.name] >= _EMPTY:
            self._ignore(device)
            log.error("what an RDMA device says cannot be read any more", device=device.name)

    def _ignore(self, device: Device) -> None:
        asyncio.get_running_loop().remove_reader(device.event_fd)
        self._watched.remove(device.event_fd)

    async def _look(self, device: Device) -> None:
        """Which ports of a device are active now; one look after the other, so that the last one counts."""
        async with self._looking:
            try:
                ports = await self._worker.call(device.ports)
            except VerbsError as error:
                log.warning("ports could not be looked at", device=device.name, reason=str(error))
                return
            self._compare(device, ports)

    def _compare(self, device: Device, ports: Sequence[Port]) -> None:
        used = {p.port.number for p in self._ports if p.device is device}
        for port in ports:
            place = device.name, port.number
            if port.number not in used or port.active == (place not in self._down):
                continue
            if port.active:
                self._down.discard(place)
                log.info("an RDMA port is active again", device=device.name, port=port.number)
            else:
                self._down.add(place)
                self._counts[PORT_DOWN] += 1
                log.warning("an RDMA port went down", device=device.name, port=port.number)

    def trouble(self) -> str | None:
        """Why nothing goes through any port, None while something may."""
        lost = {(p.device.name, p.port.number) for p in self._ports if p.device.name in self._failed}
        if any((p.device.name, p.port.number) not in lost | self._down for p in self._ports):
            return None
        names = ", ".join(dict.fromkeys(f"{p.device.name}:{p.port.number}" for p in self._ports))
        if lost:
            return f"the RDMA device failed, and only a restart opens it again: {names}"
        return f"no RDMA port is active: {names}"

    async def close(self) -> None:
        """Reads no more."""
        for fd in self._watched:
            asyncio.get_running_loop().remove_reader(fd)
        self._watched.clear()
        if self._tasks:
            await asyncio.wait(self._tasks)
