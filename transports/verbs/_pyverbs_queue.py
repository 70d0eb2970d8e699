"""Completions and queue pairs by pyverbs, and how a batch gets past its request objects; see `_pyverbs`."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.transports.verbs import _abi, _device
from hawk.transports.verbs._device import Completion, Path, VerbsError
from hawk.transports.verbs._pyverbs_call import (
    PyverbsRegistration,
    PyverbsWindow,
    calling,
    descriptors,
    event_descriptors,
    part,
)

if TYPE_CHECKING:
    from hawk.transports.verbs._abi import Batch
    from hawk.transports.verbs._device import Registration, Window

_ERR = 6  # enum ibv_qp_state
_STATE_MASK = 1  # enum ibv_qp_attr_mask
_RC = 2  # enum ibv_qp_type
_RNR_TIMER = 12  # 0.64 ms; whoever has a credit finds a receive
_RNR_RETRIES = 6  # 7 would be without end


def gid_text(gid: bytes) -> str:
    """A GID as pyverbs takes it: eight groups of four digits."""
    return ":".join(gid[i : i + 2].hex() for i in range(0, 16, 2))


class PyverbsCompletions:
    """See `Completions`."""

    def __init__(self, context: Any, depth: int) -> None:
        module = part("cq")
        self._error = part("pyverbs_error").PyverbsError
        with descriptors, calling("ibv_create_comp_channel"):
            before = event_descriptors()
            self._channel = module.CompChannel(context)
            fresh = event_descriptors() - before
        try:
            if len(fresh) != 1:
                raise VerbsError(errno.EBADF, "finding the completion channel's descriptor")
            (self.fd,) = fresh
            os.set_blocking(self.fd, False)
            with calling("ibv_create_cq"):
                self.raw = module.CQ(context, depth, None, self._channel, 0)
        except BaseException:
            self._close_channel()
            raise

    def _close_channel(self) -> None:
        with descriptors, calling("ibv_destroy_comp_channel"):
            self._channel.close()

    def poll(self, most: int) -> list[Completion]:
        """See `Completions.poll`."""
        try:  # as `calling`, which costs more than polling does
            _, found = self.raw.poll(most)
        except self._error as error:
            raise VerbsError(errno.EIO, "ibv_poll_cq") from error
        return [
            Completion(
                int(wc.wr_id),
                int(wc.status),
                0 if wc.wr_id != _device.RECEIVED else int(wc.imm_data) & 0xFFFFFFFF,
            )
            for wc in found
        ]

    def arm(self) -> None:
        """See `Completions.arm`."""
        with calling("ibv_req_notify_cq"):
            self.raw.req_notify()

    def take_event(self) -> bool:
        """See `Completions.take_event`."""
        try:
            with calling("ibv_get_cq_event"):
                self._channel.get_cq_event(self.raw)
        except VerbsError:
            return False  # EAGAIN, which pyverbs does not always pass on
        self.raw.ack_events(1)
        return True

    def close(self) -> None:
        """See `Completions.close`."""
        with calling("ibv_destroy_cq"):
            self.raw.close()
        self._close_channel()


class PyverbsQueue:
    """See `Queue`."""

    def __init__(self, pd: Any, completions: PyverbsCompletions, depth: int, sge: int, receives: int) -> None:
        module = part("qp")
        cap = module.QPCap(max_send_wr=depth, max_recv_wr=receives, max_send_sge=sge, max_recv_sge=1)
        init = module.QPInitAttr(qp_type=_RC, scq=completions.raw, rcq=completions.raw, cap=cap, sq_sig_all=0)
        with calling("ibv_create_qp"):
            self._qp = module.QP(pd, init)
        self.number = int(self._qp.qp_num)

    def connect(self, path: Path) -> None:
        """See `Queue.connect`."""
        addresses = part("addr")
        attributes = part("qp").QPAttr(port_num=path.port)
        if path.link == _device.ETHERNET:
            route = addresses.GlobalRoute(
                dgid=addresses.GID(gid_text(path.peer_gid)),
                sgid_index=path.gid_index,
                hop_limit=64,
                traffic_class=path.traffic_class,
            )
            handle = addresses.AHAttr(port_num=path.port, is_global=1, gr=route, dlid=0)
        else:
            handle = addresses.AHAttr(
                port_num=path.port, is_global=0, dlid=path.peer_lid, sl=path.service_level
            )
        attributes.ah_attr = handle
        attributes.qp_access_flags = path.access
        attributes.dest_qp_num = path.peer_number
        attributes.rq_psn = path.peer_psn
        attributes.path_mtu = path.mtu
        attributes.min_rnr_timer = _RNR_TIMER
        attributes.max_dest_rd_atomic = path.reads_in
        attributes.sq_psn = path.psn
        attributes.timeout = path.timeout
        attributes.retry_cnt = path.retries
        attributes.rnr_retry = min(path.retries, _RNR_RETRIES)
        attributes.max_rd_atomic = path.reads_out
        with calling("ibv_modify_qp"):
            self._qp.to_rts(attributes)

    def post(self, batch: Batch) -> None:
        """See `Queue.post`."""
        with calling("ibv_post_send"):
            post(self._qp, batch)

    def receive(self, count: int) -> None:
        """See `Queue.receive`."""
        request = _receive()
        with calling("ibv_post_recv"):
            for _ in range(count):
                self._qp.post_recv(request)

    def bind(
        self, wr_id: int, window: Window, memory: Registration, address: int, nbytes: int, access: int
    ) -> int:
        """See `Queue.bind`."""
        assert isinstance(window, PyverbsWindow)
        assert isinstance(memory, PyverbsRegistration)
        request = _request(_abi.BIND_MW, wr_id)
        info = part("mr").MWBindInfo(memory.raw, address, nbytes, access)
        key = int(window.raw.rkey)
        key = (key & ~0xFF) | ((key + 1) & 0xFF)
        try:
            request.set_bind_wr(window.raw, info)
        except TypeError:  # older releases take the new key as well
            request.set_bind_wr(window.raw, info, key)
        with calling("ibv_post_send"):
            self._qp.post_send(request)
        request.close()
        return key

    def invalidate(self, wr_id: int, key: int) -> None:
        """See `Queue.invalidate`."""
        request = _request(_abi.LOCAL_INV, wr_id)
        request.imm_data = key  # one union with the key to invalidate
        with calling("ibv_post_send"):
            self._qp.post_send(request)
        request.close()

    def fail(self) -> None:
        """See `Queue.fail`."""
        attributes = part("qp").QPAttr()
        attributes.qp_state = _ERR
        with calling("ibv_modify_qp"):
            self._qp.modify(attributes, _STATE_MASK)

    def close(self) -> None:
        """See `Queue.close`."""
        with calling("ibv_destroy_qp"):
            self._qp.close()


@functools.cache
def _receive() -> Any:
    """A receive of nothing: pyverbs wants a piece of memory, of which no byte is used."""
    module = part("wr")
    return module.RecvWR(wr_id=_device.RECEIVED, num_sge=1, sg=[module.SGE(0, 0, 0)])


def _request(opcode: int, wr_id: int) -> Any:
    return part("wr").SendWR(wr_id=wr_id, num_sge=0, sg=[], opcode=opcode, send_flags=_abi.SIGNALED)


def post(qp: Any, batch: Batch) -> None:
    """Posts a batch on an object that has pyverbs' `post_send`.  Raises what that raises."""
    head = _head()
    if head is None:
        post_one_by_one(qp, batch)
    else:
        head.post(qp, batch)


