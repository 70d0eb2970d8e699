"""NIXL's agent with its UCX back end, as an `Engine`.

The agent has no thread of its own (its progress thread would keep a core busy): looking at a transfer, or for
notices, is what lets UCX get on, so whoever waits has to look.  NIXL's Python package is used as it is published;
nothing here is a copy of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import logging
import os
import threading
import uuid
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hawk.errors import NotViable
from hawk.extras import install
from hawk.transports._engine._seam import Engine, EngineFailed
from hawk.transports.nixl import _vram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hawk.memory.region import I64
    from hawk.transports._engine._seam import Handle

EXTRA = install("nixl")

_BACK_END = "UCX"

_UCX = {"TCP_TX_SEG_SIZE": "64k"}
"""What it sends over TCP at a time.  Its 8 KB make a READ, whose answer is sent in such pieces, three times as slow;
more than the 64 KB that it receives at a time by default no peer could take."""


@functools.cache
def load() -> Any:
    """The `nixl` package, which then neither writes to standard output nor crashes when the process ends.

    Raises `NotViable` where it cannot be imported.
    """
    # NIXL's wheels bring a libnl of their own, and the distribution's verbs providers load the distribution's: two
    # libraries with the same names of functions, of which the second calls the first's when it is unloaded at the end
    # of the process, on data that the first one lays out otherwise.  Loaded here, before, it finds its own.
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnl-route-3.so.200", mode=os.RTLD_NOW | os.RTLD_NODELETE)
    # Both write to standard output unless told otherwise, UCX when its library is loaded.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    raises = logging.raiseExceptions
    try:
        package = importlib.import_module("nixl._api")
    except Exception as error:  # what its own libraries lack may be told in any way
        raise NotViable(
            "the Python package nixl cannot be loaded", got=f"{type(error).__name__}: {error}", hint=EXTRA
        ) from error
    finally:
        logging.raiseExceptions = raises  # it turns them off for the whole process
    own = logging.getLogger("nixl")
    own.handlers.clear()
    own.propagate = True
    own.setLevel(logging.ERROR)
    return package


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turns whatever NIXL raises into `EngineFailed`."""
    try:
        yield
    except EngineFailed:
        raise
    except Exception as error:  # its bindings raise classes of their own, which name what UCX said
        raise EngineFailed(f"{what}: {type(error).__name__} {error}") from error


def _defaults(chosen: Sequence[str]) -> list[str]:
    """Settings of UCX that are better others than its own, unless they were chosen here or in the environment."""
    named = {entry.partition("=")[0].upper() for entry in chosen}
    return [
        f"{name}={value}"
        for name, value in _UCX.items()
        if name not in named and f"UCX_{name}" not in os.environ
    ]


_LONGEST = 512 << 10
"""Bytes of the host's memory that UCX WRITEs at a time: over TCP several such rows are faster than one as long as they
are together."""

_environment = threading.Lock()
_ours: set[str] = set()
"""What `_chosen` has put there for now."""


def ways(tls: str) -> str:
    """UCX's ways where the settings have these: what its environment says, and that is not of our own, goes first."""
    said, before = os.environ.get("UCX_TLS"), None  # ours goes from there first, then from what we know of
    while said is not None and said not in _ours and said != before:
        said, before = os.environ.get("UCX_TLS"), said
    return tls if said is None or said in _ours else said


@contextlib.contextmanager
def _chosen(tls: str) -> Iterator[list[str]]:
    """What is to be said of UCX's ways to a back end that is made within the block.

    NIXL takes its settings as one list and parts it at commas: of several ways UCX would be told the first.  But UCX
    reads its environment when a back end is made, so that is where several of them are for as long as it takes,
    unless something is there already, which NIXL lets have its way anyhow.
    """
    with _environment:
        if "," not in tls or "UCX_TLS" in os.environ:
            yield [f"TLS={tls}"] if tls else []
            return
        wanted = _vram.tolerated(tls)
        _ours.add(wanted)
        os.environ["UCX_TLS"] = wanted
        try:
            yield []
        finally:
            del os.environ["UCX_TLS"]
            _ours.discard(wanted)


def _kind(gpu: int) -> str:
    """What NIXL calls the kind of memory; which GPU's it is, is a column of its descriptors."""
    return "DRAM" if gpu < 0 else "VRAM"


