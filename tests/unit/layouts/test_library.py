"""Declarations as files: what is read, what is refused, where layouts are found, how they are drawn."""

import contextlib
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawk.errors import LayoutError
from hawk.layouts import CacheShape, Layout, library, load, names
from hawk.layouts.codecs import CODECS
from hawk.layouts.describe import describe
from hawk.layouts.layout import MAX_TEXT

GOOD = """
name = "mine/rows"
codec = "bf16"
codecs = ["bf16", "fp32"]
buffers = "layer"
align = 32

[placement]
kind = "interleaved"
channels = 4

[params]
R = 8

[[piece]]
order = "kv block | head slot dim/R dim%R"
"""

SHAPE = CacheShape(layers=2, heads=2, dim=32, block_size=4, blocks=3)
OF_ITS_OWN = {
    "mla/interleaved": CacheShape(layers=2, heads=1, dim=576, block_size=4, blocks=3, kvs=1),
    "tenstorrent/kv-sharded": CacheShape(layers=2, heads=2, dim=128, block_size=64, blocks=3),
    "flashinfer/mla": CacheShape(layers=2, heads=1, dim=576, block_size=4, blocks=3, kvs=1),
    "vllm/mla-fp8": CacheShape(layers=2, heads=1, dim=576, block_size=4, blocks=3, kvs=1),
    "vllm/cpu-amx": CacheShape(layers=2, heads=2, dim=64, block_size=32, blocks=3),
}
"""Shapes for layouts that do not hold every one."""


def plugged(monkeypatch: pytest.MonkeyPatch, **entries: str) -> None:
    found = [EntryPoint(name.replace("_", "/"), value, library.GROUP) for name, value in entries.items()]
    monkeypatch.setattr(library, "entry_points", lambda group: found if group == library.GROUP else [])


def plug_function() -> str:
    return GOOD


def plug_broken() -> str:
    raise OSError("no such board")


plug_text = GOOD
plug_layout = Layout.from_toml(GOOD)
plug_number = 5


def test_the_shipped_layouts():
    assert names() == sorted(names())
    assert {"contiguous/bhsd", "tenstorrent/kv", "vllm/nhd"} < set(names())
    for name in names():
        layout = load(name)
        assert (layout.name, layout.origin) == (name, name.replace("/", "-") + ".toml")
        assert layout.summary
        assert layout.source


@pytest.mark.parametrize("name", names())
def test_a_layout_travels_as_its_text(name):
    layout = load(name)
    again = Layout.from_toml(layout.to_toml(), "peer d0")
    assert again == layout
    assert again.origin == "peer d0"
    shape = OF_ITS_OWN.get(name, SHAPE)
    assert again.compile(shape) == layout.compile(shape)


def test_a_file_works_like_a_shipped_layout(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert load(path) == load(str(path)) == Layout.from_toml(GOOD)
    assert load(path).origin == str(path)
    compiled = load(path).compile(SHAPE)
    assert (compiled.channels, compiled.pages, compiled.page_stride) == (4, 6, 512)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"name = ", ["mine.toml", "not TOML"]),
        (b"\xff\xfe", ["mine.toml", "not UTF-8"]),
        (b"#" * (5 * MAX_TEXT), ["mine.toml", "too long"]),
        (None, ["mine.toml", "cannot read", "No such file"]),
    ],
)
def test_a_file_that_is_no_layout(tmp_path, raw, words):
    path = tmp_path / "mine.toml"
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(LayoutError) as caught:
        load(path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_path_that_is_none_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"layout: this is no path; got 'a\\x00\.toml'"):
        load("a\0.toml")


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(LayoutError, match=r"one of ascend/nz.*Did you mean 'vllm/nhd'\?"):
        load("vllm/ndh")


