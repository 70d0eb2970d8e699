"""The hooks that vLLM's workers call: each a few lines that hand over to `Engine`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from hawk.integrations.vllm import api
from hawk.integrations.vllm.hooks import HawkHandshake, HawkMetadata, HawkWorkerMetadata, hook
from hawk.integrations.vllm.registering import register
from hawk.integrations.vllm.shared import SharedAllocation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hawk.integrations.books import Orders
    from hawk.integrations.engine import Engine
    from hawk.integrations.remote import Grid, Model
    from hawk.integrations.settings import Settings


class WorkerHooks(api.KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is not there when types are checked
    """The workers' half of the connector; without an engine it is the scheduler's instance."""

    _settings: Settings
    _config: Any
    _model: Model
    _grid: Grid
    _engine: Engine | None
    _layers: dict[str, int]
    _tensors: Mapping[str, Any]
    _opened: list[str]
    _failed: dict[str, tuple[int, ...]]
    _over: Counter[tuple[str, int]]
    _broken: set[tuple[str, int]]
    _gone: bool
    _kv_cache_config: Any

    def get_mem_pool_context(self) -> Any:
        """An agent beside the engine reaches only memory that it can map."""
        return SharedAllocation() if self._settings.agent and not self._settings.cache else None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Finds out what the caches are and makes them known to the agent."""
        assert self._engine is not None
        part = self._grid.part(self._model, self._engine.number)
        names = register(self._engine, self._config, self._kv_cache_config, kv_caches, part)
        self._tensors = kv_caches
        self._layers = {name: number for number, name in enumerate(names)}

    @hook()
    def get_handshake_metadata(self) -> HawkHandshake | None:
        """Where this worker's agent is."""
        return None if self._engine is None else HawkHandshake(self._engine.worker)

    @hook()
    def handle_preemptions(self, kv_connector_metadata: HawkMetadata) -> None:
        """Offers of preempted requests end.  Their blocks stay out of use until they have (`lent`)."""
        orders = kv_connector_metadata.orders
        if self._engine is not None and orders.withdraw:
            self._engine.withdraw(orders.withdraw)

    def bind_connector_metadata(self, connector_metadata: HawkMetadata) -> None:
        """A step begins.  What it writes to the end is offered now, where its layers are to go as they come."""
        super().bind_connector_metadata(connector_metadata)
        self._opened = []
        if self._settings.layerwise:
            self._offer(connector_metadata.orders, 0)

    @hook()
    def _offer(self, orders: Orders, written: int) -> None:
        assert self._engine is not None
        for order in orders.offers:
            self._engine.offer(order, written=written)
            self._opened.append(order.key)

    @hook()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fetches begin; vLLM calls this behind the step's kernels."""
        engine, orders = self._engine, self._get_connector_metadata().orders
        assert engine is not None
        for order in orders.fetches:
            engine.fetch(order)
        for drop in orders.drops:
            engine.drop(drop)
        for forgone in orders.forgone:
            engine.forgo(forgone)
        engine.abandon(orders.abandon)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No request runs before all of it is there."""

    @hook()
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer of this step is written."""
        if self._opened and self._settings.layerwise and self._engine is not None:
            self._engine.written(self._opened, self._layers[layer_name] + 1)

    @hook()
    def wait_for_save(self) -> None:
        """All layers of this step are written, or will be when the current stream has come to here."""
        if self._engine is None or not self.has_connector_metadata():
            return
        if self._settings.layerwise:
            self._engine.written(self._opened, len(self._layers))
        else:
            self._offer(self._get_connector_metadata().orders, len(self._layers))

    @hook(api.KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """What has ended since the last step."""
        assert self._engine is not None
        found = self._engine.ended(finished_req_ids)
        self._failed.update(found.failed)
        self._over.update((offer.key, offer.attempt) for offer in found.offers)
        self._broken |= {(one.key, one.attempt) for one in found.offers if one.ending == "offer_failed"}
        return api.KVConnectorTransferResults(finished_sending=found.sent, finished_recving=found.arrived)

    @hook(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same in the older form."""
        found = self.get_transfer_results(finished_req_ids)
        return found.finished_sending or None, found.finished_recving or None

    @hook()
    def build_connector_worker_meta(self) -> HawkWorkerMetadata | None:
        """What the scheduler's instance has to know: whose blocks are free, and whether there is an agent."""
        assert self._engine is not None
        over, self._over = self._over, Counter()
        failed, self._broken = self._broken, set()
        gone = {}
        if self._engine.gone != self._gone:
            self._gone = self._engine.gone
            gone[self._engine.number] = self._gone
        return HawkWorkerMetadata(over, gone, failed) if over or gone else None

    @hook(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of requests that arrived with an error, in the same step as the request."""
        failed, self._failed = self._failed, {}
        return {block for blocks in failed.values() for block in blocks}
