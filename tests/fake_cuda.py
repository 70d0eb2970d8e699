"""A CUDA driver made of this process' memory, for machines without a GPU.

Addresses are addresses of this process, so kernels that run on a processor reach them.  What is put onto a stream is
done when somebody waits for an event, and not before: whoever forgets to wait reads what was there before.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hawk.memory.cuda_batch import one_by_one
from hawk.memory.cuda_driver import Attribute, CudaFault, Pointer
from tests.fake_cuda_parts import Block, Event, FakeArray, FakeRows, Sharing

NAMES = {1: "CUDA_ERROR_INVALID_VALUE", 2: "CUDA_ERROR_OUT_OF_MEMORY", 700: "CUDA_ERROR_ILLEGAL_ADDRESS"}
PATIENCE = 20.0
"""Seconds after which a wait for an event that nobody reaches is a fault of the test."""


@dataclass
class FakeCuda(Sharing):
    """`apart`: pairs of devices that do not reach each other.
    `fail[(call, n)]` is what the n-th call of that name returns; `lost` answers every call with that number."""

    devices: int = 1
    apart: set[tuple[int, int]] = field(default_factory=set)
    attributes: dict[int, int] = field(
        default_factory=lambda: {
            Attribute.DMABUF: 1,
            Attribute.WRITES_ORDERING: 100,
            Attribute.FLUSH_OPTIONS: 1,
        }
    )
    fail: dict[tuple[str, int], int] = field(default_factory=dict)
    lost: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    blocks: dict[int, Block] = field(default_factory=dict)
    pinned: dict[int, int] = field(default_factory=dict)
    locked: dict[int, np.ndarray] = field(default_factory=dict)
    streams: dict[int, deque] = field(default_factory=dict)
    priorities: dict[int, int] = field(default_factory=dict)
    events: dict[int, Event] = field(default_factory=dict)
    opened: dict[int, int] = field(default_factory=dict)
    handles: dict[int, np.ndarray] = field(default_factory=dict)
    exported: dict[int, np.ndarray] = field(default_factory=dict)
    reserved: dict[int, int] = field(default_factory=dict)
    functions: dict[int, FakeRows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Condition(threading.RLock())
        self._next = 0x1000
        self._here = threading.local()
        self.streams[0] = deque()

    # -- what tests do

    def tensor(self, array: np.ndarray, device: int = 0, kind: str = "plain") -> FakeArray:
        """Memory of the device that holds these bytes."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        block = self._block(len(flat), device, kind)
        block.array[:] = flat
        return FakeArray(self, block.first, array.dtype, array.shape)

    def at(self, address: int, nbytes: int) -> np.ndarray:
        """The bytes of the device there."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def put(self, stream: int, work: Callable[[], None]) -> None:
        """Puts a kernel onto a stream."""
        self._call("launch")
        self._put(stream, work)

    def make_stream(self) -> int:
        """A stream of the engine's."""
        number = self._number()
        self.streams[number] = deque()
        return number

    def put_plain(self, stream: int, work: Callable[[], None]) -> None:
        """What the engine does."""
        self._put(stream, work)

    def end_stream(self, stream: int) -> None:
        """The engine's stream again."""
        self.advance()
        assert not self.streams.pop(stream)

    def make_event(self, stream: int) -> int:
        """An event of the engine's, recorded on a stream of its."""
        number = self._number()
        event = self.events[number] = Event(wanted=1)
        self._put(stream, ("record", event))
        return number

    def drop(self, event: int) -> None:
        """The engine's event again."""
        del self.events[event]

    def forget_lost(self) -> None:
        """What a process whose GPU is lost never gave back: the driver has taken it."""
        self.blocks.clear()
        self.pinned.clear()
        self.locked.clear()
        self.events.clear()
        self.streams = {0: deque()}

    def left(self) -> dict[str, int]:
        """What was not given back."""
        plain = [b for b in self.blocks.values() if b.kind != "test"]
        found = {
            "blocks": len(plain),
            "pinned": len(self.pinned),
            "locked": len(self.locked),
            "streams": len(self.streams) - 1,
            "events": len(self.events),
            "opened": len(self.opened),
            "reserved": len(self.reserved),
            "handles": len(self.handles),
        }
        return {name: count for name, count in found.items() if count}

    def _block(self, nbytes: int, device: int, kind: str) -> Block:
        room = np.full(nbytes + 512, 0xEE, np.uint8)
        first = -room.ctypes.data % 256
        block = Block(room[first : first + nbytes], device, room.ctypes.data + first, nbytes, kind)
        self.blocks[block.first] = block
        return block

    def _call(self, name: str, *, context: bool = True) -> None:
        with self._lock:
            n = self.counts[name] = self.counts.get(name, 0) + 1
        code = self.fail.get((name, n), 0)
        if code in (700,):
            self.lost = code
        code = code or self.lost
        if code:
            raise CudaFault(name, code, NAMES.get(code, "CUDA_ERROR"))
        if context:
            assert getattr(self._here, "stack", None), f"{name} without a context"

    def _number(self) -> int:
        with self._lock:
            self._next += 16
            return self._next

    def _find(self, address: int) -> Block:
        for block in self.blocks.values():
            if block.first <= address < block.first + block.nbytes:
                return block
        raise CudaFault("find", 1, NAMES[1])

    # -- streams, as a driver does them

    def _put(self, stream: int, work: object) -> None:
        with self._lock:
            self.streams[stream].append(work)
            self._lock.notify_all()

    def _advance(self) -> bool:
        """Does what can be done now on any stream; whether there was something."""
        moved = False
        for queue in list(self.streams.values()):
            while queue:
                work = queue[0]
                if isinstance(work, tuple) and work[0] == "wait":
                    event, count = work[1], work[2]
                    if event.done < count:
                        break
                elif isinstance(work, tuple):
                    work[1].done += 1
                else:
                    work()
                queue.popleft()
                moved = True
        return moved

    def _until(self, enough: Callable[[], bool]) -> None:
        """The device is as slow as it may be: it does nothing that is not waited for."""
        while not enough():
            if not self._advance():
                assert self._lock.wait(PATIENCE), "nobody reaches this event"
        self._lock.notify_all()

    def advance(self) -> None:
        """The device works until it has to wait for something."""
        with self._lock:
            while self._advance():
                continue
            self._lock.notify_all()

    # -- the protocol

    def device_count(self) -> int:
        self._call("device_count", context=False)
        return self.devices

    def device_name(self, device: int) -> str:
        return f"fake {device}"

    def identity(self, device: int) -> str:
        return f"{device + 0xFA4E:032x}"

    def reaches(self, device: int, peer: int) -> bool:
        return (device, peer) not in self.apart

    def attribute(self, device: int, which: int) -> int:
        self._call("attribute")
        return self.attributes.get(which, 0)

    def pointer(self, address: int) -> Pointer:
        self._call("pointer", context=False)
        try:
            block = self._find(address)
        except CudaFault:
            return Pointer(-1)
        kind = block.kind
        return Pointer(
            block.device, managed=kind == "managed", legacy=kind in ("plain", "test"), by_fd=kind == "mapped"
        )

    def enter(self, device: int) -> None:
        self._call("enter", context=False)
        self._here.stack = [*getattr(self._here, "stack", []), device]

    def leave(self) -> None:
        self._here.stack.pop()

    def allocate(self, nbytes: int) -> int:
        self._call("allocate")
        return self._block(nbytes, self._here.stack[-1], "plain").first

    def free(self, address: int) -> None:
        self._call("free")
        del self.blocks[address]

    def extent(self, address: int) -> tuple[int, int]:
        self._call("extent")
        block = self._find(address)
        return block.first, block.nbytes

    def pin(self, address: int, nbytes: int) -> None:
        self._call("pin")
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        self._call("unpin")
        del self.pinned[address]

    def allocate_host(self, nbytes: int) -> int:
        self._call("allocate_host")
        room = np.zeros(nbytes, np.uint8)
        self.locked[room.ctypes.data] = room
        return room.ctypes.data

    def free_host(self, address: int) -> None:
        self._call("free_host")
        del self.locked[address]

    def stream(self, *, low: bool, high: bool = False) -> int:
        self._call("stream")
        number = self._number()
        self.streams[number], self.priorities[number] = deque(), -1 if low else int(high)
        return number

    def drop_stream(self, stream: int) -> None:
        self._call("drop_stream")
        with self._lock:
            self.advance()
            assert not self.streams.pop(stream), "work was left on a stream"

    def event(self) -> int:
        self._call("event")
        number = self._number()
        self.events[number] = Event()
        return number

    def timer(self) -> int:
        return self.event()

    def elapsed(self, begin: int, end: int) -> float:
        self._call("elapsed")
        assert min(self.events[end].done, self.events[begin].done) > 0, "not reached"
        return 1e-3

    def drop_event(self, event: int) -> None:
        self._call("drop_event")
        del self.events[event]

    def record(self, event: int, stream: int) -> None:
        self._call("record")
        with self._lock:
            self.events[event].wanted += 1
            self._put(stream, ("record", self.events[event]))

    def wait(self, stream: int, event: int) -> None:
        self._call("wait")
        found = self.events[event]
        self._put(stream, ("wait", found, found.wanted))

    def reached(self, event: int) -> bool:
        self._call("reached")
        self.advance()
        return self.events[event].done >= self.events[event].wanted

    def synchronise(self, event: int) -> None:
        self._call("synchronise")
        found = self.events[event]
        with self._lock:
            wanted = found.wanted
            self._until(lambda: found.done >= wanted)
        self._call("synchronised")

    def outwait(self, event: int) -> None:
        self._call("outwait")
        self.synchronise(event)

    def run(self, calls: list) -> None:
        one_by_one(self, calls)

    def launch(
        self, function: int, blocks: int, threads: int, arguments: bytes, stream: int, shared: int = 0
    ) -> None:
        self._call("launch")
        found = self.functions[function]
        found.launched += 1
        self._put(stream, lambda: found.run(blocks, arguments))

    def _copy(self, what: str, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call(what)
        self._put(stream, lambda: ctypes.memmove(target, source, nbytes))

    def to_host(self, host: int, address: int, nbytes: int, stream: int) -> None:
        self._find(address + nbytes - 1)
        self._copy("to_host", host, address, nbytes, stream)

    def to_device(self, address: int, host: int, nbytes: int, stream: int) -> None:
        self._copy("to_device", address, host, nbytes, stream)

    def across(self, target: int, source: int, nbytes: int, stream: int) -> None:
        for block in self.blocks.values():
            if block.fd >= 0 and any(0 <= at - block.first < block.nbytes for at in (target, source)):
                here = {block.device, *block.allowed}
                assert self._here.stack[-1] in here, "physical memory that is mapped for another device"
        self._copy("across", target, source, nbytes, stream)

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self._call("fill")
        self._put(stream, lambda: ctypes.memset(address, value, nbytes))