@pytest.mark.parametrize("value", ["plug_function", "plug_text", "plug_layout"])
def test_plug_ins_are_found_by_entry_point(monkeypatch, value):
    plugged(monkeypatch, mine_rows=f"{__name__}:{value}")
    assert "mine/rows" in names()
    assert load("mine/rows") == plug_layout


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mine_rows", "plug_broken", ["failed", "OSError: no such board"]),
        ("mine_rows", "plug_missing", ["failed", "AttributeError"]),
        ("mine_rows", "plug_number", ["gives no layout", "int"]),
        ("mine_columns", "plug_text", ["another name", "mine/rows", "mine/columns"]),
    ],
)
def test_a_plug_in_at_fault_is_named(monkeypatch, name, value, words):
    plugged(monkeypatch, **{name: f"{__name__}:{value}"})
    with pytest.raises(LayoutError) as caught:
        load(name.replace("_", "/"))
    assert all(word in str(caught.value) for word in (*words, "plug-in", value)), str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "mine/rows"', "", ["name: missing"]),
        ('name = "mine/rows"', "name = 3", ["name: of the wrong kind", "3"]),
        ('name = "mine/rows"', 'name = "Mine rows"', ["name: this cannot name a layout"]),
        ('name = "mine/rows"', 'name = "mine\\u001b"', ["cannot be printed"]),
        ('codec = "bf16"', 'codec = "bf61"', ["codec: unknown codec", "Did you mean 'bf16'?"]),
        ('codec = "bf16"', 'codec = "fp16"', ["codec", "not among"]),
        ('codecs = ["bf16", "fp32"]', "codecs = []", ["codecs"]),
        ('codecs = ["bf16", "fp32"]', 'codecs = ["bf16", "bf16"]', ["codecs", "twice"]),
        ('codecs = ["bf16", "fp32"]', 'codecs = ["bf16", "fp23"]', ["codecs", "Did you mean 'fp32'?"]),
        ('buffers = "layer"', 'buffers = "layer block"', ["buffers", "'block'", "layer, kv"]),
        ('buffers = "layer"', 'buffers = "layer layer"', ["buffers", "twice"]),
        ("align = 32", "align = 0", ["align", "1.."]),
        ("align = 32", "align = true", ["align"]),
        ("align = 32", "alignment = 32", ["alignment: unknown key", "Did you mean 'align'?"]),
        ("align = 32", '"a\\u001bb" = 32', ["'a\\x1bb': unknown key"]),
        ("align = 32", "align = 0x" + "f" * 8000, ["align", "too large to show"]),
        ('kind = "interleaved"', 'kind = "interleave"', ["placement.kind", "Did you mean 'interleaved'?"]),
        ('kind = "interleaved"', 'kind = "linear"', ["placement.channels", "one channel"]),
        ("channels = 4", "", ["placement.channels", "got None"]),
        ("channels = 4", "channels = 1000000", ["placement.channels"]),
        ("R = 8", 'R = "dimm"', ["params.R", "Did you mean 'dim'?"]),
        ("R = 8", "R = 0", ["params.R"]),
        ("R = 8", "dim = 8", ["params.dim", "not an axis"]),
        ("R = 8", "\n".join(f"R{i} = 1" for i in range(17)), ["params", "at most 16"]),
        ("[[piece]]", '[[piece]]\nwhere = "kv=2"', ["piece[0].where", "'kv=2'"]),
        ("[[piece]]", "[[piece]]\nwhere = false", ["piece[0].where", "False"]),
        ("[[piece]]", '[[piece]]\norder = "kv"\n[[piece]]', ["two pieces"]),
        ("[[piece]]", "[[pieces]]", ["pieces", "Did you mean 'piece'?"]),
        ("order =", "ordre =", ["piece[0].ordre", "Did you mean 'order'?"]),
        ("order =", 'rename = ["a = dim", 3]\norder =', ["piece[0].rename"]),
        ("order =", 'rename = "head = dim"\norder =', ["piece[0].rename", "not an axis"]),
        ("dim%R", "dim%R)", ["piece[0].order", "')' at column 33"]),
    ],
)
def test_each_key_is_checked(old, new, words):
    assert old in GOOD
    with pytest.raises(LayoutError) as caught:
        Layout.from_toml(GOOD.replace(old, new), "mine.toml")
    message = str(caught.value)
    assert message.startswith("mine.toml: ")
    assert all(word in message for word in words), message
    assert len(message) < 700


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 10000, "a = 1" + "0" * 5000, "x" * (MAX_TEXT + 1), "a" + ".a" * 5000 + " = 1"]
)
def test_hostile_text_is_refused(text):
    with pytest.raises(LayoutError):
        Layout.from_toml(text)


@given(st.data())
def test_a_damaged_declaration_is_read_or_refused(data):
    text = load(data.draw(st.sampled_from(names()))).text
    at = data.draw(st.integers(0, len(text)))
    inserted = data.draw(st.text(alphabet="kvdim =/%|()[]\"'0123456789\n.,{}R", max_size=12))
    damaged = text[:at] + inserted + text[at + data.draw(st.integers(0, 12)) :]
    with contextlib.suppress(LayoutError):
        Layout.from_toml(damaged).compile(SHAPE)


