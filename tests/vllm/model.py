"""The model that the engines run: small, with weights wide enough that every token counts."""

import sys
from pathlib import Path

LAYERS = 4
HEADS = 4
DIM = 64


def make(folder: Path, *, heads: int = HEADS, dim: int = DIM) -> None:
    """A Llama of 7 MB whose greedy tokens depend on every token of the prompt."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1234)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=heads,
        head_dim=dim,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="bfloat16",
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    _tokenizer(folder)


def _tokenizer(folder: Path) -> None:
    """A word for each token, `w7` for 7: servers want one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, 1024)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths, all different."""
    import random

    dice = random.Random(seed)
    return [[dice.randrange(4, 1024) for _ in range(length)] for length in lengths]


if __name__ == "__main__":
    make(Path(sys.argv[1]))
