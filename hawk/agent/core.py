"""The agent: it makes the parts, connects them, and takes them down in the reverse order.  It decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from hawk._version import __version__
from hawk.agent.draining import Drainer
from hawk.agent.filling import described, filled, named
from hawk.agent.finding import directory
from hawk.agent.limits import Limits
from hawk.agent.observing import observe, watch_arena, watch_memory
from hawk.agent.service import Service
from hawk.control.beat import Beat
from hawk.control.doorkeeper import Doorkeeper
from hawk.control.frames import generation
from hawk.control.keys import load_pair, load_peers
from hawk.control.messages import Hello, Welcome
from hawk.control.sidecar import Sidecar, sidecar_path
from hawk.control.sockets import Sockets
from hawk.errors import InvalidArgument, NotViable
from hawk.jobs.caches import CacheBook
from hawk.jobs.fetch import FetchContext
from hawk.jobs.gpus import Gpus
from hawk.jobs.ledger import Ledger
from hawk.jobs.lifting import Landings
from hawk.jobs.links import Links
from hawk.jobs.offers import OfferBook
from hawk.jobs.peers import Peers
from hawk.jobs.planner import Planner
from hawk.jobs.quarantine import Quarantine
from hawk.jobs.retilers import OnProcessors, Retilers
from hawk.jobs.serve import ServeContext
from hawk.jobs.serving import Serving
from hawk.jobs.verify import Verifier
from hawk.memory import registry as kinds
from hawk.memory.arena import Arena
from hawk.observe.log import get as get_log
from hawk.observe.metrics import Metrics
from hawk.retile import native
from hawk.retile.cpu import Retiler
from hawk.transports import registry as transports
from hawk.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from hawk.config import Config
    from hawk.control.messages import LocalMessage
    from hawk.control.passage import Passage
    from hawk.memory.base import Memory
    from hawk.transports.base import Transport

log = get_log("hawk.agent")

SOFTWARE = f"hawk/{__version__}"


def _core(choice: str) -> AbstractContextManager[None]:
    """Makes the whole process use one retile core, where the config names it; HAWK_CORE holds otherwise."""
    if choice == "auto":
        return contextlib.nullcontext()
    if choice == "c":
        native.core()  # raises where it was not built
    return native.using("c" if choice == "c" else "numpy")


class Agent:
    """One node's agent.  `async with Agent(config) as agent:` runs it inside the current event loop.

    embedded    true where the agent lives in the process of its clients, which may then register memory by address
    memories    memories that are made already, besides those of the config: such as one with programs of a device,
                which no table can name.  They are the agent's from its start on, and closed with it

    Raises `InvalidArgument` where one of those is no memory, or has the name of another.
    """

    def __init__(self, config: Config, *, embedded: bool = True, memories: Sequence[Memory] = ()) -> None:
        self.config = config
        self.embedded = embedded
        self._given = named(memories, config.memory)
        self.pid = os.getpid()
        self.generation = generation()
        self.metrics = Metrics()
        self.caches = CacheBook()
        self.memories: dict[str, Memory] = {}
        self.transports: dict[str, Transport] = {}
        self.fetching = 0
        self.endings: Counter[str] = Counter()
        self.software = SOFTWARE
        self.began = time.monotonic()
        self.up = False
        self.ledger = Ledger()
        self.peers_met: set[str] = set()
        self.drainer = Drainer(self)
        self._stack = contextlib.AsyncExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Agent:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- making ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Makes every part; if one cannot be made, those before it are closed again and its error is raised."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> None:
        config, stack = self.config, self._stack
        self._loop = asyncio.get_running_loop()
        for memory in self._given.values():
            stack.callback(memory.close)
        stack.enter_context(_core(config.retile.core))
        native.core_name()  # a core that HAWK_CORE asks for in vain should end the start, not every job
        keys = load_pair(config.security.key_file) if config.security.key_file else None
        known = load_peers(config.security.peers_file) if config.security.peers_file else {}
        self.sockets = Sockets(keys=keys, insecure=config.agent.insecure)
        stack.callback(self.sockets.close)
        secure = keys is not None and config.agent.control.startswith("tcp://")
        if secure:
            self.sockets.authorise(known)
        # Devices, transports and sockets first: what is not there, or in use, should show before gigabytes are touched.
        for name, entry in config.memory.items():
            await asyncio.to_thread(kinds.require, entry.kind, name, entry.options)
        transports.require(config.transport.prefer)
        control = self.sockets.router(config.agent.control, field="agent.control")
        self.control_address = control.address
        self.service = Service(self)
        self._doorkeeper = Doorkeeper(self.service.server.endpoint.listener)
        stack.callback(self._doorkeeper.close)
        self.offers = OfferBook(config.jobs.max_offers, self.service.offer_ended)
        self._sidecar = Sidecar(
            sidecar_path(config.agent.local),
            on_session=self.service.opened,
            on_closed=self.service.closed,
            shut=lambda: self._doorkeeper.shut,
        )
        await observe(self, stack, self._doorkeeper.look)
        log.info(
            "agent starting: filling its memory, which may take a second for each GiB",
            name=config.agent.name,
            arena=format_size(config.arena_bytes),
            memories={name: described(entry) for name, entry in config.memory.items()}
            | {name: memory.kind for name, memory in self._given.items()},
        )
        self.arena: Arena = await filled(lambda: Arena(config.arena_bytes, scrub=config.integrity.scrub))
        stack.callback(self.arena.close)
        for name, entry in config.memory.items():
            self.memories[name] = memory = await filled(
                partial(kinds.create, entry.kind, name, entry.options)
            )
            stack.callback(memory.close)
        for name, memory in (self.memories | self._given).items():
            self.memories[name] = memory
            if memory.said:
                log.info("memory", name=name, way=memory.said)
            watch_memory(self, name, memory)
        watch_arena(self, self.arena)
        await self._start_transports()
        retiler = Retiler(config.retile.threads or len(os.sched_getaffinity(0)))
        stack.callback(retiler.close)
        self.gpus = Gpus(
            self.arena.region,
            config.jobs.chunk,
            scrub=config.integrity.scrub,
            on_lost=self.service.gpu_lost,
            pinned=config.arena.pinned,
        )
        stack.callback(self.gpus.close)
        self._planner = Planner()
        stack.callback(self._planner.close)
        self._quarantine = Quarantine(self.arena)
        stack.push_async_callback(self._quarantine.close)
        self._start_jobs(control, known, secure, retiler)
        self._sidecar.start()
        stack.callback(self._sidecar.close)
        self.service.start()
        stack.push_async_callback(self.service.close)
        await self.directory.start()
        self.up = True
        log.info(
            "agent up",
            name=config.agent.name,
            role=config.agent.role,
            control=self.control_address,
            local=config.agent.local,
            transports=list(self.transports),
            memories=list(self.memories),
        )

    async def _start_transports(self) -> None:
        why: dict[str, str] = {}
        for name in self.config.transport.prefer:
            made: Transport | None = None
            try:
                made = transports.make(name, self.config.transport.options.get(name))
                await made.start()
                self._stack.push_async_callback(made.close)
                made.serve(self.arena.region)
            except NotViable as error:
                why[name] = str(error)
                if made is not None:
                    await made.close()
                log.warning("transport not viable", transport=name, reason=str(error))
                continue
            if made.shadow is not None:
                self.arena.shadows.append(made.shadow)
            self.transports[name] = made
        if not self.transports:
            raise transports.none_of(why)

    def _start_jobs(self, control: object, known: dict[str, str], secure: bool, retiler: Retiler) -> None:
        config = self.config
        self.limits = limits = Limits.of(config, self.arena)
        # Silence shorter than a lease costs nobody a job; a broken connection is noticed at once all the same.
        beat = Beat(interval=min(1.0, config.jobs.lease / 4), timeout=config.jobs.lease)
        verifier = Verifier.of(config.integrity, retiler.threads)
        self._stack.callback(verifier.close)
        self.serving = Serving(
            control,  # type: ignore[arg-type]
            self.sockets.zap,
            ServeContext(
                room=limits.room,
                retilers=Retilers(OnProcessors(retiler, limits.retiling), self.gpus),
                planner=self._planner,
                transports=self.transports,
                offers=self.offers,
                caches=self.caches,
                quarantine=self._quarantine,
                metrics=self.metrics,
                lease=config.jobs.lease,
                chunk=config.jobs.chunk,
                verifier=verifier,
            ),
            self._welcome,
            beat=beat,
            generation=self.generation,
            admission=limits.serving,
            refuse=lambda: self.wrong_role("prefill"),
            ledger=self.ledger,
            on_ended=self.drainer.touch,
        )
        self.serving.start()
        self._stack.push_async_callback(self.serving.close)
        links = Links(self.transports)
        self._stack.push_async_callback(links.close)
        landings = Landings()
        self._stack.callback(landings.close)
        self.directory = directory(self)
        self._stack.push_async_callback(self.directory.close)
        self.peers = Peers(
            self.sockets,
            self.directory,
            known,
            self._hello,
            beat=beat,
            generation=self.generation,
            secure=self.sockets.keys is not None,
            on_end=links.drop,
        )
        self._stack.callback(self.peers.close)
        self.fetch_context = FetchContext(
            peers=self.peers,
            links=links,
            transports=self.transports,
            prefer=tuple(self.transports),
            on_failure=config.transport.on_failure,
            caches=self.caches,
            planner=self._planner,
            metrics=self.metrics,
            chunk=config.jobs.chunk,
            credit=config.jobs.in_flight_per_peer,
            staging=config.staging.size,
            mode=config.transport.mode,
            verifier=verifier,
            scrub=config.integrity.scrub,
            scrub_targets=config.integrity.scrub_targets,
            reads=limits.reads,
            landings=landings,
            pipeline=config.jobs.pipeline,
        )

    # -- what the parts ask of it ------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether it takes no new work."""
        return self.drainer.draining

    @property
    def advertised_address(self) -> str:
        """Where peers reach this agent, for tickets and the directory; empty where only their own config can know."""
        if self.config.agent.advertise:
            return self.config.agent.advertise
        everywhere = ("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:")
        return "" if self.control_address.startswith(everywhere) else self.control_address

    def _endpoints(self) -> dict[str, dict[str, str]]:
        return {name: transport.endpoint for name, transport in self.transports.items()}

    def _hello(self) -> Hello:
        agent = self.config.agent
        return Hello(agent.name, agent.role, SOFTWARE, self._endpoints(), self.draining)

    def _welcome(self) -> Welcome:
        agent = self.config.agent
        return Welcome(agent.name, agent.role, SOFTWARE, self._endpoints(), self.draining)

    def memory(self, name: str) -> Memory:
        """The memory of that name; raises `InvalidArgument` naming those there are."""
        try:
            return self.memories[name]
        except KeyError:
            known = ", ".join(self.memories) or "none: the config has no [memory.NAME]"
            raise InvalidArgument("no such memory", field="memory", got=name, expected=known) from None

    def wrong_role(self, needed: str) -> InvalidArgument | None:
        """What to answer where this agent does not take that side of transfers; None where it does."""
        role = self.config.agent.role
        if role in (needed, "both"):
            return None
        what = "sends no caches" if needed == "prefill" else "receives no caches"
        return InvalidArgument(
            f"the agent {self.config.agent.name} {what}",
            field="agent.role",
            got=role,
            expected=f"{needed} or both",
        )

    def passage(self, to_client: Callable[[LocalMessage], None]) -> Passage[LocalMessage] | None:
        """A client's way in without a socket; None unless it runs in this process and on this event loop."""
        here = self.up and os.getpid() == self.pid and asyncio.get_running_loop() is self._loop
        return self.service.passage(to_client) if here else None

    def fetch_done(self, ending: str) -> None:
        """A fetch has ended."""
        self.endings[ending] += 1
        self.drainer.touch()

    # -- ending ------------------------------------------------------------------------------------------

    async def drain(self, timeout: float) -> bool:
        """Takes no new jobs and waits until the running ones have ended; False if `timeout` seconds were not enough."""
        return await self.drainer.hurry(timeout)

    async def close(self) -> None:
        """Ends every job (those still running fail, named) and closes every part.  Safe to call twice."""
        self.drainer.close()
        await self._stack.aclose()
