"""The connector itself: vLLM's hooks, each a few lines that hand over to `Books` or `Engine`.

The scheduler's process has an instance with books, each worker's process one with an engine.  An exception in a hook
would end vLLM, so none leaves one: it is logged and counted, and the request is computed where it is.  What cannot work
at all is refused when the instance is made, or when the caches are registered.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from hawk.integrations import stats
from hawk.integrations.books import Books
from hawk.integrations.engine import Engine
from hawk.integrations.settings import engine_name, for_one_of_several, read_settings
from hawk.integrations.vllm import api
from hawk.integrations.vllm.hooks import hook
from hawk.integrations.vllm.lent import Lent
from hawk.integrations.vllm.metrics import HawkMetrics, HawkStats
from hawk.integrations.vllm.scheduler import SchedulerHooks
from hawk.integrations.vllm.worker import WorkerHooks

if TYPE_CHECKING:
    from collections.abc import Mapping


class HawkConnector(SchedulerHooks, WorkerHooks, api.SupportsHMA):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Moves prefilled requests between vLLM engines through HAWK."""

    _cache_hit_source = api.CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        api.show_log()
        api.refuse(vllm_config, kv_cache_config)
        self._settings = read_settings(transfer.kv_connector_extra_config)
        self._grid = api.grid_of(vllm_config)
        if (index := api.one_of_several(vllm_config)) is not None:
            self._settings = for_one_of_several(self._settings, index, self._grid.size)
        self._engine_name = engine_name(self._settings, transfer.engine_id)
        self._side = api.ROLES[transfer.kv_role]
        self._config = vllm_config
        self._model = api.model_of(vllm_config, kv_cache_config)
        self._books: Books | None = None
        self._engine: Engine | None = None
        self._layers: dict[str, int] = {}
        self._tensors: Mapping[str, Any] = {}  # kept, since the agent knows their addresses
        self._opened: list[str] = []
        self._failed: dict[str, tuple[int, ...]] = {}
        self._over: Counter[tuple[str, int]] = Counter()
        self._broken: set[tuple[str, int]] = set()
        self._gone = False
        self._lent = Lent(self._grid.size)
        self._digests: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        if role == api.KVConnectorRole.SCHEDULER:
            self._books = Books(self._engine_name, self._model, self._grid, alone=index is None)
        else:
            self._engine = Engine(
                self._settings,
                name=self._engine_name,
                role=self._side,
                number=api.number_of(vllm_config),
                size=self._grid.size,
            )
            self._engine.start()

    def fault(self) -> None:
        """Counts an error inside a hook."""
        self._counts["faults"] += 1

    # -- what vLLM asks of the class -----------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers can be told apart only where a graph does not hold them all."""
        return bool(extra_config.get("layerwise", False))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """None: any will do."""

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HawkStats:
        """From what came over the wire."""
        return HawkStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HawkMetrics:
        """One set for each API server."""
        return HawkMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """A fetch fills the request's own blocks, so vLLM need not zero them, and must not do so later."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    # -- both halves ---------------------------------------------------------------------------------------

    @hook()
    def get_kv_connector_stats(self) -> HawkStats | None:
        """What was counted since the last step."""
        data = stats.empty() if self._engine is None else self._engine.take_stats()
        counts, self._counts = self._counts, Counter()
        stats.count(data, counts)
        if self._books is not None:
            stats.count(data, self._books.counts)
            self._books.counts.clear()
        return None if stats.is_empty(data) else HawkStats(data)

    @hook()
    def shutdown(self) -> None:
        """Ends what is under way, and the agent."""
        if self._engine is not None:
            self._engine.close()
