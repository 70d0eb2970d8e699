"""The connector itself: vLLM's hooks, each a few lines that hand over to `Books` or `Engine`.

The scheduler's process has an instance with books, each worker's process one with an engine.  An exception in a hook
would end vLLM, so none leaves one: it is logged and counted, and the request is computed where it is.  What cannot work
at all is refused when the instance is made, or when the caches are registered.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hawk.integrations import remote, stats
from hawk.integrations.books import Books, Orders
from hawk.integrations.engine import Engine
from hawk.integrations.settings import engine_name, read_settings
from hawk.integrations.vllm import api
from hawk.integrations.vllm.metrics import HawkMetrics, HawkStats
from hawk.integrations.vllm.registering import register
from hawk.integrations.vllm.shared import SharedAllocation
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hawk.integrations.remote import Worker

log = get_log("hawk.integrations.vllm")

F = TypeVar("F", bound=Callable[..., Any])


def hook(otherwise: Callable[[], Any] = lambda: None) -> Callable[[F], F]:
    """A method that vLLM calls: an exception is logged and counted, and `otherwise()` returned in its place."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def safely(self: HawkConnector, *args: Any, **kwargs: Any) -> Any:
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
class HawkHandshake(api.KVConnectorHandshakeMetadata):  # type: ignore[misc]  # as above
    """Where a worker's agent is."""

    worker: Worker


class HawkConnector(api.KVConnectorBase_V1, api.SupportsHMA):  # type: ignore[misc]  # as above
    """Moves prefilled requests between vLLM engines through HAWK."""

    _cache_hit_source = api.CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        api.refuse(vllm_config, kv_cache_config)
        self._settings = read_settings(transfer.kv_connector_extra_config)
        self._engine_name = engine_name(self._settings, transfer.engine_id)
        self._side = api.ROLES[transfer.kv_role]
        self._config = vllm_config
        self._model = api.model_of(vllm_config, kv_cache_config)
        self._grid = api.grid_of(vllm_config)
        self._books: Books | None = None
        self._engine: Engine | None = None
        self._layers: dict[str, int] = {}
        self._tensors: Mapping[str, Any] = {}  # kept, since the agent knows their addresses
        self._opened: list[str] = []
        self._failed: dict[str, tuple[int, ...]] = {}
        self._digests: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        if role == api.KVConnectorRole.SCHEDULER:
            self._books = Books(self._engine_name, self._model, self._grid)
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

    # -- the scheduler's side ------------------------------------------------------------------------------

    @hook()
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], HawkHandshake]) -> None:
        """Where all workers' agents are, in the order of the grid."""
        if self._books is None:
            return
        told = [metadata[place] for place in sorted(metadata)]
        if all(isinstance(one, HawkHandshake) for one in told):
            self._books.workers = [one.worker for one in told]
        else:  # a MultiConnector passes on what its first child says
            log.error("nothing can be handed over: HawkConnector has to be MultiConnector's first child")

    @hook()
    def on_new_request(self, request: Any) -> None:
        """Notes what is to be prefilled for others."""
        books, params = self._books, request.kv_transfer_params
        if books is None or not params or not params.get("do_remote_decode"):
            return
        tokens = request.prompt_token_ids
        if self._side == "decode" or not tokens:
            books.counts["bad_params"] += 1
            log.warning(
                "not prefilled for others", request=request.request_id, role=self._side, tokens=bool(tokens)
            )
            return
        books.prefill(request.request_id, params, len(tokens), self._digest(request))

    @hook(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """What another engine has prefilled comes while others run."""
        params = self._wanted(request)
        if params is None:
            return 0, False
        assert self._books is not None
        number = self._books.matched(
            request.request_id,
            params,
            len(request.prompt_token_ids),
            num_computed_tokens,
            self._digest(request),
        )
        return number, number > 0

    @hook()
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """There is room: the fetch begins with this step.  Once a request; what fails is computed here."""
        params = self._wanted(request)
        if params is None:
            return
        assert self._books is not None
        table = self._kv_cache_config.select_transfer_block_ids(blocks.get_block_ids())[0]
        self._books.allocated(
            request.request_id,
            params,
            table,
            len(request.prompt_token_ids),
            num_external_tokens,
            self._digest(request),
        )
        params["do_remote_prefill"] = False

    @hook(HawkMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> HawkMetadata:
        """The orders of this step."""
        books = self._books
        if books is None:
            return HawkMetadata()
        for key in scheduler_output.preempted_req_ids or ():
            books.preempted(key)
        computed = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            table = self._kv_cache_config.select_transfer_block_ids(new.block_ids)[0]
            end = new.num_computed_tokens + computed[new.req_id]
            books.scheduled(new.req_id, table, anew=True, end=end)
        cached = scheduler_output.scheduled_cached_reqs
        for i, key in enumerate(cached.req_ids):
            given = cached.new_block_ids[i]
            table = self._kv_cache_config.select_transfer_block_ids(given)[0] if given else []
            end = cached.num_computed_tokens[i] + computed[key]
            books.scheduled(key, table, anew=key in cached.resumed_req_ids, end=end)
        return HawkMetadata(books.take())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As below, of a single group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @hook(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """What was offered keeps its blocks until it was fetched; what was never fetched is given back."""
        books, key = self._books, request.request_id
        assert books is not None
        if (params := self._wanted(request)) is not None:
            # What vLLM refused or failed comes once more with a made-up prompt, for the other side to be told.
            digest = "" if getattr(request, "abort_immediately", False) else self._digest(request)
            books.unwanted(key, params, len(request.prompt_token_ids), digest)
            params["do_remote_prefill"] = False
        self._digests.pop(key, None)
        well = request.status.name in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
        return books.finished(key, self._kv_cache_config.select_transfer_block_ids(block_ids), well=well)

    def _wanted(self, request: Any) -> dict[str, Any] | None:
        """What the request says of a prefill elsewhere that is still to be fetched."""
        params = cast("dict[str, Any] | None", request.kv_transfer_params)
        if (
            self._books is None
            or not params
            or not params.get("do_remote_prefill")
            or self._side == "prefill"
        ):
            return None
        return params if request.prompt_token_ids else None

    def _digest(self, request: Any) -> str:
        found = self._digests.get(request.request_id)
        if found is None:
            beside = [str(feature.identifier) for feature in getattr(request, "mm_features", None) or ()]
            if adapter := getattr(request, "lora_request", None):
                beside.append(f"adapter {adapter.lora_name}")
            found = self._digests[request.request_id] = remote.digest(request.prompt_token_ids, beside)
        return found

    # -- the workers' side ---------------------------------------------------------------------------------

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
        """Blocks that are about to be overwritten are read no more when this returns."""
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
        return api.KVConnectorTransferResults(finished_sending=found.sent, finished_recving=found.arrived)

    @hook(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same in the older form."""
        found = self.get_transfer_results(finished_req_ids)
        return found.finished_sending or None, found.finished_recving or None

    @hook(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of requests that arrived with an error, in the same step as the request."""
        failed, self._failed = self._failed, {}
        return {block for blocks in failed.values() for block in blocks}

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