def post_one_by_one(qp: Any, batch: Batch) -> None:
    """As pyverbs is meant to be used, but for giving the memory back, which its objects leave to us."""
    module = part("wr")
    made: list[Any] = []
    pieces: list[Any] = []
    at = 0
    for row in batch.wr:
        count = int(row["num_sge"])
        some = [
            module.SGE(int(p["addr"]), int(p["length"]), int(p["lkey"])) for p in batch.sge[at : at + count]
        ]
        at += count
        some = some or [module.SGE(0, 0, 0)]  # it wants one even for a request without bytes
        request = module.SendWR(
            wr_id=int(row["wr_id"]),
            num_sge=len(some),
            sg=some,
            opcode=int(row["opcode"]),
            send_flags=int(row["flags"]),
        )
        request.set_wr_rdma(int(row["rkey"]), int(row["remote_addr"]))
        if int(row["opcode"]) == _abi.WRITE_IMM:
            request.imm_data = int(row["extra"])
        if made:
            made[-1].next_wr = request
        made.append(request)
        pieces += some
    try:
        qp.post_send(made[0])
    finally:
        for each in (*made, *pieces):
            each.close()


class _Head:
    """The request object whose structure leads into a batch; `at` is that structure's address."""

    def __init__(self, request: Any, at: int) -> None:
        self._request = request
        self._at = at
        self._kept = ctypes.string_at(at, _abi.SEND_WR.itemsize)
        self._lock = threading.Lock()

    def post(self, qp: Any, batch: Batch) -> None:
        """Posts the batch; the object is as before afterwards, since it frees what it points to."""
        with self._lock:  # one object serves all loops of the process
            ctypes.memmove(self._at, int(batch.wr.ctypes.data), _abi.SEND_WR.itemsize)
            try:
                qp.post_send(self._request)
            finally:
                ctypes.memmove(self._at, self._kept, len(self._kept))


@functools.cache
def _head() -> _Head | None:
    """A request object that shows where its structure lies, or None where marks are not found as they should be."""
    module = part("wr")
    marks = {"wr_id": 0x5A17_C0DE_0BAD_F00D, "remote_addr": 0x7E57_ADD2_E550_0001, "rkey": 0x6B65_7921}
    request = module.SendWR(
        wr_id=marks["wr_id"], num_sge=1, sg=[module.SGE(0, 0, 0)], opcode=_abi.READ, send_flags=_abi.SIGNALED
    )
    request.set_wr_rdma(marks["rkey"], marks["remote_addr"])
    size = int(type(request).__basicsize__)
    memory = ctypes.string_at(id(request), size)
    begin = memory.find(marks["wr_id"].to_bytes(8, "little"))
    if begin < 0 or begin + _abi.SEND_WR.itemsize > size:
        return None
    found = np.frombuffer(memory, _abi.SEND_WR, 1, begin)[0]
    wanted = {**marks, "next": 0, "num_sge": 1, "opcode": _abi.READ, "flags": _abi.SIGNALED}
    if any(int(found[name]) != value for name, value in wanted.items()):
        return None
    return _Head(request, id(request) + begin)


def chained() -> bool:
    """Whether batches are handed over at once."""
    return _head() is not None
