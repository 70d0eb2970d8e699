"""What is known of engines' caches of models, and that a cache which the model would misread is refused by field."""

import json

import pytest
from click.testing import CliRunner

from hawk.cache import CacheSpec
from hawk.cli.layout import layout
from hawk.errors import HawkError, InvalidArgument
from hawk.layouts import load
from hawk.layouts.compiled import CacheShape
from hawk.model_caches import cache_names, k_order, load_cache
from hawk.models import load_model

LLAMA = "tt_transformers/llama-3.1-8b"


@pytest.mark.parametrize("name", cache_names())
def test_every_cache_is_one_that_its_own_specs_pass(name):
    cache = load_cache(name)
    assert cache.model == load_model(name.partition("/")[2])
    assert cache.source.startswith("https://")
    for codec in cache.codecs:
        for block_size in cache.block_sizes:
            for tp in cache.tp:
                chosen = cache.choose(codec=codec, block_size=block_size)
                spec = chosen.spec(blocks=3, tp_rank=tp - 1, tp_size=tp, channels=7)
                chosen.check(spec)
                cache.check(spec)
                assert spec.heads == cache.model.heads // tp
                assert spec.compile().codec.name == codec


def test_the_families_are_there():
    names = set(cache_names())
    for model in ("llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "llama-3.2-3b", "llama-3.3-70b"):
        assert f"tt_transformers/{model}" in names
    assert sum("/qwen2.5" in n for n in names) >= 6
    assert sum("/qwen3" in n for n in names) >= 6
    assert load_cache("tt_transformers/qwen2.5-7b").codec == "bf16"  # the one that does not bear bfp8_b
    assert load_cache(LLAMA).codec == "bfp8_b"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layout": "tenstorrent/kv-hf"}, "k_order"),
        ({"layout": "vllm/cpu", "codec": "bf16"}, "codec"),
        ({"params": {"R": 64}}, "k_order"),
        ({"codec": "bf16"}, "codec"),
        ({"codec": "bfp4_b"}, "codec"),
        ({"block_size": 128}, "block_size"),
        ({"heads": 4}, "heads"),
        ({"dim": 64, "params": {}}, "dim"),
        ({"layers": 31}, "layers"),
        ({"kvs": 1}, "kvs"),
    ],
)
def test_a_wrong_pair_is_refused_by_field(changes, field):
    cache = load_cache(LLAMA)
    with pytest.raises(InvalidArgument) as caught:
        cache.check(cache.spec(blocks=2).replace(**changes))
    assert caught.value.field == field
    assert LLAMA in caught.value.message
    assert caught.value.expected is not None


def test_a_share_of_the_heads_that_the_model_has_not_is_refused():
    cache = load_cache(LLAMA)
    whole = cache.spec(blocks=2)
    with pytest.raises(InvalidArgument) as caught:
        cache.check(whole.shard(heads=range(3)))
    assert (caught.value.field, caught.value.got) == ("heads", "3")
    other = whole.replace(heads=32).shard(tp_rank=0, tp_size=4)  # 8 heads, of another model's
    with pytest.raises(InvalidArgument) as caught:
        cache.check(other)
    assert (caught.value.field, caught.value.got) == ("heads", "32")
    with pytest.raises(InvalidArgument, match="tp_size"):
        load_cache("tt_transformers/qwen2.5-7b").spec(blocks=1, tp_size=8)
    cache.check(whole.replace(layers=2), layers=2)


@pytest.mark.parametrize(
    ("codec", "block_size", "field"), [("fp32", None, "codec"), (None, 16, "block_size")]
)
def test_only_what_the_engine_offers_can_be_chosen(codec, block_size, field):
    with pytest.raises(InvalidArgument) as caught:
        load_cache(LLAMA).choose(codec=codec, block_size=block_size)
    assert caught.value.field == field


def test_the_order_of_k_is_read_from_the_layout_itself():
    def of(name, dim=128, **params):
        shape = CacheShape(layers=2, heads=2, dim=dim, block_size=64, blocks=3)
        return k_order(load(name).compile(shape, params=params))

    assert of("vllm/nhd") == of("tenstorrent/kv-hf") == ("hf", 128)
    assert of("tenstorrent/kv") == of("tenstorrent/kv-one-buffer") == ("meta", 128)
    assert of("tenstorrent/kv", R=32) == ("meta", 32)
    assert of("tenstorrent/kv", dim=80) == ("meta", 80)
    assert of("vllm/cpu") == ("other", 128)  # K transposed: it is no order of a head


