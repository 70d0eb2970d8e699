"""What a newcomer meets first: refusals that name the right field and say what to do."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hawk import convert
from hawk.errors import InvalidArgument, LayoutError
from hawk.layouts import CacheShape, Layout, load
from hawk.layouts.codecs import CODECS
from hawk.layouts.grammar import nearest
from hawk.plan.losses import loss

SHAPE = CacheShape(layers=2, heads=2, dim=80, block_size=32, blocks=3)
TEXT = """
name = "kestrel/k6"
codec = "int8"
codecs = ["int8", "bf16"]
buffers = "layer kv"
align = 64
[[piece]]
order = "block head slot/16 dim/32 | slot%16 dim%32"
"""
SCALE = '[scale]\nplace = "buffer"\ndtype = "fp32"\norder = "block slot head"\n'


def text(*changes, scale=SCALE):
    found = TEXT + scale
    for old, new in changes:
        assert old in found
        found = found.replace(old, new)
    return found


@pytest.mark.parametrize(
    ("changes", "words", "absent"),
    [
        (
            [("slot head", "slot head dim")],
            ["scale.group: scale.order names dim, so the group is needed"],
            [],
        ),
        ([("slot head", 'slot head"\ngroup = "128')], ["scale.group", "does not name dim"], []),
        ([("slot head", "slot block head")], ["kestrel/k6: scale.order: this digit is in"], ["piece"]),
        ([("slot head", "slot heads")], ["kestrel/k6: scale.order: unknown axis"], ["piece"]),
        ([('order = "block slot head', 'order = "layer block slot head')], ["kestrel/k6: scale.order"], []),
        (
            [("slot%16 dim%32", "slot%16 dim%32 dim%16")],
            ["twice; got dim%32 (of 'dim%32') and dim%16 (of 'dim%16')"],
            ["renamed"],
        ),
        ([("dim%32", "dim%K")], ["expected a number, for there are no [params]"], ["one of"]),
        ([("align = 64", 'align = "2KiB"')], ["align: of the wrong kind", "bytes as an integer"], ["range"]),
        ([("align = 64", "align = 0")], ["align: out of range", "bytes as an integer in 1.."], []),
        ([('codec = "int8"', 'codec = "INT8"')], ["Did you mean 'int8'?"], []),
        ([('place = "buffer"', 'place = "separate"')], ["buffer, page, constant"], ["Did you mean"]),
        (
            [('place = "buffer"', 'place = "page"'), ("slot head", "| slot head")],
            ["other pages; got 3 pages", "digits of the elements' page number"],
            [],
        ),
    ],
)
def test_a_refusal_names_its_field(changes, words, absent):
    with pytest.raises(LayoutError) as caught:
        Layout.from_toml(text(*changes), "kestrel/k6").compile(SHAPE)
    said = str(caught.value)
    assert all(word in said for word in words), said
    assert not any(word in said for word in absent), said


def test_a_rename_beside_dim_names_both_places():
    changes = ("order", 'rename = "m = (dim%(dim_/2) dim/(dim_/2))"\norder'), ("dim/32 |", "m/32 |")
    changed = text(*changes, scale='[params]\ndim_ = "dim"\n')
    with pytest.raises(LayoutError, match=r"twice; got dim.* \(of '.*'\) and dim.* the new name alone"):
        Layout.from_toml(changed, "k6").compile(CacheShape(2, 2, 64, 32, 3))


def test_halves_of_less_than_the_head_are_no_rotary_part():
    rename = 'rename = "m = (dim%(R/2) dim/(R/2))"\norder'
    changed = text(("order", rename), ("dim/32 | slot%16 dim%32", "m/32 | slot%16 m%32"), scale="")
    layout = Layout.from_toml(f'{changed}[params]\nR = "dim"\n')
    whole = CacheShape(2, 2, 160, 32, 3)
    assert layout.compile(whole).pages == layout.compile(whole, params={"R": 160}).pages
    with pytest.raises(LayoutError, match=r"rename: halves .* R = 64.*split = \"dim = rotary:R \+ rest\""):
        layout.compile(whole, params={"R": 64})
    split = changed.replace("rename", 'split = "dim = rotary:R + rest"\nrename', 1)
    split = split.replace("(dim%(R/2) dim/(R/2))", "(rotary%(R/2) rotary/(R/2)) + rest")
    assert Layout.from_toml(f'{split}[params]\nR = "dim"\n').compile(whole, params={"R": 64}).pieces[0].stored


@pytest.mark.parametrize(("word", "said"), [("BF16", "'bf16'"), ("bfp8", "'bfp8_b'"), ("separate", None)])
def test_only_close_words_are_suggested(word, said):
    hint = nearest(word, [*CODECS, "page", "buffer"])
    assert hint is None if said is None else said in str(hint)


def test_a_layout_of_ones_own_is_named_by_its_path():
    with pytest.raises(LayoutError) as caught:
        load("kestrel/k6")
    assert "named by the path of its file" in str(caught.value)
    assert "Did you mean" not in str(caught.value)


def test_a_codec_that_is_known_but_not_held_is_no_slip_of_the_pen():
    with pytest.raises(LayoutError) as caught:
        Layout.from_toml(text()).compile(SHAPE, codec="fp16")
    assert "expected int8, bf16" in str(caught.value)
    assert "Did you mean" not in str(caught.value)


def test_convert_names_the_options_of_a_shape():
    with pytest.raises(InvalidArgument, match=r"--layers, --heads, --dim, --blocks and --block-size"):
        convert.compile_for(np.zeros(8, np.uint8), "tenstorrent/kv")


def test_int8_without_scales_is_asked_about():
    src, dst = load("vllm/nhd").compile(SHAPE), Layout.from_toml(text(scale="")).compile(SHAPE)
    assert "saturate at 127; is [scale] missing?" in str(loss(src, dst))
    assert "[scale]" not in str(loss(src, Layout.from_toml(text()).compile(SHAPE)))


def test_the_numbers_that_the_page_takes_for_scales_are_exact():
    page = (Path(__file__).parents[3] / "docs" / "layouts.md").read_text(encoding="utf-8")
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "codes =" in c]
    space = {"np": np}
    exec(compile(code, "docs/layouts.md", "exec"), space)
    codes, scales = space["codes"], space["scales"].astype(np.float32)
    layout = Layout.from_toml(
        'name = "t"\ncodec = "int8"\n[scale]\nplace = "buffer"\ndtype = "fp32"\nbuffers = ""\n'
        'order = "layer kv block head slot"\n[[piece]]\norder = "layer kv block | head slot dim"\n'
    )
    src = convert.compile_for(space["x"], "contiguous/bhsd")
    got = convert.convert(space["x"], src, convert.retarget(src, layout))
    assert got.shape == (codes.nbytes + scales.nbytes,)  # flat: elements, then scales
    assert np.array_equal(got[: codes.nbytes].view(np.int8), codes.reshape(-1))
    assert np.array_equal(got[codes.nbytes :].view(np.float32), scales.reshape(-1))