PAGE = (Path(__file__).parents[3] / "docs" / "layouts.md").read_text(encoding="utf-8")


def test_the_examples_of_the_documentation_hold(tmp_path, monkeypatch):
    """The newcomer's file and test are run as they stand, and the test fails once the file is wrong."""
    text, rotary, parted, sharded, scale = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    code, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    shape = CacheShape(layers=2, heads=4, dim=128, block_size=64, blocks=4)
    assert Layout.from_toml(text).compile(shape).pages == 4 * 4 * 8
    wrong = "slot/8 dim/128 | slot%8/2 dim%64 slot%2"
    with pytest.raises(LayoutError) as caught:
        Layout.from_toml(text.replace("slot/8 dim/128 | slot%8/2 dim%128 slot%2", wrong)).compile(shape)
    assert str(caught.value) in PAGE
    monkeypatch.chdir(tmp_path)
    tests: dict[str, Any] = {}
    exec(compile(code, "test_acme.py", "exec"), tests)
    for content, right in (
        (text, True),
        (text.replace("slot%8/2 dim%128 slot%2", "slot%8/2 slot%2 dim%128"), False),
    ):
        assert right or content != text
        (tmp_path / "acme.toml").write_text(content)
        if right:
            tests["test_acme"]()
        else:
            with pytest.raises(AssertionError):
                tests["test_acme"]()
    head = 'name = "t"\ncodec = "int8"\nbuffers = "layer kv"\n'
    keys = Layout.from_toml(head + rotary).compile(
        CacheShape(layers=2, heads=4, dim=128, block_size=64, blocks=4, kvs=1)
    )
    assert keys.pieces[0] == load("tenstorrent/kv").compile(shape).pieces[0]
    latent = CacheShape(layers=2, heads=1, dim=576, block_size=64, blocks=4, kvs=1)
    assert Layout.from_toml('name = "t"\n' + parted).compile(latent).page_stride == 656
    order = '[[piece]]\norder = "block head slot/32 dim/32 | slot%32 dim%32"\n'
    assert Layout.from_toml(head + sharded + order).compile(shape).banks == (4, 5, 6, 7)
    rows = '[[piece]]\norder = "block | slot head dim"\n'
    beside = Layout.from_toml(head + scale + rows).compile(shape).scale
    assert beside is not None
    assert beside.shape.dim == 4


def test_the_documentation_names_every_layout_and_codec():
    for name in names():
        assert f"| `{name}` | {load(name).summary} |" in PAGE
    for codec in CODECS:
        assert f"| `{codec}`" in PAGE


@pytest.mark.parametrize("name", names())
def test_a_drawing_tells_the_truth(name):
    shape = OF_ITS_OWN.get(name, CacheShape(layers=2, heads=2, dim=128, block_size=40, blocks=3))
    layout = load(name)
    text = describe(layout, shape)
    compiled = layout.compile(shape)
    lines = text.splitlines()
    assert lines[0].startswith(name)
    for word in (
        layout.source,
        f"{compiled.buffer_count} buffer",
        f"{compiled.pages} pages",
        f"{compiled.page_bytes} bytes",
    ):
        assert word in text
    tables = [i for i, line in enumerate(lines) if line.strip().startswith("slot / dim")]
    drawn = [
        (t, kv)
        for t in compiled.tensors
        if not t.of_scales
        for piece in t.pieces
        for kv in piece.kvs[: 1 if "kv" in t.buffers else None]
    ]
    assert len(tables) == len(drawn)
    for (tensor, kv), first in zip(drawn, tables, strict=True):
        dims = [int(word) for word in lines[first].split()[3:]]
        assert dims[0] == 0
        assert dims[-1] == tensor.shape.dim - 1
        for line in lines[first + 1 : first + 3]:
            slot, *cells = line.split()
            for dim, cell in zip(dims, cells, strict=True):
                where = compiled.locate(0, kv, 0, 0, int(slot), tensor.first + dim)
                _, channel, at, position = where
                page = at // tensor.page_stride * tensor.channels + channel
                assert cell == f"{page}:{position}"


def test_a_drawing_without_a_shape_uses_an_example():
    assert "for example: layer 2" in describe(load("vllm/nhd"))
    odd = Layout.from_toml(GOOD.replace("dim/R dim%R", "dim"))
    assert "for example" in describe(odd)
    small = Layout.from_toml(GOOD.replace("dim/R dim%R", "dim%R"))
    for shape in (None, SHAPE):
        with pytest.raises(LayoutError, match="missing"):
            describe(small, shape)
