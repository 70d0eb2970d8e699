"""Registrations of regions: in slices, off the event loop, remembered for as long as the region's memory lives."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import errno
import resource
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hawk.endings import all_ended
from hawk.errors import RegistrationFailed
from hawk.memory.region import Handle
from hawk.observe.log import get as get_log
from hawk.transports.verbs import _numa
from hawk.transports.verbs._device import VerbsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from hawk.memory.region import I64, U8, Region
    from hawk.transports.verbs._device import Device, Registration
    from hawk.transports.verbs._worker import Worker

log = get_log("hawk.transports.verbs")

NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, 524)
"""524 is the kernel's own ENOTSUPP, which some drivers let out."""


@dataclass(frozen=True, slots=True)
class Registered:
    """One region, registered with every device alike.

    start      offset in the region at which each slice begins, ascending, `int64[n]`
    address    what work requests call that byte, `int64[n]`
    slices     registrations of each device, in the order of the devices
    nodes      NUMA node of each slice's first byte, -1 where unknown
    """

    start: I64
    address: I64
    slices: tuple[tuple[Registration, ...], ...]
    nodes: tuple[int, ...]

    def keys(self, device: int) -> NDArray[np.uint32]:
        """Local keys of the slices for one device, `uint32[n]`."""
        return np.asarray([r.lkey for r in self.slices[device]], np.uint32)


def joined(registered: Sequence[Registered], begin: I64) -> Registered:
    """Several regions laid end to end, as one; region r begins at `begin[r]` in that line."""
    if not registered:
        return Registered(np.zeros(0, np.int64), np.zeros(0, np.int64), (), ())
    devices = zip(*(r.slices for r in registered), strict=True)
    return Registered(
        start=np.concatenate([r.start + at for r, at in zip(registered, begin.tolist(), strict=True)]),
        address=np.concatenate([r.address for r in registered]),
        slices=tuple(tuple(slice_ for each in device for slice_ in each) for device in devices),
        nodes=tuple(node for r in registered for node in r.nodes),
    )


def line(regions: Sequence[Region]) -> I64:
    """Where each region begins when they are laid end to end, `int64[n]`."""
    sizes = np.asarray([r.nbytes for r in regions], np.int64)
    return np.cumsum(sizes) - sizes


def cut(region: Region, limit: int) -> list[tuple[int, int]]:
    """Slices (offset, bytes) of at most `limit` bytes; none crosses the begin of an extent."""
    stops = [*region.extents[1:], region.nbytes]
    return [
        (at, min(limit, stop - at))
        for start, stop in zip(region.extents, stops, strict=True)
        for at in range(start, stop, limit)
    ]


def register(
    devices: Sequence[Device], region: Region, limit: int, access: int, node: int | None = None
) -> Registered:
    """Registers every slice with every device, or nothing; `node` is the NUMA node where settings say it.

    A region that has a dma-buf, or one for each extent, is registered by that; where the RDMA device or its driver
    knows none, by its address, which for memory of a device takes that device's peer-memory module.

    Raises `RegistrationFailed`, naming the limit that was met and what to do about it.
    """
    slices = cut(region, min([limit, *(d.limits.max_mr_size for d in devices)]))
    way = "dma-buf" if region.dmabuf >= 0 or any(h.dmabuf >= 0 for h in region.handles) else "address"
    try:
        return _register(devices, region, slices, way, access, node)
    except VerbsError as error:
        if way == "address":
            raise explain(error, region, "address", None) from error
        log.warning("no registration by dma-buf; trying by address", region=region.name, reason=str(error))
        first = error
    try:
        return _register(devices, region, slices, "address", access, node)
    except VerbsError as error:
        raise explain(error, region, "address", first) from error


def _register(
    devices: Sequence[Device],
    region: Region,
    slices: list[tuple[int, int]],
    way: str,
    access: int,
    node: int | None,
) -> Registered:
    made: list[list[Registration]] = []
    try:
        for device in devices:
            made.append([])
            for at, nbytes in slices:
                place = _place(region, at)
                if way == "dma-buf" and place.dmabuf >= 0:
                    made[-1].append(device.register_dmabuf(place.dmabuf, place.offset, nbytes, access))
                else:
                    made[-1].append(device.register(place.address, nbytes, access))
    except BaseException:
        close([r for each in made for r in each])
        raise
    return Registered(
        start=np.asarray([at for at, _ in slices], np.int64),
        address=np.asarray([r.address for r in made[0]], np.int64),
        slices=tuple(tuple(each) for each in made),
        nodes=tuple(_node(region, at) if node is None else node for at, _ in slices),
    )


def _place(region: Region, at: int) -> Handle:
    """Byte `at` of the region, as devices reach it: by the handle of its extent, where extents have some."""
    if not region.handles:
        return Handle(region.dmabuf, region.dmabuf_offset + at, region.address + at)
    extent = bisect.bisect_right(region.extents, at) - 1
    handle, beyond = region.handles[extent], at - region.extents[extent]
    address = handle.address + beyond if handle.address else region.address + at
    return Handle(handle.dmabuf, handle.offset + beyond, address)


