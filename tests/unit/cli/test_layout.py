"""`hawk layout`: explanations that add up, files that convert, models by name and by file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hawk import models as hawk_models
from hawk.cli.layout import layout
from hawk.errors import HawkError, InvalidArgument, LayoutError
from hawk.models import from_config, load_model, model_names, model_source

ROOT = Path(__file__).resolve().parents[3]

ACME = """
name = "acme/tiles"
summary = "s"
source = "t"
codec = "bf16"
buffers = "layer kv"
[placement]
kind = "interleaved"
channels = 4
[[piece]]
order = "block head slot/8 dim/128 | slot%8 dim%128"
"""


def hawk(*arguments, fails=False):
    done = CliRunner().invoke(layout, [str(a) for a in arguments])
    if fails:
        assert done.exception is not None
        return done
    assert done.exception is None, (done.output, done.exception)
    return done.output


def test_show_draws_or_says_why_not(tmp_path):
    path = tmp_path / "acme.toml"
    path.write_text(ACME)
    assert "page:element" in hawk("show", path)
    assert "dim 576" in hawk("show", "mla/interleaved")  # fits no cache of the usual kind
    assert "dim 32, fp16" in hawk("show", "vllm/nhd", "--dim", 32, "--codec", "fp16")
    path.write_text(ACME.replace("slot%8", "slot%4"))
    done = hawk("show", path, fails=True)
    assert isinstance(done.exception, LayoutError)
    assert done.output == ""
    path.write_text('order = "block head slot dim"\n' + ACME.partition("[[piece]]")[0])
    with pytest.raises(LayoutError, match=r"order: this belongs to a piece\. Write \[\[piece\]\]"):
        raise hawk("show", path, fails=True).exception


def test_show_takes_parameters_and_names_scales(tmp_path):
    text = hawk("show", "tenstorrent/kv", "--dim", 64, "--param", "R=32")
    assert "0..15 from 0 on by 2, 16..31 from 1 on by 2, 32..63 from 32 on" in text
    assert hawk("show", "tenstorrent/kv", "--param", "R", fails=True).exit_code == 2
    path = tmp_path / "rows.toml"
    scale = '[scale]\nplace = "buffer"\ndtype = "fp32"\norder = "layer kv block head slot"\n'
    path.write_text(
        f'name = "rows"\ncodec = "int8"\n{scale}[[piece]]\norder = "layer block head slot kv | dim"\n'
    )
    text = hawk("show", path)
    assert "1 buffer of 2048 pages, 131072 bytes\n" in text
    assert "1 buffer of scales of 16 pages, 8192 bytes\n" in text
    assert "layer 0, K, head 0, block 0 (3:128 is element 128 of page 3)" in text
    assert "layer 0, V, head 0, block 0" in text


def test_explain_says_what_makes_short_runs_longer(tmp_path):
    path = tmp_path / "rows.toml"
    said = "a page may be a block, with '|' behind 'block'"
    for order, short in (("layer block head slot kv | dim", True), ("layer block | head slot kv dim", False)):
        path.write_text(f'name = "rows"\ncodec = "bf16"\n[[piece]]\norder = "{order}"\n')
        text = hawk("explain", "vllm/nhd", path, "--model", "llama-3.1-8b", "--tokens", 64)
        assert (said in text) is short


def test_explain_a_model_between_equal_groups():
    text = hawk("explain", "vllm/nhd", "tenstorrent/kv", "--model", "llama-3.1-70b", "--tp", "4:4")
    payload = 80 * 2 * 8192 * 8 * 128 * 2
    assert f"in all      {payload:,} bytes" in text
    assert "4 x worker 0 -> worker 0, heads 0..1 -> 0..1" in text
    assert "every value is kept" in text
    assert "direct" in text


@pytest.mark.parametrize(
    ("tp", "first"),
    [
        ("8:16", "16 x worker 0 -> worker 0, heads 0..0 -> 0..0"),
        ("8:2", "worker 0 -> worker 0, heads 0..0 -> 0..0"),
        ("2:8", "worker 0 -> worker 0, heads 0..0 -> 0..0"),
    ],
)
def test_explain_what_is_split_and_merged(tp, first):
    arguments = ["vllm/nhd", "tenstorrent/kv", "--model", "llama-3.1-8b", "--tp", tp, "--tokens", 100]
    text = hawk("explain", *arguments, "--channels", 7, "--codec", "bfp8_b")
    assert first in text
    # Each kind of part is told once: here they differ by the target's heads.
    assert text.count("segments  ") == (4 if tp == "8:2" else 1)
    assert "lossy: bfp8_b" in text
    assert "page i in channel i % 7" in text


def test_explain_windows_move_what_they_see():
    text = hawk(
        "explain", "vllm/nhd", "vllm/hnd", "--model", "gpt-oss-20b", "--tokens", 1000, "--block-size", 16
    )
    assert "sliding layers (window 128)" in text
    assert "tokens 873..999" in text
    assert "tokens 0..999" in text


def test_explain_with_stages_and_a_layout_of_ones_own(tmp_path):
    path = tmp_path / "acme.toml"
    path.write_text(ACME)
    text = hawk("explain", "vllm/hnd", path, "--model", "llama-3.1-8b", "--pp", "1:4", "--tokens", 64)
    assert "acme/tiles [bf16]" in text
    assert "TP 1 PP 4" in text
    assert "layers 0..7" in text


def test_explain_a_push_into_a_device_that_moves():
    arguments = ["vllm/nhd", "tenstorrent/kv", "--model", "llama-3.1-8b", "--tokens", 512, "--move", "device"]
    assert "moves by the device" in hawk("explain", *arguments, "--push", "--max-sge", 1)


def test_explain_takes_parameters_and_says_its_chunks(tmp_path):
    arguments = ["explain", "vllm/nhd", "tenstorrent/kv", "--model", "llama-3.1-8b", "--tokens", 512]
    text = hawk(*arguments, "--param", "R=64", "--chunk", "16MiB")
    assert "1 transfer," in text
    assert "chunks      of at most 16 MiB" in text
    done = hawk(*arguments, "--source-param", "R=64", fails=True)
    assert isinstance(done.exception, HawkError)


def test_explain_refuses():
    base = ["explain", "vllm/nhd", "tenstorrent/kv"]
    assert isinstance(hawk(*base, "--model", "nothing", fails=True).exception, InvalidArgument)
    assert hawk(*base, "--model", "llama-3.1-8b", "--tp", "x", fails=True).exit_code == 2
    assert hawk(*base, "--model", "llama-3.1-8b", "--tp", "0:1", fails=True).exit_code == 2
    assert isinstance(hawk(*base, "--model", "llama-3.1-8b", "--pp", "99", fails=True).exception, HawkError)
    assert isinstance(
        hawk(*base, "--model", "llama-3.1-8b", "--codec", "fp17", fails=True).exception, HawkError
    )
    done = hawk(*base, "--model", "llama-3.1-8b", "--tokens", 10, "--first", 10, fails=True)
    assert isinstance(done.exception, InvalidArgument)


def test_the_page_about_planning_runs_as_it_stands():
    page = (ROOT / "docs" / "planning.md").read_text()
    shown = page.split("    $ hawk layout ")[1].split("\n\nTransfers")[0].splitlines()
    told = hawk(*shown[0].split()).splitlines()
    for line, real in zip(shown[1:], told, strict=True):
        start, _, end = line.strip().partition("...")
        assert real.strip().startswith(start)
        assert real.strip().endswith(end)
    space = {"array": np.zeros((2, 2, 8, 16, 2, 64), np.uint16)}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "docs/planning.md", "exec"), space)
    assert space["tiles"].dtype == np.uint8


# -- models ----------------------------------------------------------------------------------------------


def test_every_model_can_be_read():
    assert len(model_names()) > 20
    for name in model_names():
        m = load_model(name)
        assert m.name == name
    assert "llama-3.1-405b" in hawk("models")
    assert load_model("deepseek-v3").dim == 512 + 64
    assert [len(k.layers) for k in load_model("gemma-3-27b").kinds] == [10, 52]


def test_every_model_names_its_source(monkeypatch):
    for name in model_names():
        source, confirmed = model_source(name)
        assert re.fullmatch(r"https://huggingface\.co/[\w.-]+/[\w.-]+/blob/main/config\.json", source), name
        assert not confirmed or confirmed.startswith("https://"), name
    said = hawk("models")
    assert ("not confirmed" in said) == any(not model_source(name)[1] for name in model_names())
    assert all(model_source(name)[0] in said for name in model_names())
    table = {"doubted": {"source": "somewhere", "layers": 1, "heads": 1, "dim": 8}}
    monkeypatch.setattr(hawk_models, "_shipped", lambda: table)
    assert "8, not confirmed  somewhere" in hawk("models")


def test_models_from_files(tmp_path):
    own = tmp_path / "m.toml"
    own.write_text('[mine]\nlayers = 3\nheads = 2\ndim = 64\nwindow = 8\npattern = "full sliding"\n')
    m = load_model(str(own))
    assert (m.name, [k.layers for k in m.kinds]) == ("mine", [(0, 2), (1,)])
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}))
    assert (load_model(str(config)).heads, load_model(str(config)).dim) == (8, 64)
    latent = from_config({"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "x")
    assert (latent.heads, latent.dim, latent.kvs) == (1, 576, 1)
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
    shaped = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32, "num_attention_heads": 4}
    assert [k.window for k in from_config({"text_config": shaped | kinds}, "x").kinds] == [None, 9]
    for text, field in (
        ("[a]\nlayers = 0\nheads = 1\ndim = 1\n", "layers"),
        ("[a]\nlayer = 1\n", r"a\.layer"),
        ("[a]\nlayers = 1\nheads = 1\ndim = 1\npattern = 'half'\n", "pattern"),
        ("x = 1\n", "one table"),
        ("[[", "cannot be read"),
    ):
        own.write_text(text)
        with pytest.raises(InvalidArgument, match=field):
            load_model(str(own))
    with pytest.raises(InvalidArgument, match="cannot read"):
        load_model(str(tmp_path / "none.toml"))


# -- convert ---------------------------------------------------------------------------------------------


def test_convert_there_and_back(tmp_path):
    a, b, c = (tmp_path / n for n in ("a.npy", "b.npy", "c.npy"))
    array = np.random.default_rng(0).integers(0, 0x7F00, (2, 2, 6, 16, 2, 64)).astype(np.uint16)
    np.save(a, array)
    text = hawk("convert", "vllm/nhd", "tenstorrent/kv", a, b, "--channels", 7, "--block-size", "16:32")
    assert "tenstorrent/kv [bf16]" in text
    assert np.load(b).dtype == np.uint8
    said = [
        "--layers",
        2,
        "--heads",
        2,
        "--dim",
        64,
        "--blocks",
        3,
        "--block-size",
        "32:16",
        "--source-channels",
        7,
    ]
    hawk("convert", "tenstorrent/kv", "vllm/hnd", b, c, *said)
    np.testing.assert_array_equal(np.load(c), array.transpose(0, 1, 2, 4, 3, 5))


def test_explain_refuses_more_tokens_than_memory_holds():
    said = ("vllm/nhd", "vllm/hnd", "--model", "llama-3.1-8b", "--tokens", 10**11)
    done = hawk("explain", *said, fails=True)
    assert isinstance(done.exception, InvalidArgument)
    assert "tokens" in str(done.exception)


def test_convert_a_tensor_and_a_path(tmp_path):
    a, b, own = tmp_path / "a.npy", tmp_path / "b.npy", tmp_path / "acme.toml"
    own.write_text(ACME)
    weights = np.arange(16 * 256, dtype=np.uint16).reshape(16, 256)
    np.save(a, weights)
    hawk("convert", "contiguous/bhsd", own, a, b, "--tensor", "--channels", 1)
    want = weights.reshape(2, 8, 2, 128).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(np.load(b).view(np.uint16).reshape(want.shape), want)


def test_convert_refuses(tmp_path):
    a, b = tmp_path / "a.npy", tmp_path / "b.npy"
    np.save(a, np.zeros((2, 6, 16, 2, 64), np.uint16))
    a.with_suffix(".txt").write_text("no array")
    for arguments, what in (
        ([a.with_suffix(".txt"), b], "no .npy"),
        ([a, tmp_path / "b.bin"], "ending"),
        ([a, b, "--heads", 2], "not whole"),
        ([a, b, "--tokens", 97], "no such tokens"),
        ([a, b, "--source-codec", "fp32"], "no cache of"),
    ):
        done = hawk("convert", "vllm/nhd", "vllm/hnd", *arguments, fails=True)
        assert isinstance(done.exception, InvalidArgument)
        assert what in str(done.exception)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.npy", "a.txt"], "what fails leaves no file"
    np.savez(a.with_suffix(".npz"), x=np.zeros(3))
    done = hawk("convert", "vllm/nhd", "vllm/hnd", a.with_suffix(".npz"), b, fails=True)
    assert "archive" in str(done.exception)
    np.save(a, np.zeros((16, 256), np.uint16))
    done = hawk("convert", "contiguous/bhsd", "tenstorrent/kv", a, b, "--tensor", fails=True)
    assert "target: this layout tells K from V" in str(done.exception)


def test_convert_replaces_a_file_only_by_a_whole_one(tmp_path):
    """Even the one that it reads."""
    a = tmp_path / "a.npy"
    array = np.arange(2 * 2 * 3 * 4 * 2 * 8, dtype=np.uint16).reshape(2, 2, 3, 4, 2, 8)
    np.save(a, array)
    before = a.read_bytes()
    hawk("convert", "vllm/nhd", "vllm/hnd", a, a, "--tokens", 13, fails=True)
    assert a.read_bytes() == before
    hawk("convert", "vllm/nhd", "vllm/hnd", a, a)
    np.testing.assert_array_equal(np.load(a), array.transpose(0, 1, 2, 4, 3, 5))
    assert [x.name for x in tmp_path.iterdir()] == ["a.npy"]