def _parted(local: I64, remote: I64, nbytes: I64) -> tuple[I64, I64, I64]:
    """The same bytes in rows that are not too long."""
    if int(nbytes.max()) <= _LONGEST:
        return local, remote, nbytes
    counts = -(-nbytes // _LONGEST)
    row = np.repeat(np.arange(len(nbytes)), counts)
    skipped = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * _LONGEST
    return local[row] + skipped, remote[row] + skipped, np.minimum(nbytes[row] - skipped, _LONGEST)


def _release(handle: Any) -> None:
    """Gives back what NIXL holds for a transfer whose peer is parted with."""
    with contextlib.suppress(Exception):
        handle.release()
    handle._released = True  # the rest goes with the agent, and without complaints on standard output


class NixlAgent(Engine):
    """One agent; `tls` and `ucx` as in `NixlConfig`.

    package     what stands for NIXL's; for tests
    gpus_why    what says of `tls` why memory of GPUs cannot be registered; for tests
    """

    pushes: ClassVar[bool] = True

    def __init__(
        self,
        tls: str = "",
        ucx: Sequence[str] = (),
        *,
        package: Any = None,
        gpus_why: Callable[[str], str] = _vram.why_not,
    ) -> None:
        package = package or load()
        # The name tells agents apart wherever they run: it is what NIXL calls a peer.
        self._name = f"hawk-{uuid.uuid4().hex}"
        with _told("no agent"), _chosen(tls) as ways:
            settings = [*ways, *_defaults(ucx), *ucx]
            chosen = {"engine_config": ",".join(settings)} if settings else {}
            config = package.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent: Any = package.nixl_agent(self._name, config)
            self._agent.create_backend(_BACK_END, chosen)
        if _BACK_END not in self._agent.backends:
            raise EngineFailed(f"NIXL has no back end {_BACK_END}")
        self._gpus_why = gpus_why(tls)
        self._gpu = -1
        """One of those whose memory is registered: UCX copies by its context whenever it gets on."""
        self._registered: dict[tuple[int, int], Any] = {}
        self._peers: set[str] = set()
        self._under_way: dict[Any, str] = {}  # and whom it is with
        self._failed: dict[Any, str] = {}

    @property
    def gpus(self) -> str:
        """See `Engine.gpus`."""
        return self._gpus_why

    @property
    def description(self) -> bytes:
        """See `Engine.description`: NIXL's metadata, with the keys to everything registered."""
        with _told("no metadata"):
            return bytes(self._agent.get_agent_metadata())

    def register(self, address: int, nbytes: int, gpu: int = -1) -> None:
        """See `Engine.register`."""
        if (address, nbytes) in self._registered:
            return
        if gpu >= 0 and self._gpus_why:
            raise EngineFailed(f"memory of cuda:{gpu} cannot be registered: {self._gpus_why}")
        with _told("the memory cannot be registered"), _vram.current(gpu):
            self._registered[address, nbytes] = self._agent.register_memory(
                [(address, nbytes, max(gpu, 0), "")], _kind(gpu), backends=[_BACK_END]
            )
        self._gpu = gpu if self._gpu < 0 else self._gpu

    def forget(self, address: int, nbytes: int) -> None:
        """See `Engine.forget`."""
        descriptors = self._registered.pop((address, nbytes), None)
        if descriptors is not None:
            with _told("a registration does not end"):
                self._agent.deregister_memory(descriptors, backends=[_BACK_END])

    def meet(self, description: bytes) -> object:
        """See `Engine.meet`; the peer is NIXL's name of it."""
        with _told("the peer's metadata cannot be used"):
            name = self._agent.add_remote_agent(description)
            peer = name.decode() if isinstance(name, bytes) else str(name)
            self._peers.add(peer)
            return peer

    def part(self, peer: object) -> None:
        """See `Engine.part`."""
        if peer in self._peers:
            self._peers.discard(str(peer))
            try:
                with _told("the peer cannot be left"):
                    self._agent.remove_remote_agent(peer)
            finally:
                self._let_go([handle for handle, other in self._failed.items() if other == peer])

    def _fail(self, handle: Any) -> None:
        """A transfer has failed: NIXL's part of it goes when nothing moves between us and its peer any more."""
        peer = self._under_way.pop(handle)
        self._failed[handle] = peer
        if peer not in self._peers:
            self._let_go([handle])

    def _let_go(self, handles: list[Any]) -> None:
        for handle in handles:
            del self._failed[handle]
            _release(handle)

    def post(
        self,
        peer: object,
        write: bool,
        local: I64,
        remote: I64,
        nbytes: I64,
        notice: bytes = b"",
        *,
        here: int = -1,
        there: int = -1,
    ) -> Handle:
        """See `Engine.post`."""
        if write and here < 0 and there < 0:
            local, remote, nbytes = _parted(local, remote, nbytes)
        ours, theirs = (np.zeros((len(nbytes), 3), np.uint64) for _ in range(2))
        ours[:, 0], theirs[:, 0] = local, remote
        ours[:, 1] = theirs[:, 1] = nbytes
        ours[:, 2], theirs[:, 2] = max(here, 0), max(there, 0)
        with _told("a transfer cannot begin"), _vram.current(self._gpu if here < 0 else here):
            handle = self._agent.initialize_xfer(
                "WRITE" if write else "READ",
                self._agent.get_xfer_descs(ours, _kind(here)),
                self._agent.get_xfer_descs(theirs, _kind(there)),
                str(peer),
                notice,
                backends=[_BACK_END],
            )
            self._under_way[handle] = str(peer)
            begun = False
            try:
                begun = self._agent.transfer(handle) != "ERR"
            finally:
                if not begun:
                    self._fail(handle)
            if not begun:
                raise EngineFailed("a transfer was refused")
            return handle

    def poll(self, handle: Any) -> bool:
        """See `Engine.poll`."""
        with _told("a transfer failed"), _vram.current(self._gpu):
            state = ""
            try:
                state = self._agent.check_xfer_state(handle)
            finally:
                if state not in ("PROC", "DONE"):
                    self._fail(handle)
            if state == "PROC":
                return False
            if state != "DONE":
                raise EngineFailed(f"a transfer failed: {state}")
            del self._under_way[handle]
            handle.release()
            return True

    def notices(self) -> list[bytes]:
        """See `Engine.notices`."""
        with _told("the agent cannot get on"), _vram.current(self._gpu):
            return [notice for told in self._agent.get_new_notifs([_BACK_END]).values() for notice in told]

    def close(self) -> None:
        """See `Engine.close`: connections first, which ends what is under way, then the agent."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for peer in self._peers:
            with contextlib.suppress(Exception):
                agent.remove_remote_agent(peer)
        for handle in (*self._under_way, *self._failed):
            _release(handle)
        for descriptors in self._registered.values():
            with contextlib.suppress(Exception):
                agent.deregister_memory(descriptors, backends=[_BACK_END])
        self._under_way.clear()
        self._failed.clear()
        self._registered.clear()
        self._peers.clear()
