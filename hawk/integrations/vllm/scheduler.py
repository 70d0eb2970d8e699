"""The hooks that vLLM's scheduler calls: each a few lines that hand over to `Books`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from hawk.integrations import remote
from hawk.integrations.books import Books
from hawk.integrations.vllm import api
from hawk.integrations.vllm.hooks import HawkHandshake, HawkMetadata, HawkWorkerMetadata, hook, log

if TYPE_CHECKING:
    from collections import Counter

    from hawk.integrations.vllm.lent import Lent


class SchedulerHooks(api.KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is not there when types are checked
    """The scheduler's half of the connector; without books it is a worker's instance, and does nothing."""

    _books: Books | None
    _lent: Lent
    _side: str
    _digests: dict[str, str]
    _counts: Counter[str]
    _kv_cache_config: Any

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
        why = "this engine decodes only" if self._side == "decode" else _unfit(request)
        if why:
            log.warning("not prefilled for others", request=request.request_id, reason=why)
            books.refused(params, why)
            return
        books.prefill(request.request_id, params, len(tokens), self._digest(request))

    @hook(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """What another engine has prefilled comes while others run."""
        params = self._wanted(request)
        if params is None:
            return 0, False
        assert self._books is not None
        if why := _unfit(request):
            log.warning("computed here", request=request.request_id, reason=why)
            self._books.counts["bad_params"] += 1
            self._give_back(request, params)
            return 0, False
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
            self._lent.taken_back(key)
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
        orders = books.take()
        for offer in orders.offers:
            self._lent.lend(offer.key, offer.attempt, offer.blocks)
        return HawkMetadata(orders)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Takes what counts who uses which block."""
        self._lent.bind(gpu_block_pool)

    @hook(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """Whether to wait a little, rather than take more blocks from other requests."""
        return self._lent.soon()

    @hook()
    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers have said in this step."""
        told, books = connector_output.kv_connector_worker_meta, self._books
        if books is None or not isinstance(told, HawkWorkerMetadata):
            return
        self._lent.over(told.over)
        for key, attempt in told.failed:
            books.failed(key, attempt)
        for number, gone in told.gone.items():
            (books.gone.add if gone else books.gone.discard)(number)

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
            self._give_back(request, params)
        self._digests.pop(key, None)
        well = request.status.name in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
        return books.finished(key, self._kv_cache_config.select_transfer_block_ids(block_ids), well=well)

    def _give_back(self, request: Any, params: dict[str, Any]) -> None:
        """Tells the other side that nobody will fetch the request."""
        assert self._books is not None
        # What vLLM refused or failed comes once more with a made-up prompt, for the other side to be told.
        digest = "" if getattr(request, "abort_immediately", False) else self._digest(request)
        self._books.unwanted(request.request_id, params, len(request.prompt_token_ids), digest)
        params["do_remote_prefill"] = False

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


def _unfit(request: Any) -> str:
    """Why a request is not handed over; empty where it is."""
    if not request.prompt_token_ids:
        return "it has no token ids"
    if getattr(request, "resumable", False):
        return "its input streams (resumable): what is prefilled is not the whole of it"
    return ""