def _node(region: Region, at: int) -> int:
    """Of pages of the host, which are there once they are registered; a device's are not asked for theirs."""
    return _numa.UNKNOWN if region.gpu >= 0 else _numa.node_of(region.address + at)


def close(registrations: Sequence[Registration]) -> None:
    """Ends registrations, the last first; one that cannot be ended is logged."""
    for registration in reversed(registrations):
        try:
            registration.close()
        except VerbsError as error:
            log.error("a registration could not be ended", nbytes=registration.nbytes, reason=str(error))


def explain(error: VerbsError, region: Region, way: str, dmabuf: VerbsError | None) -> RegistrationFailed:
    """What a failed registration means, and what to do about it."""
    number = error.errno or 0
    hints = []
    if number in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft != resource.RLIM_INFINITY:
            hints.append(
                f"The memlock limit is {soft} bytes and all registered memory counts: set LimitMEMLOCK=infinity in "
                "the unit, or ulimit -l unlimited"
            )
        else:
            hints.append(
                "The device has no room for more registrations (max_mr, max_mr_size): register less, or raise "
                "transport.verbs.slice"
            )
    elif number == errno.EINVAL:
        hints.append(
            "The device takes no such registration; lower transport.verbs.slice below its max_mr_size"
        )
    elif number == errno.EFAULT:
        hints.append(
            "These are no ordinary pages: a device's memory is registered by a dma-buf, or by its address with "
            "nvidia-peermem (or the device's own peer-memory module) loaded"
        )
    elif number in NOT_SUPPORTED:
        hints.append(
            "The driver of the RDMA device does not support this kind of memory (dma-buf, on-demand paging)"
        )
    if dmabuf is not None:
        hints.append(
            f"By dma-buf: {dmabuf.strerror or dmabuf.what}; that takes kernel 5.12 and a driver with dma-buf support"
        )
        if number != errno.EFAULT:
            hints.append("By address it takes nvidia-peermem (or the device's own peer-memory module)")
    return RegistrationFailed(
        "the RDMA device cannot reach this memory",
        field=region.name,
        got=f"{error.what}: errno {number}",
        hint=". ".join(hints) or None,
        nbytes=region.nbytes,
        way=way,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A registration that was made, or is being made, and the array that it is of."""

    array: weakref.ref[U8]
    made: asyncio.Task[Registered]


class Registrations:
    """The registrations of one transport, by the array that a region shows; they end when that array is gone.

    A region's array lives for as long as its memory does, so a new mapping at an old address is a new registration.
    """

    def __init__(
        self, devices: Sequence[Device], worker: Worker, limit: int, nodes: Mapping[str, int] | None = None
    ) -> None:
        self._nodes = nodes or {}
        self._devices = devices
        self._worker = worker
        self._limit = limit
        self._known: dict[tuple[int, int], _Known] = {}
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._known)

    async def of(self, region: Region, access: int) -> Registered:
        """The registration of a region for this kind of access, made if need be.  Raises `RegistrationFailed`."""
        if self._closed:
            raise RegistrationFailed("the transport is closed", field=region.name)
        key = (id(region.array), access)
        known = self._known.get(key)
        if known is not None and known.array() is not region.array:
            self._forget(key, known.array)  # gone already, and another array is where it was
            known = None
        if known is None:
            node = self._nodes.get(region.name.partition("/")[0])
            array = weakref.ref(region.array, lambda ref: self._gone(key, ref))
            made = self._loop.create_task(
                self._worker.call(register, self._devices, region, self._limit, access, node)
            )
            known = self._known[key] = _Known(array, made)
        try:
            return await asyncio.shield(known.made)
        except Exception:
            # Not remembered: what was short may be there the next time.
            if self._known.get(key) is known:
                del self._known[key]
            raise

    def _gone(self, key: tuple[int, int], array: weakref.ref[U8]) -> None:
        """An array is gone; called by whichever thread let go of it last."""
        if not self._closed:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and all that was registered with it
                self._loop.call_soon_threadsafe(self._forget, key, array)

    def _forget(self, key: tuple[int, int], array: weakref.ref[U8]) -> None:
        known = self._known.get(key)
        if known is None or known.array is not array or self._closed:
            return
        del self._known[key]
        task = self._loop.create_task(self._end(known))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, known: _Known) -> None:
        try:
            registered = await known.made
        except RegistrationFailed:
            return  # told to whoever asked for it
        except Exception:
            log.exception("a registration failed on a fault of ours")
            return
        for each in registered.slices:
            await self._worker.call(close, each)

    async def close(self) -> None:
        """Ends all of them; nobody uses them any more."""
        self._closed = True
        known, self._known = list(self._known.values()), {}
        await all_ended(*self._ending, *(self._end(each) for each in known))
