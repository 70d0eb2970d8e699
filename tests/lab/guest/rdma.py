"""Verbs by the distribution's pyverbs, as plainly as can be: what HAWK's own transport is compared with."""

from __future__ import annotations

import ctypes
import ipaddress
import mmap
import os
import sys
import time
from typing import Any

if "/usr/lib/python3/dist-packages" not in sys.path:  # last: what `.venv` has comes first
    sys.path.append("/usr/lib/python3/dist-packages")

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

__all__ = [
    "DEVICE",
    "SGE",
    "Buffer",
    "End",
    "SendWR",
    "address",
    "e",
    "gid_index",
    "guests",
    "node",
    "open_device",
]

DEVICE = "rxe0"
LIMIT = 60.0
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ


def node() -> int:
    """Which guest this is."""
    return int(os.environ["HAWK_LAB_NODE"])


def guests() -> int:
    """In how many guests these tests run."""
    return int(os.environ["HAWK_LAB_GUESTS"])


def address(of: int) -> str:
    """A guest's address."""
    return f"10.77.0.{of}"


def gid_index(context: Any) -> int:
    """The index of the GID that is this guest's IPv4 address; the first one is link-local."""
    wanted = ipaddress.ip_address(f"::ffff:{address(node())}")
    for index in range(16):
        try:
            found = ipaddress.ip_address(str(context.query_gid(1, index)))
        except Exception:  # noqa: BLE001  # the table's end; pyverbs' own error
            break
        if found == wanted:
            return index
    raise AssertionError(f"{DEVICE} has no GID for {wanted}")


class Buffer:
    """Registered memory; `data` is the bytes."""

    def __init__(self, pd: Any, nbytes: int) -> None:
        self.data = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))
        self.mr = MR(pd, nbytes, ACCESS, address=self.address)


class End:
    """One queue pair with a completion queue of its own."""

    def __init__(self, context: Any, pd: Any) -> None:
        self._index = gid_index(context)
        self._gid = context.query_gid(1, self._index)
        self.cq = CQ(context, 64)
        capacity = QPCap(max_send_wr=32, max_recv_wr=1, max_send_sge=4, max_recv_sge=1)
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = ACCESS
        self.qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=capacity), attributes)

    def about(self) -> dict[str, Any]:
        """What the other end has to know."""
        return {"number": self.qp.qp_num, "gid": str(self._gid)}

    def connect(self, other: dict[str, Any]) -> None:
        """Makes it ready to send to the other end."""
        route = GlobalRoute(dgid=GID(other["gid"]), sgid_index=self._index, hop_limit=64)
        attributes = QPAttr(port_num=1)
        attributes.ah_attr = AHAttr(port_num=1, is_global=1, gr=route, dlid=0)
        attributes.dest_qp_num = other["number"]
        attributes.path_mtu = e.IBV_MTU_1024
        attributes.qp_access_flags = ACCESS
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = 4
        attributes.min_rnr_timer, attributes.timeout = 12, 18
        attributes.retry_cnt = attributes.rnr_retry = 7
        self.qp.to_rts(attributes)

    def completion(self) -> Any:
        """The next completion."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            count, found = self.cq.poll(1)
            if count > 0:
                return found[0]
            time.sleep(0.001)  # leaves the emulated processor to those who move the bytes
        raise AssertionError("no completion came")


def open_device() -> tuple[Any, Any]:
    """The device and a protection domain."""
    context = Context(name=DEVICE)
    return context, PD(context)
