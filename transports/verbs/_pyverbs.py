"""The seam kept by pyverbs, rdma-core's own Python interface, in its releases from 39 on.

Three things need more than pyverbs gives:

- The descriptor of a completion channel is not shown by older releases: it is the event descriptor that appears while
  the channel is made.
- A request object for every work request costs microseconds, and the objects of several releases never free their
  memory.  So a batch is laid out by `_abi` and handed over at once: the first request is copied into the `ibv_send_wr`
  inside one request object, whose `next` then leads on into the batch.  Where that structure lies in the object is
  found by marks put into it, and checked; where the check fails requests are made one by one.
- pyverbs keeps Python's lock during `ibv_reg_mr`.  `register` populates the pages first, without it, and the transport
  registers slice by slice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path as File
from typing import TYPE_CHECKING

from hawk.transports.verbs import _device, _find
from hawk.transports.verbs._device import GidEntry, Limits, Port, VerbsError
from hawk.transports.verbs._pyverbs_call import (
    PyverbsRegistration,
    PyverbsWindow,
    calling,
    descriptors,
    event_descriptors,
    part,
)
from hawk.transports.verbs._pyverbs_queue import PyverbsCompletions, PyverbsQueue

if TYPE_CHECKING:
    from hawk.transports.verbs._device import Completions

_WINDOWS_2A, _WINDOWS_2B = 1 << 23, 1 << 24  # enum ibv_device_cap_flags
_ACTIVE = 4  # enum ibv_port_state
_MADV_POPULATE_WRITE = 23


class PyverbsDriver:
    """Devices of this machine."""

    def devices(self) -> list[str]:
        """See `Driver.devices`."""
        with calling("ibv_get_device_list"):
            names = [entry.name for entry in part("device").get_device_list()]
        return [n.decode() if isinstance(n, bytes) else str(n) for n in names]

    def open(self, name: str) -> PyverbsDevice:
        """See `Driver.open`."""
        return PyverbsDevice(name)


class PyverbsDevice:
    """See `Device`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.event_fd = -1
        with descriptors, calling("ibv_open_device"):
            before = event_descriptors()
            self._context = part("device").Context(name=name)
            fresh = event_descriptors() - before
        if len(fresh) == 1 and hasattr(self._context, "get_async_event"):
            (self.event_fd,) = fresh
            os.set_blocking(self.event_fd, False)
        try:
            with calling("ibv_query_device"):
                attributes = self._context.query_device()
                self._pd = part("pd").PD(self._context)
        except BaseException:
            self._close_context()  # under the lock, and not whenever the object goes
            raise
        flags = int(attributes.device_cap_flags)
        self.limits = Limits(
            max_mr_size=int(attributes.max_mr_size),
            max_send_wr=int(attributes.max_qp_wr),
            max_sge=int(attributes.max_sge),
            max_sge_read=int(attributes.max_sge_rd) or int(attributes.max_sge),
            max_cqe=int(attributes.max_cqe),
            max_reads_out=int(attributes.max_qp_init_rd_atom),
            max_reads_in=int(attributes.max_qp_rd_atom),
            windows=bool(flags & (_WINDOWS_2A | _WINDOWS_2B)) and int(attributes.max_mw) > 0,
            immediates=hasattr(part("cq").WC, "imm_data"),
        )
        self._ports = int(attributes.phys_port_cnt)

    def take_event(self) -> int | None:
        """See `Device.take_event`; acknowledged at once, since destroying a queue pair waits for that."""
        try:
            with calling("ibv_get_async_event"):
                event = self._context.get_async_event()
        except VerbsError:
            return None  # EAGAIN, which pyverbs does not always pass on
        kind = int(event.event_type)
        event.ack()
        return kind

    def ports(self) -> list[Port]:
        """See `Device.ports`."""
        numa = _read(_find.SYSFS / self.name / "device" / "numa_node", "-1")
        found = []
        for number in range(1, self._ports + 1):
            with calling("ibv_query_port"):
                facts = self._context.query_port(number)
            rate = _read(_find.SYSFS / self.name / "ports" / str(number) / "rate", "0").split()[0]
            found.append(
                Port(
                    number=number,
                    active=int(facts.state) == _ACTIVE,
                    link=_device.ETHERNET if int(facts.link_layer) == 2 else _device.INFINIBAND,
                    lid=int(facts.lid),
                    mtu=int(facts.active_mtu),
                    max_message=int(facts.max_msg_sz),
                    rate=float(rate) * 1e9,
                    numa=int(numa),
                )
            )
        return found

    def gids(self, port: int) -> list[GidEntry]:
        """See `Device.gids`; from sysfs, which says which interface an entry belongs to."""
        return read_gids(_find.SYSFS / self.name / "ports" / str(port))

    def register(self, address: int, nbytes: int, access: int) -> PyverbsRegistration:
        """See `Device.register`."""
        _populate(address, nbytes)
        with calling("ibv_reg_mr"):
            return PyverbsRegistration(
                part("mr").MR(self._pd, nbytes, access, address=address), address, nbytes
            )

    def register_dmabuf(self, fd: int, offset: int, nbytes: int, access: int) -> PyverbsRegistration:
        """See `Device.register_dmabuf`.  pyverbs uses the offset as the address of the first byte."""
        with calling("ibv_reg_dmabuf_mr"):
            mr = part("mr").DmaBufMR(self._pd, nbytes, access, dmabuf=fd, offset=offset)
        return PyverbsRegistration(mr, offset, nbytes)

    def window(self) -> PyverbsWindow:
        """See `Device.window`."""
        with calling("ibv_alloc_mw"):
            return PyverbsWindow(part("mr").MW(self._pd, 2))

    def completions(self, depth: int) -> PyverbsCompletions:
        """See `Device.completions`."""
        return PyverbsCompletions(self._context, depth)

    def queue(self, completions: Completions, depth: int, sge: int, receives: int = 1) -> PyverbsQueue:
        """See `Device.queue`."""
        assert isinstance(completions, PyverbsCompletions)
        return PyverbsQueue(self._pd, completions, depth, sge, receives)

    def close(self) -> None:
        """See `Device.close`."""
        with calling("ibv_dealloc_pd"):
            self._pd.close()
        self._close_context()

    def _close_context(self) -> None:
        with descriptors, calling("ibv_close_device"):
            self._context.close()


def _read(path: File, default: str) -> str:
    try:
        return path.read_text("ascii").strip() or default
    except OSError:
        return default


def read_gids(folder: File) -> list[GidEntry]:
    """The GID table of a port from its folder in sysfs, without empty entries."""
    found = []
    with contextlib.suppress(OSError):
        for entry in (folder / "gids").iterdir():
            gid = bytes.fromhex(_read(entry, "").replace(":", "") or "00" * 16)
            if not any(gid[8:]) and not any(gid[:2]):
                continue
            # Types and interfaces of entries that are not in use cannot be read: EINVAL.
            kind = _read(folder / "gid_attrs" / "types" / entry.name, "")
            netdev = _read(folder / "gid_attrs" / "ndevs" / entry.name, "")
            found.append(GidEntry(int(entry.name), gid, kind, netdev))
    return sorted(found, key=lambda entry: entry.index)


def _populate(address: int, nbytes: int) -> None:
    """Makes the pages be there, while other threads go on; where the kernel cannot, registering will do it."""
    page = os.sysconf("SC_PAGESIZE")
    begin = address // page * page
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + nbytes - begin), _MADV_POPULATE_WRITE)
