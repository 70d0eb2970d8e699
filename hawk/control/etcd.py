"""A directory that agents register in: etcd tells each where the others are, and when one has come or gone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from typing import TYPE_CHECKING, NoReturn

import msgspec

from hawk.control.discovery import Registration
from hawk.control.dns import DnsPeers
from hawk.control.etcd_client import PAGE, Entry, Etcd, EtcdFault
from hawk.errors import InternalError, PeerUnreachable, counted
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

log = get_log("hawk.control.etcd")

MOST = 10_000
"""Agents that are kept in mind; those above it are left out, and said to be."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SOON, _LATE = 0.2, 5.0
"""Seconds between tries to reach etcd, at first and at most."""
_FAREWELL = 1.0
"""Seconds that taking its own record out may take: without, it goes with its lease."""

_decode = msgspec.json.Decoder(Registration).decode
_encode = msgspec.json.Encoder().encode


class EtcdPeers(DnsPeers):
    """Peers of the configuration first, then those that are registered, then those that DNS knows.

    etcd     the client, which `close` closes
    prefix   below which agents are registered, ends in a slash
    name, own   under which name to register what; `own` is asked whenever it is written
    lease    seconds after which an agent that is gone is forgotten
    on_change   called whenever what is `registered` has changed

    A record says where an agent is, never who it is: that is what keys are for.  While etcd is away what it last said
    stays true, and who asks for an agent that it never told of waits (`resolve`).
    """

    def __init__(
        self,
        peers: Mapping[str, str],
        pattern: str = "",
        *,
        etcd: Etcd,
        prefix: str,
        name: str,
        own: Callable[[], Registration],
        lease: float = 15.0,
        ttl: float = 30.0,
        timeout: float = 5.0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(peers, pattern, ttl=ttl, timeout=timeout)
        self._static = dict(peers)
        self._etcd = etcd
        self._under = f"{prefix}agents/"
        self._name = name
        self._own = own
        self._seconds = lease
        self._on_change = on_change
        self._records: dict[str, Registration] = {}
        self._unusable: set[str] = set()
        self._there: Entry | None = None  # under our own name
        self._lease, self._lasts = 0, lease
        self._rival = ""
        self._registered, self._taker = False, ""  # ever, and the run that has written over it since
        self._fault: str = "not reached yet"
        self._since = time.monotonic()
        self._current = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to register and to follow the directory; whether etcd answers shows in `state`."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Takes its own record out, as far as etcd answers, and closes the client."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        lease, self._lease = self._lease, 0
        try:
            if lease:
                with contextlib.suppress(EtcdFault, TimeoutError):
                    async with asyncio.timeout(_FAREWELL):
                        await self._etcd.revoke(lease)
        finally:
            await self._etcd.close()
            await super().close()

    # -- what the rest asks of it ------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """Whether what is known is what etcd says now."""
        return self._current.is_set()

    @property
    def state(self) -> str:
        """In a few words, for people."""
        known = counted(len(self._records) + (self._there is not None), "agent")
        if not self.up:
            away = f"etcd away for {time.monotonic() - self._since:.0f} s, knows {known} from before: {self._fault}"
            return away[:500]
        if self._rival:
            return f"etcd, {known}; this agent is not registered: {self._rival}"
        if self._unusable:
            return f"etcd, {known}; {counted(len(self._unusable), 'record')} cannot be used"
        return f"etcd, {known}"

    def registered(self) -> Mapping[str, Registration]:
        """What other agents have said of themselves, by name."""
        return self._records

    def replace(self, peers: Mapping[str, str]) -> None:
        """Another configured table from now on."""
        self._static = dict(peers)
        for name in {*self._peers, *self._static}:
            self._place(name)

    def configured(self) -> dict[str, str]:
        """Those of the configuration; the others are `registered`."""
        return dict(self._static)

    async def resolve(self, name: str, otherwise: str = "", *, wait: float = 0.0) -> str:
        """See `DnsPeers.resolve`.  While etcd is away, and nobody else knows the name, it is waited for (`wait`).

        Raises `PeerUnreachable` where that was not long enough.
        """
        if self.up or name in self._peers or otherwise or self._pattern:
            return await super().resolve(name, otherwise)
        log.info("waiting for the directory", peer=name, state=self.state)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self._current.wait()
        if name in self._peers or self._current.is_set():
            return await super().resolve(name, otherwise)
        raise PeerUnreachable(
            "the directory is away, and had not told of the peer before",
            field="discovery.etcd",
            got=self._fault,
            peer=name,
            hint="Transfers with peers that are known go on; for this one etcd has to answer, or [peers] to name it",
        )

    # -- following it ------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause = _SOON
        while True:
            began = time.monotonic()
            fault: Exception
            try:
                await self._follow()
            except EtcdFault as caught:
                fault = caught
            except Exception as caught:  # noqa: BLE001 - a bug must not end it in silence
                fault = InternalError("the directory failed", got=repr(caught))
            if self.up:
                log.warning("the directory is away; what it said stays in use", reason=str(fault))
                self._since = time.monotonic()
            elif self._fault != str(fault):
                log.warning("the directory cannot be reached", reason=str(fault))
            self._current.clear()
            self._fault = str(fault)
            if time.monotonic() - began > _LATE:
                pause = _SOON
            self._etcd.turn()
            # All agents lose it in the same moment; they are not to come back in one.
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, _LATE)

    async def _follow(self) -> NoReturn:
        """Registers, reads all, and follows what changes until there is a fault, which it raises."""
        if not self._lease or not await self._etcd.renew(self._lease):
            self._lease, self._lasts = await self._etcd.lease(self._seconds)
        entries, revision = await self._etcd.read(self._under)
        async with contextlib.aclosing(self._etcd.watch(self._under, revision + 1)) as changes:
            await anext(changes)  # it watches from here on
            self._unusable.clear()
            self._there = None
            there = {entry.key for entry in entries}
            missed = [self._under + name for name in self._records if self._under + name not in there]
            self._note([Entry(key, None, 0) for key in missed])
            for at in range(0, len(entries), PAGE):
                self._note(entries[at : at + PAGE])
                await asyncio.sleep(0)  # many are not to keep the loop from everything else
            await self._register()
            log.info("the directory is there", member=self._etcd.member, agents=len(self._records))
            self._current.set()
            holding = asyncio.get_running_loop().create_task(self._hold())
            listening = asyncio.get_running_loop().create_task(self._listen(changes))
            try:
                await asyncio.wait({holding, listening}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                holding.cancel()
                listening.cancel()
                ends = await asyncio.gather(holding, listening, return_exceptions=True)
            raise next(end for end in ends if isinstance(end, Exception))

    async def _hold(self) -> None:
        """Keeps the lease, and the record under it, until either is lost."""
        while True:
            await asyncio.sleep(self._lasts / 3)
            if not await self._etcd.renew(self._lease):
                raise EtcdFault(
                    "the lease has ended: the agent was not heard for too long", seconds=self._lasts
                )
            if self._rival or self._there is None:
                await self._register()

    async def _listen(self, changes: AsyncIterator[list[Entry]]) -> None:
        async for entries in changes:
            self._note(entries)

    async def _register(self) -> None:
        """Writes this agent's record, unless another agent's is there: that one is said to be, and asked for again."""
        own, there = self._own(), self._there
        key = self._under + self._name
        while True:
            found = None if there is None else _record(there)
            # One at this address is an earlier run of this agent, unless it came after this one.
            if (
                found is not None
                and own.generation != found.generation
                and (own.address != found.address or found.generation == self._taker)
            ):
                if not self._rival:
                    log.error(
                        "another agent is registered under this name", name=self._name, address=found.address
                    )
                self._rival = f"another agent is, under the name {self._name}, at {found.address}"
                return
            there = await self._etcd.put(key, _encode(own), self._lease, over=there)
            if there is None:
                break
            if there.value is None:
                there = None
        self._rival, self._registered = "", True

    def _note(self, entries: Sequence[Entry]) -> None:
        """Takes over what was read, or has changed."""
        for entry in entries:
            name = entry.key.removeprefix(self._under)
            record = _record(entry) if _NAME.fullmatch(name) else None
            self._unusable.discard(name[:64])
            if entry.value is not None and record is None:
                if len(self._unusable) < MOST:
                    self._unusable.add(name[:64])
                log.warning("a record cannot be used", name=name[:64], value=entry.value[:200])
            if name == self._name:
                self._there = None if entry.value is None else entry
                if record is not None and self._registered:
                    self._look_at_own(record)
                continue
            if record is not None and len(self._records) >= MOST and name not in self._records:
                log.warning("more agents are registered than are kept in mind", name=name, most=MOST)
                record = None
            if record is None:
                self._records.pop(name, None)
            else:
                self._records[name] = record
            self._place(name)
        self._on_change()

    def _look_at_own(self, record: Registration) -> None:
        """Somebody has written this agent's record: it may have been another agent, which takes it for its own."""
        if record.generation in (self._own().generation, self._taker):
            return
        self._taker = record.generation
        self._rival = f"another agent has taken its place, under the name {self._name}, at {record.address}"
        log.error(
            "another agent has taken this one's place in the directory",
            name=self._name,
            address=record.address,
            generation=record.generation,
            hint="Two agents run with one agent.name, and advertise one address: give each its own",
        )

    def _place(self, name: str) -> None:
        """Where a name is looked for: at the configured address, or else the registered one."""
        record = self._records.get(name)
        address = self._static.get(name) or (record.address if record is not None else "")
        if address == self._peers.get(name, ""):
            return
        self._known.pop(name, None)
        if address:
            self._peers[name] = address
        else:
            del self._peers[name]


def _record(entry: Entry) -> Registration | None:
    """What a record says; None for one that cannot be read."""
    try:
        return None if entry.value is None else _decode(entry.value)
    except msgspec.DecodeError:
        return None
