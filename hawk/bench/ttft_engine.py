"""One vLLM engine for `hawk.bench.ttft`, as a process of its own: a line of JSON in is a question, one out its answer.

    python -m hawk.bench.ttft_engine SPEC.json       an engine
    python -m hawk.bench.ttft_engine --model FOLDER SHAPE.json       writes a model with random weights

It runs under vLLM's Python, the engine core in the same process, for memory is short where seven engines live.  Where
nothing was computed it pauses for a millisecond, as the core of a server does, so that threads of the connector have
their turn.  Times are of the system's clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

PAUSE = 0.001
"""Seconds, as in vLLM's own loop."""


class Engine:
    """Answers one question at a time.

    Fields of the specification: `model`, `dtype`, `block`, `blocks`, `longest` (tokens of a request), `transfer` (what
    `--kv-transfer-config` takes, or None).
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM

        more = {"kv_transfer_config": spec["transfer"]} if spec.get("transfer") else {}
        self._llm = LLM(
            model=spec["model"],
            dtype=spec["dtype"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=spec["longest"],
            max_num_batched_tokens=spec["longest"],
            max_num_seqs=4,
            block_size=spec["block"],
            num_gpu_blocks_override=spec["blocks"],
            enable_prefix_caching=False,
            **more,
        ).llm_engine

    def ask(self, key: str, prompt: list[int], tokens: int, params: dict[str, Any] | None) -> dict[str, Any]:
        """One request, to its end: its tokens, when the first one was there, and what came with them."""
        from vllm import SamplingParams

        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        self._llm.add_request(key, {"prompt_token_ids": prompt}, sampling)
        first = 0.0
        while True:
            found = self._llm.step()
            if not found:
                time.sleep(PAUSE)
            for out in found:
                if out.request_id != key:
                    continue
                if not first and out.outputs[0].token_ids:
                    first = time.monotonic()
                if out.finished:
                    return {
                        "first": first,
                        "tokens": list(out.outputs[0].token_ids),
                        "reason": str(out.outputs[0].finish_reason),
                        "cached": out.num_cached_tokens,
                        "params": out.kv_transfer_params,
                    }

    def close(self) -> None:
        """Ends the engine core."""
        self._llm.engine_core.shutdown()


def write_model(folder: Path, shape: dict[str, int]) -> None:
    """A Llama whose weights are drawn wide, so that its greedy tokens depend on all of the prompt."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1234)
    config = LlamaConfig(
        vocab_size=shape["vocabulary"],
        hidden_size=shape["width"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["dim"],
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="bfloat16",
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder, shape["vocabulary"])


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A word for each token, `w7` for 7: servers want one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, vocabulary)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)


def main(arguments: list[str]) -> None:
    """Answers until its input ends."""
    if arguments[0] == "--model":
        write_model(Path(arguments[1]), json.loads(Path(arguments[2]).read_text()))
        return
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints, prints where nobody reads answers
    engine = Engine(json.loads(Path(arguments[0]).read_text()))
    print("{}", file=out, flush=True)
    for line in sys.stdin:
        try:
            answer = engine.ask(**json.loads(line))
        except Exception as error:  # noqa: BLE001 - it is told to who asked
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
