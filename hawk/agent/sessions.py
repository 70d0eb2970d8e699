"""Local clients: one session each, alive as long as the descriptor socket of its process is open."""

from __future__ import annotations

import ctypes
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hawk.control.messages import Allocated, BufferRef, CacheDescr
from hawk.errors import InvalidArgument, LayoutError, OutOfMemory, RegistrationFailed
from hawk.jobs.caches import CacheEntry, compile_descr
from hawk.memory.cuda import DeviceRegion
from hawk.memory.received import map_received
from hawk.memory.region import Region
from hawk.plan.types import Placement
from hawk.units import approximate_size

if TYPE_CHECKING:
    import asyncio

    from hawk.agent.outbox import Outbox
    from hawk.control.descriptors import DescriptorLink
    from hawk.jobs.fetch import FetchJob
    from hawk.jobs.gpus import Gpus
    from hawk.jobs.offers import OfferEntry
    from hawk.layouts import CompiledLayout
    from hawk.memory import shared
    from hawk.memory.base import Allocation, Memory

FD_TIMEOUT = 10.0
"""Seconds within which descriptors that a message names must have come through the sidecar."""

HERE = bytes(16)
"""The tag that says: not a descriptor, but an address in this very process."""

WAYS = (
    "A separate agent reaches memory that was allocated with hawk.alloc or KVCache.alloc (a shared memfd); an agent "
    "embedded in the owner's process reaches any of its host memory"
)

GPU_WAYS = (
    "Kernels run in the process that owns the cache: embed the agent there (hawk.Agent), or keep the cache in "
    "shared memory (KVCache.alloc)"
)


@dataclass(eq=False)
class Session:
    """One attached client.

    identity      its control connection; empty until it has attached
    offers        its open offers
    fetches       its running fetches by job id, with their tasks
    quiet         it only looks on, and its coming and going is not worth a line
    """

    token: bytes
    connection: DescriptorLink
    identity: bytes = b""
    pid: int = 0
    offers: set[OfferEntry] = field(default_factory=set)
    fetches: dict[str, tuple[FetchJob, asyncio.Task[None]]] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    outbox: Outbox | None = None
    closed: bool = False
    quiet: bool = False


async def map_registered(
    session: Session, descr: CacheDescr, refs: list[BufferRef], here: bool, gpus: Gpus
) -> CacheEntry:
    """A cache in the client's memory, mapped into this process.

    Raises `RegistrationFailed` naming the buffer and the ways that would work, `LayoutError` or `InvalidArgument`
    for a description that cannot be right; whatever was mapped before the fault is unmapped again.
    """
    layout = compile_descr(descr)
    _check_refs(layout, refs)
    gpu = _gpu_of(refs, here)
    if gpu >= 0:
        await gpus.open(gpu)
    mapped: dict[bytes, shared.SharedBuffer] = {}
    try:
        for ref in refs:
            if ref.tag != HERE and ref.tag not in mapped:
                mapped[ref.tag] = await map_received(
                    session.connection, ref.tag, ref.total, name="client memory", timeout=FD_TIMEOUT
                )
        regions, index, offsets = _regions(refs, mapped, here)
    except BaseException:
        for buffer in mapped.values():
            buffer.close()
        raise

    def close() -> None:
        for buffer in mapped.values():
            buffer.close()
        mapped.clear()

    return CacheEntry(
        descr=descr,
        layout=layout,
        placement=Placement(
            region=np.asarray(index, dtype=np.int32).reshape(-1, 1),
            offset=np.asarray(offsets, dtype=np.int64).reshape(-1, 1),
        ),
        regions=regions,
        session=session.token,
        on_close=close,
    )


def _gpu_of(refs: list[BufferRef], here: bool) -> int:
    """The GPU that all buffers are on, -1 for memory of the host."""
    for i, ref in enumerate(refs):
        if ref.gpu != refs[0].gpu:
            raise RegistrationFailed(
                "the buffers of a cache are in one memory",
                field=f"buffers[{i}]",
                got=_where(ref),
                expected=f"{_where(refs[0])}, as the first",
            )
        if ref.gpu >= 0 and (not here or ref.tag != HERE):
            raise RegistrationFailed(
                "the memory is a GPU's and belongs to another process",
                field=f"buffers[{i}]",
                got=_where(ref),
                hint=GPU_WAYS,
            )
    return refs[0].gpu


def _where(ref: BufferRef) -> str:
    return "memory of the host" if ref.gpu < 0 else f"memory of cuda:{ref.gpu}"


def _check_refs(layout: CompiledLayout, refs: list[BufferRef]) -> None:
    if layout.channels != 1:
        raise RegistrationFailed(
            "a cache in a client's memory has one channel",
            field="cache.channels",
            got=layout.channels,
            hint="Use Client.allocate for a cache in the memory of a device",
        )
    sizes = layout.buffer_bytes
    if len(refs) != len(sizes):
        raise InvalidArgument(
            "one buffer for each base address of the layout",
            field="buffers",
            got=len(refs),
            expected=len(sizes),
        )
    for i, ref in enumerate(refs):
        if ref.nbytes < sizes[i]:
            raise RegistrationFailed(
                "the buffer is smaller than the cache needs",
                field=f"buffers[{i}]",
                got=f"{ref.nbytes} bytes",
                expected=f"{sizes[i]} bytes",
            )
        if ref.tag != HERE and ref.offset + ref.nbytes > ref.total:
            raise RegistrationFailed(
                "the buffer reaches past its shared memory",
                field=f"buffers[{i}]",
                got=f"bytes {ref.offset}..{ref.offset + ref.nbytes}",
                expected=f"within {ref.total} bytes",
            )


