"""One vLLM engine as a process of its own: a line of JSON in is a command, a line of JSON out is its answer.

    python engine.py SPEC.json

The specification says model, dtype, block size and connector.  The engine steps only when it is told to, so a test
says what happens when; what it answers are token ids and counts, never text.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    # What log probabilities are counted by would be compiled in the first step that has a token: half a minute, two of
    # a busy machine, in which an offer that stands already runs out.
    TORCHDYNAMO_DISABLE="1",
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


class Engine:
    """The commands."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM

        more = {"kv_transfer_config": spec["transfer"]} if spec.get("transfer") else {}
        if "blocks" in spec:
            more["num_gpu_blocks_override"] = spec["blocks"]
        if spec.get("tp", 1) > 1:
            more["tensor_parallel_size"] = spec["tp"]
        self.llm = LLM(
            model=spec["model"],
            dtype=spec["dtype"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=8,
            block_size=spec["block"],
            max_num_batched_tokens=spec.get("budget", 1024),
            enable_prefix_caching=spec.get("prefix", False),
            disable_log_stats=False,
            **more,
        )
        self.core = self.llm.llm_engine
        self.done: dict[str, Any] = {}

    def add(self, key: str, prompt: list[int], tokens: int, params: dict[str, Any] | None = None) -> None:
        """Puts a request in line."""
        from vllm import SamplingParams

        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra, logprobs=2
        )
        self.core.add_request(key, {"prompt_token_ids": prompt}, sampling)

    def step(self, most: int = 0) -> None:
        """One step, of so many tokens at most if it is said; what has ended is kept for `run`."""
        scheduler = self.core.engine_core.engine_core.scheduler
        usual = scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = most or usual
        outputs = self.core.step()
        scheduler.max_num_scheduled_tokens = usual
        for out in outputs:
            if out.finished:
                first = out.outputs[0]
                self.done[out.request_id] = {
                    "tokens": list(first.token_ids),
                    "reason": str(first.finish_reason),
                    "cached": out.num_cached_tokens,
                    "params": out.kv_transfer_params,
                    "margin": margin(first.logprobs or []),
                }

    def run(self, keys: list[str], seconds: float = 300.0) -> dict[str, Any]:
        """Steps until all these have ended."""
        until = time.monotonic() + seconds
        while not all(key in self.done for key in keys):
            if time.monotonic() > until:
                raise TimeoutError(f"{keys} have not ended; {sorted(self.done)} have")
            self.step()
        return {key: self.done.pop(key) for key in keys}

    def abort(self, key: str) -> None:
        """The client of a request has left."""
        self.core.abort_request([key])

    def idle(self, seconds: float = 90.0) -> dict[str, Any]:
        """Steps until nothing is held for anybody; how full the cache is then, and what was counted."""
        scheduler = self.core.engine_core.engine_core.scheduler
        until = time.monotonic() + seconds
        while scheduler.requests:
            if time.monotonic() > until:
                raise TimeoutError(f"still held: {list(scheduler.requests)}")
            self.core.step()
        return {"usage": scheduler.kv_cache_manager.usage}

    def forget(self) -> None:
        """Empties the prefix cache."""
        assert self.core.engine_core.engine_core.reset_prefix_cache()

    def counts(self) -> dict[str, float]:
        """HAWK's metrics, as Prometheus would get them."""
        from prometheus_client import REGISTRY

        samples = [sample for family in REGISTRY.collect() for sample in family.samples]
        return {sample.name: sample.value for sample in samples if sample.name.startswith("vllm:hawk")}

    def hold(self, layer: int) -> None:
        """The next step stands still for good when it comes to that layer; those before are told of as ever."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        save = connector.save_kv_layer

        def stop(name: str, *rest: Any) -> None:
            if connector._layers[name] == layer:
                while True:
                    time.sleep(60)
            save(name, *rest)

        connector.save_kv_layer = stop

    def npu(self, call: str, **arguments: Any) -> Any:
        """Something of the NPU that this engine's cache is in."""
        from tests.vllm.npu import device

        return getattr(device, call)(**arguments)

    def begun(self, key: str, seconds: float = 60.0) -> list[int]:
        """Steps until a request has its first token, and is not over; its blocks."""
        scheduler = self.core.engine_core.engine_core.scheduler
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.step()
            for name, request in scheduler.requests.items():
                if name.startswith(key) and request.num_output_tokens:
                    return list(scheduler.kv_cache_manager.get_block_ids(name)[0])
        raise TimeoutError(f"{key} has no token")

    def moved(self, least: int, seconds: float = 60.0) -> int:
        """Steps until the fetch under way has brought so many bytes; how many it has."""
        import asyncio

        from vllm.distributed.kv_transfer import get_kv_transfer_group

        engine = get_kv_transfer_group()._engine
        until = time.monotonic() + seconds
        while True:
            jobs = asyncio.run_coroutine_threadsafe(
                engine.client.jobs(ended=False), engine._line.loop
            ).result(seconds)
            nbytes = sum(job.nbytes for job in jobs)
            if nbytes >= least:
                return nbytes
            if time.monotonic() > until:
                raise TimeoutError(f"{nbytes} bytes came")
            self.core.step()

    def spoil(self, how: str) -> None:
        """Changes what is in the cache: a layer zeroed, or keys moved on by one token in every block (plain pages)."""
        import torch
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        tensors = connector._tensors
        for number, name in enumerate(connector._layers):
            page = tensors[name]
            blocks, heads, slots, width = page.shape
            if how == "zero" and number == 2:
                page.zero_()
            if how == "roll":  # the values stay: where both move on, attention sees the same pairs
                parts = page.view(blocks, heads, 2, slots * width // 2)
                keys = parts[:, :, 0].unflatten(-1, (width // 2, slots))
                keys.copy_(torch.roll(keys, 1, -1).clone())


def margin(steps: list[Any]) -> float:
    """By how much the best token led at the step where it led least."""
    leads = []
    for step in steps:
        best, second, *_ = sorted((entry.logprob for entry in step.values()), reverse=True)
        leads.append(best - second)
    return min(leads, default=0.0)


def main() -> None:
    """Answers until its input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints, prints where nobody reads answers
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    engine = Engine(spec)
    print(json.dumps({"ok": None}), file=out, flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"ok": getattr(engine, name)(**arguments)}
        except Exception as error:  # noqa: BLE001 - it is told to the test
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)
    engine.core.engine_core.shutdown()


if __name__ == "__main__":
    main()
