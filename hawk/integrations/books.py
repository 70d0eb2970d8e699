"""What the scheduler's half of a connector keeps: which requests are to be offered, which fetched, and when.

Free of any engine.  It is told what the engine's scheduler decides and answers with `Orders` for the workers, one
batch a step.  It knows no clock, no agent and no memory.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hawk.errors import HawkError
from hawk.integrations import remote
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hawk.integrations.remote import Grid, Model, Remote, Worker

log = get_log("hawk.integrations.books")


@dataclass(frozen=True, slots=True)
class OfferOrder:
    """Offer tokens `[0, tokens)` of a request, which this step writes to the end; `blocks` are the engine's own."""

    key: str
    transfer: str
    attempt: int
    blocks: tuple[int, ...]
    tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Bring tokens `[first, end)` of a request into `blocks` (entry i: tokens from i * block size).

    transfer    the transfer's name, where the fetch may be there before the prefill is over; else empty
    """

    key: str
    tickets: tuple[str, ...]
    blocks: tuple[int, ...]
    first: int
    end: int
    digest: str
    transfer: str = ""


@dataclass(frozen=True, slots=True)
class DropOrder:
    """Tell the prefill engine that nobody will fetch a request of so many tokens, so that its blocks are free."""

    key: str
    tickets: tuple[str, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class ForgoOrder:
    """Tell who waits for this attempt at a transfer that it is not coming."""

    transfer: str
    attempt: int
    why: str


@dataclass(slots=True)
class Orders:
    """What the workers are to do in one step.

    withdraw    requests whose blocks the engine takes back now, to compute them again
    abandon     requests that ended badly: nobody is to have them
    """

    offers: list[OfferOrder] = field(default_factory=list)
    fetches: list[FetchOrder] = field(default_factory=list)
    drops: list[DropOrder] = field(default_factory=list)
    forgone: list[ForgoOrder] = field(default_factory=list)
    withdraw: list[str] = field(default_factory=list)
    abandon: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(
            self.offers or self.fetches or self.drops or self.forgone or self.withdraw or self.abandon
        )


@dataclass(slots=True)
class _Prefill:
    """A request that this engine prefills for another.

    `attempt` counts offers made; `offered`: one stands; `broken`: a worker could not make it, so it is of no use.
    """

    transfer: str
    prompt: int
    digest: str
    blocks: list[int] = field(default_factory=list)
    attempt: int = -1
    offered: bool = False
    broken: bool = False


class Books:
    """The requests that are between engines.

    engine    this engine's name, which its agents' names begin with
    model, grid    what is shared out among its workers
    alone     whether whoever has this engine's address reaches this one, and not one of several behind it
    gone      numbers of workers that have no agent now: nothing is handed over
    """

    def __init__(self, engine: str, model: Model, grid: Grid, *, alone: bool = True) -> None:
        self.engine = engine
        self.alone = alone
        self.model = model
        self.grid = grid
        self.workers: list[Worker] = []
        self.gone: set[int] = set()
        self.counts: Counter[str] = Counter()
        self._prefills: dict[str, _Prefill] = {}
        self._remotes: dict[str, Remote | None] = {}
        self._orders = Orders()

    # -- the side that prefills --------------------------------------------------------------------------

    def prefill(self, key: str, params: Mapping[str, Any], prompt: int, digest: str) -> None:
        """A request is to be prefilled for another engine.  Said again, it changes nothing."""
        if key not in self._prefills:
            try:
                transfer = remote.text_of(params, "transfer_id")
            except HawkError as error:
                self.counts["bad_params"] += 1
                log.warning("the transfer has a name of ours", request=key, reason=str(error))
                transfer = ""
            self._prefills[key] = _Prefill(transfer or remote.new_transfer(), prompt, digest)

    def refused(self, params: Mapping[str, Any], why: str) -> None:
        """A request is not prefilled for another engine: who waits for it already is told."""
        self.counts["bad_params"] += 1
        with contextlib.suppress(HawkError):
            if transfer := remote.text_of(params, "transfer_id"):
                self._orders.forgone.append(ForgoOrder(transfer, 0, why))

    def scheduled(self, key: str, blocks: Iterable[int], *, anew: bool, end: int) -> None:
        """A step computes the request up to token `end`; `blocks` are new ones, or all of its blocks (`anew`)."""
        entry = self._prefills.get(key)
        if entry is None:
            return
        if anew:
            self._take_back(key, entry)
            entry.blocks.clear()
        entry.blocks.extend(blocks)
        if end >= entry.prompt and not entry.offered:
            entry.attempt += 1
            entry.offered, entry.broken = True, False
            self._orders.offers.append(
                OfferOrder(
                    key, entry.transfer, entry.attempt, tuple(entry.blocks), entry.prompt, entry.digest
                )
            )

    def failed(self, key: str, attempt: int) -> None:
        """A worker could not make that offer: what the others offer is of no use, and holds no blocks."""
        entry = self._prefills.get(key)
        if entry is None:
            self._orders.abandon.append(key)
        elif entry.attempt == attempt:
            entry.broken = True

    def preempted(self, key: str) -> None:
        """The engine takes the request's blocks back, and will compute it again."""
        entry = self._prefills.get(key)
        if entry is not None:
            self._take_back(key, entry)

    def _take_back(self, key: str, entry: _Prefill) -> None:
        if entry.offered:
            entry.offered = False
            self._orders.withdraw.append(key)

    # -- the side that decodes ---------------------------------------------------------------------------

    def matched(self, key: str, params: Mapping[str, Any], prompt: int, computed: int, digest: str) -> int:
        """How many tokens behind the first `computed` can be had from elsewhere; 0 where the request cannot be read."""
        found = self._remote(key, params, prompt, digest)
        return 0 if found is None or self.gone else max(self._end(found, prompt) - computed, 0)

    def allocated(
        self,
        key: str,
        params: Mapping[str, Any],
        blocks: Sequence[int],
        prompt: int,
        external: int,
        digest: str,
    ) -> None:
        """The engine has made room for `external` tokens from elsewhere; of 0 it has all that it needs."""
        found = self._remote(key, params, prompt, digest)
        if found is None:
            return
        end = self._end(found, prompt)
        if external > 0:
            self._orders.fetches.append(
                FetchOrder(
                    key,
                    found.tickets,
                    tuple(blocks),
                    end - external,
                    end,
                    found.digest or digest,
                    found.transfer if found.early else "",
                )
            )
        else:
            self._drop(key, found, prompt)

    def unwanted(self, key: str, params: Mapping[str, Any], prompt: int, digest: str) -> None:
        """The request ended before it was given room."""
        found = self._remote(key, params, prompt, digest)
        if found is not None:
            self._drop(key, found, prompt)

    def _drop(self, key: str, found: Remote, prompt: int) -> None:
        self._orders.drops.append(DropOrder(key, found.tickets, self._end(found, prompt)))

    def _remote(self, key: str, params: Mapping[str, Any], prompt: int, digest: str) -> Remote | None:
        """What the request says of its prefill; None, said once, where that cannot be, or is of another prompt."""
        if key in self._remotes:
            return self._remotes[key]
        found: Remote | None = None
        try:
            found = remote.read(params, model=self.model, tokens=prompt)
            if found.digest and digest and found.digest != digest:
                self.counts["other_prompt"] += 1
                log.warning("prefilled elsewhere from another prompt; computed here", request=key)
                found = None
        except HawkError as error:
            self.counts["bad_params"] += 1
            log.warning("kv_transfer_params cannot be used; computed here", request=key, reason=str(error))
        self._remotes[key] = found
        return found

    @staticmethod
    def _end(found: Remote, prompt: int) -> int:
        return prompt if found.tokens is None else min(found.tokens, prompt)

    # -- both --------------------------------------------------------------------------------------------

    def finished(
        self, key: str, blocks: Sequence[Sequence[int]], *, well: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: whether its blocks stay until the workers say so, and what to tell the other side.

        `well`: it ended as it should, and has something to hand over.
        """
        self._remotes.pop(key, None)
        entry = self._prefills.pop(key, None)
        if entry is None:
            return False, None
        if not well:
            return self._give_up(key, entry, "the request ended before its prefill did")
        if not entry.offered:
            return self._give_up(key, entry, "the request ended while its prefill was to begin again")
        if entry.broken:
            return self._give_up(key, entry, "a worker of the prefill engine could not offer it")
        if not self.workers or self.gone:
            return self._give_up(key, entry, "the prefill engine has no agent for it")
        try:
            return True, remote.write(
                entry.transfer,
                self.workers,
                engine=self.engine,
                model=self.model,
                grid=self.grid,
                attempt=entry.attempt,
                tokens=entry.prompt,
                digest=entry.digest,
                blocks=blocks,
                alone=self.alone,
            )
        except Exception:  # the workers have the offer: whatever this is, the blocks stay until they say so
            log.exception("nothing can be handed over", request=key)
            self.counts["faults"] += 1
            return self._give_up(key, entry, "the prefill engine could not say where it is")

    def _give_up(self, key: str, entry: _Prefill, why: str) -> tuple[bool, None]:
        """Nobody is to have it.  Who is told that an offer was taken back waits for the next, which is not coming."""
        self._orders.forgone.append(ForgoOrder(entry.transfer, entry.attempt + 1, why))
        if entry.offered:
            self._orders.abandon.append(key)
        return entry.offered, None

    def take(self) -> Orders:
        """The orders of the step that is being made up."""
        taken, self._orders = self._orders, Orders()
        return taken