def test_a_file_of_ones_own(tmp_path):
    own = tmp_path / "mine.toml"
    text = (
        '[mine]\nmodel = "llama-3.1-8b"\nlayout = "tenstorrent/kv-hf"\nk_order = "hf"\ncodecs = ["bf16"]\n'
        "block_sizes = [32]\ntp = [1, 2]\n"
    )
    own.write_text(text)
    cache = load_cache(str(own))
    assert (cache.name, cache.codec, cache.block_size, cache.rotary) == ("mine", "bf16", 32, 128)
    with pytest.raises(InvalidArgument, match="k_order"):
        cache.check(cache.spec(blocks=1).replace(layout="tenstorrent/kv"))
    for changed, field in (
        (text.replace('"hf"', '"meta"'), "k_order"),  # the layout keeps another order than the table says
        (text.replace('"hf"', '"halves"'), "k_order"),
        (text.replace("[1, 2]", "[3]"), "tp"),
        (text.replace("[32]", "32"), "block_sizes"),
        (text.replace("[32]", "[0]"), "block_sizes"),
        (text + "rotary = 130\n", "rotary"),
        (text + "colour = 1\n", "colour"),
        (text.replace('codecs = ["bf16"]', ""), "codecs"),
        (text.replace('model = "llama-3.1-8b"\n', ""), "model"),
        (text + "[other]\n", "one table"),
        ("[[", "cannot be read"),
    ):
        own.write_text(changed)
        with pytest.raises(InvalidArgument, match=field):
            load_cache(str(own))
    # Of a model that no worker could hold alone.
    own.write_text(text.replace("[1, 2]", "[4, 8]") + 'request = "tenstorrent/contiguous-hf"\n')
    split = load_cache(str(own))
    split.check(split.spec(blocks=1, tp_rank=7, tp_size=8))
    assert split.request_spec(33).heads == 8
    with pytest.raises(InvalidArgument, match="tp_size"):
        split.spec(blocks=1)
    # Every number type that is listed has to be one.
    own.write_text(text.replace('["bf16"]', '["bf16", "bf17"]'))
    with pytest.raises(HawkError, match="bf17"):
        load_cache(str(own))
    with pytest.raises(InvalidArgument, match="no cache of this name"):
        load_cache("tt_transformers/llama-1")
    for wrong in (None, 3):
        with pytest.raises(InvalidArgument, match="cache: "):
            load_cache(wrong)
    with pytest.raises(InvalidArgument, match="cannot read"):
        load_cache(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(("sizes", "wrong"), [("[64, 48]", 48), ("[16]", 16), ("[32, 33]", 33)])
def test_blocks_that_a_request_by_itself_cannot_hold_are_refused_at_load(tmp_path, sizes, wrong):
    own = tmp_path / "mine.toml"
    text = """[mine]
model = "llama-3.1-8b"
layout = "tenstorrent/kv"
request = "tenstorrent/contiguous"
k_order = "meta"
codecs = ["bfp8_b"]
tp = [1]
"""
    own.write_text(f"{text}block_sizes = {sizes}\n")
    with pytest.raises(InvalidArgument, match=rf"block_sizes.*gaps between blocks of {wrong} tokens"):
        load_cache(str(own))
    own.write_text(f"{text}block_sizes = [32, 96]\n")
    assert load_cache(str(own)).block_sizes == (32, 96)


def test_what_is_no_spec_is_refused_by_name():
    with pytest.raises(InvalidArgument, match=r"spec: .*CacheSpec"):
        load_cache("tt_transformers/llama-3.1-8b").check(None)


def test_hawk_layout_caches_lists_them():
    said = CliRunner().invoke(layout, ["caches"])
    assert said.exit_code == 0, said.output
    assert len(said.output.splitlines()) == len(cache_names())
    assert "K in meta order, bfp8_b, blocks 64, 32, TP 1, 2, 4, 8" in said.output
    listed = json.loads(CliRunner().invoke(layout, ["caches", "--json"]).output)
    assert [cache["name"] for cache in listed] == list(cache_names())
    assert listed[0]["k_order"] == load_cache(listed[0]["name"]).k_order


def test_a_spec_needs_no_cache_of_a_model():
    assert CacheSpec(layers=1, heads=1, dim=64, block_size=32, blocks=1).compile().codec.name == "bf16"