def _regions(
    refs: list[BufferRef], mapped: dict[bytes, shared.SharedBuffer], here: bool
) -> tuple[tuple[Region, ...], list[int], list[int]]:
    """One region per shared memory, or per buffer where the owner is this process; where each buffer is in them."""
    regions: list[Region] = []
    number: dict[bytes, int] = {}
    index, offsets = [], []
    for i, ref in enumerate(refs):
        if ref.tag != HERE:
            if ref.tag not in number:
                number[ref.tag] = len(regions)
                regions.append(mapped[ref.tag].region(f"client/{len(regions)}"))
            index.append(number[ref.tag])
            offsets.append(ref.offset)
            continue
        if not here:
            raise RegistrationFailed(
                "the memory belongs to another process",
                field=f"buffers[{i}]",
                got="a plain address",
                hint=WAYS,
            )
        if ref.gpu >= 0:
            regions.append(DeviceRegion(f"client/{i}", ref.offset, ref.nbytes, ref.gpu))
            index.append(len(regions) - 1)
            offsets.append(0)
            continue
        raw = (ctypes.c_uint8 * ref.nbytes).from_address(ref.offset)
        regions.append(Region(name=f"client/{i}", array=np.ctypeslib.as_array(raw)))
        index.append(len(regions) - 1)
        offsets.append(0)
    return tuple(regions), index, offsets


def allocate_cache(session: Session, descr: CacheDescr, memory: Memory) -> CacheEntry:
    """A cache in one of the agent's memories: each buffer at one offset in every channel, all or none.

    Raises `OutOfMemory` naming the channel, or `LayoutError`.
    """
    named = compile_descr(descr).banks  # a layout that names its banks has one channel for each of them
    bound = CacheDescr(
        **{
            **{name: getattr(descr, name) for name in descr.__struct_fields__},
            "channels": descr.channels or (0 if named else memory.channels),
            "align": descr.align or memory.alignment,
        }
    )
    try:
        layout = compile_descr(bound)
    except LayoutError as error:
        if not descr.channels and not named and (linear := compile_descr(descr)).channels == 1:
            raise LayoutError(
                f"the layout {linear.name} lies in one channel, and the memory has several",
                field="memory",
                got=f"{memory.name}, {memory.channels} channels",
                expected="a memory with channels = 1, or a layout that deals its pages",
            ) from error
        raise
    banks = layout.banks or tuple(range(layout.channels))
    if max(banks) >= memory.channels or (not layout.banks and layout.channels != memory.channels):
        raise InvalidArgument(
            "the layout deals pages to another number of channels than the memory has",
            field="cache.channels",
            got=f"banks {', '.join(map(str, banks))}" if layout.banks else layout.channels,
            expected=f"banks below {memory.channels}" if layout.banks else memory.channels,
            memory=memory.name,
        )
    if layout.page_stride % memory.alignment and layout.channels > 1:
        raise InvalidArgument(
            "the memory aligns pages to more bytes than the cache's description says",
            field="cache.align",
            got=bound.align,
            expected=f"a multiple of {memory.alignment}",
        )
    owner = f"cache/{secrets.token_hex(8)}"
    taken: list[Allocation] = []
    sizes = layout.buffer_bytes
    try:
        while len(taken) < len(sizes):
            taken.append(memory.allocate(sizes[len(taken)], owner, channels=layout.banks or None))
    except BaseException as error:
        for allocation in taken:
            memory.free(allocation)
        if isinstance(error, OutOfMemory) and error.hint is None:
            whole, each = approximate_size(sum(sizes)), approximate_size(memory.channel_bytes)
            error.hint = (
                f"The cache takes {whole} of each channel, which has {each}: see [memory.{memory.name}] "
            )
            error.hint += "capacity"
        raise

    def close() -> None:
        for allocation in taken:
            memory.free(allocation)

    channels = layout.channels
    return CacheEntry(
        descr=bound,
        layout=layout,
        placement=Placement(
            region=np.tile(np.asarray(banks, dtype=np.int32), (len(taken), 1)),
            offset=np.repeat(
                np.asarray([a.offset for a in taken], dtype=np.int64)[:, None], channels, axis=1
            ),
        ),
        regions=tuple(memory.regions),
        session=session.token,
        memory=memory,
        on_close=close,
    )


async def hand_over(session: Session, call: int, entry: CacheEntry) -> Allocated:
    """Sends the channels of an allocated cache to its client, and says where the buffers are in them."""
    tags = []
    # A client cannot map memory of a GPU, nor windows that a device's driver maps for the agent only.
    mappable = entry.gpu < 0 and all(region.fd >= 0 or region.dmabuf >= 0 for region in entry.regions)
    for region in entry.regions if mappable else ():
        tag = secrets.token_bytes(16)
        await session.connection.send_fd(tag, region.fd if region.fd >= 0 else region.dmabuf)
        tags.append(tag)
    return Allocated(
        id=call,
        cache=entry.id,
        descr=entry.descr,
        offsets=[int(row[0]) for row in entry.placement.offset],
        region_bytes=entry.regions[0].nbytes,
        tags=tags,
    )
