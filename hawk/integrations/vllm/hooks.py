"""What the two halves of the connector share: hooks that cost vLLM nothing when they fail, and what goes between."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hawk.integrations.books import Orders
from hawk.integrations.vllm import api
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from hawk.integrations.remote import Worker

log = get_log("hawk.integrations.vllm")

F = TypeVar("F", bound=Callable[..., Any])


def hook(otherwise: Callable[[], Any] = lambda: None) -> Callable[[F], F]:
    """A method that vLLM calls: an exception is logged and counted, and `otherwise()` returned in its place."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def safely(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:  # whatever it is, the engine has to live
                log.exception("error in a hook of the connector", hook=method.__name__)
                self.fault()
                return otherwise()

        return cast("F", safely)

    return wrap


@dataclass
class HawkMetadata(api.KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there when types are checked
    """What the scheduler's instance says to the workers' each step."""

    orders: Orders = field(default_factory=Orders)


@dataclass
class HawkWorkerMetadata(api.KVConnectorWorkerMetadata):  # type: ignore[misc]  # as above
    """What the workers' instances say to the scheduler's, when there is something to say.

    over    offers, by request and attempt, whose blocks are read no more, and how many workers say so
    failed  those of them that a worker could not make
    gone    of workers whose agent has gone or come back: whether it is gone
    """

    over: Counter[tuple[str, int]] = field(default_factory=Counter)
    gone: dict[int, bool] = field(default_factory=dict)
    failed: set[tuple[str, int]] = field(default_factory=set)

    def aggregate(self, other: HawkWorkerMetadata) -> HawkWorkerMetadata:
        """What several workers say in one step, or one in several."""
        return HawkWorkerMetadata(self.over + other.over, self.gone | other.gone, self.failed | other.failed)


@dataclass
class HawkHandshake(api.KVConnectorHandshakeMetadata):  # type: ignore[misc]  # as above
    """Where a worker's agent is."""

    worker: Worker
