"""What the grammar reads, and how it refuses the rest."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawk.errors import LayoutError
from hawk.layouts.grammar import (
    MAX_NUMBER,
    Binary,
    Group,
    Name,
    Number,
    Param,
    evaluate,
    parse_order,
    parse_rename,
    parse_split,
    show,
)


def test_an_order_keeps_its_terms_and_their_text():
    order = parse_order("block head slot/32 dim/32 | slot%32/16 dim%32/16 slot%16 dim%16")
    assert [t.text for t in order.page] == ["block", "head", "slot/32", "dim/32"]
    assert [t.text for t in order.inside] == ["slot%32/16", "dim%32/16", "slot%16", "dim%16"]
    assert order.inside[0].ops == (("%", Number(32)), ("/", Number(16)))
    assert [t.at for t in order.page] == [1, 7, 12, 20]


def test_without_a_cut_all_terms_are_in_the_page():
    order = parse_order(" kv block slot head dim ")
    assert (len(order.page), order.inside, order.cut) == (5, (), False)


def test_parentheses_fuse_and_nest():
    (term, last) = parse_order("((head dim)/16 slot)%R dim").page
    assert isinstance(term.base, Group)
    assert term.text == "((head dim)/16 slot)%R"
    assert term.ops == (("%", Param("R", 22)),)
    assert isinstance(term.base.terms[0].base, Group)
    assert last.base == Name("dim", 24)


def test_a_rename_is_one_term():
    name, (term,) = parse_rename("m = (dim%(R/2) dim/(R/2))")
    assert name == "m"
    assert isinstance(term.base, Group)
    assert [t.text for t in term.base.terms] == ["dim%(R/2)", "dim/(R/2)"]
    assert term.base.terms[0].ops == (("%", Binary("/", Param("R", 11), Number(2), 12)),)


def test_a_rename_may_be_a_sum():
    name, terms = parse_rename("m = (rope%8 rope/8) + rest")
    assert (name, [t.text for t in terms]) == ("m", ["(rope%8 rope/8)", "rest"])


def test_a_split_names_parts_and_sizes():
    assert parse_split("dim = latent:512 + rope:(R/2) + rest").parts == (
        ("latent", Number(512)),
        ("rope", Binary("/", Param("R", 26), Number(2), 27)),
        ("rest", None),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dims = a:1", ["'dims'", "dim"]),
        ("slot = a:1", ["'slot' at column 1", "dim"]),
        ("dim", ["end of the text", "'='"]),
        ("dim = ", ["a new name"]),
        ("dim = head:2", ["not an axis"]),
        ("dim = a:", ["a number"]),
        ("dim = a + b:2", ["takes all that is left"]),
        ("dim = a:2 b:2", ["'b' at column 11"]),
        ("dim = " + " + ".join(f"p{i}:1" for i in range(9)), ["at most 8"]),
    ],
)
def test_a_split_that_cannot_be_read(text, words):
    with pytest.raises(LayoutError) as caught:
        parse_split(text)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(R/2)", 32),
        ("(R*2+4)", 132),
        ("(4+R*2)", 132),
        ("((R-4)/3)", 20),
        ("(R/2/2)", 16),
        ("7", 7),
        ("R", 64),
    ],
)
def test_arithmetic_binds_as_usual(text, value):
    (term,) = parse_order(f"dim%{text}").page
    assert evaluate(term.ops[0][1], {"R": 64}, "order") == value
    assert show(term.ops[0][1]).replace("(", "").replace(")", "") == text.replace("(", "").replace(")", "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(R/3)", ["64 / 3", "even"]),
        ("(R-64)", ["= 0", "positive"]),
        ("(R-65)", ["= -1"]),
        ("(R/(R-64))", ["64 / 0"]),
        ("0", ["= 0"]),
        ("Q", ["'Q'", "column 5", "R"]),
        ("(1099511627776*1099511627776)", ["too large"]),
    ],
)
def test_arithmetic_that_gives_no_number(text, words):
    (term,) = parse_order(f"dim%{text}").page
    with pytest.raises(LayoutError) as caught:
        evaluate(term.ops[0][1], {"R": 64}, "order")
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["end of the text", "an axis or '('"]),
        ("block head |", ["column 13", "an axis or '('"]),
        ("| slot", ["'|' at column 1"]),
        ("block | head | slot", ["'|' at column 14", "the end"]),
        ("block slot/", ["end of the text at column 12", "a number"]),
        ("block slot//2", ["'/' at column 12", "a number"]),
        ("block (slot dim", ["column 16", "')'"]),
        ("block slot) dim", ["')' at column 11"]),
        ("()", ["')' at column 2", "an axis"]),
        ("block slot%(R/2", ["')'"]),
        ("block 32", ["'32' at column 7"]),
        ("block, head", ["',' at column 6"]),
        ("block slot*2", ["'*' at column 11"]),
        ("block\x00head", ["'\\x00' at column 6"]),
        ("dim%" + "9" * 5000, ["too long"]),
        ("dim%" + "9" * 4000, ["too large"]),
        (f"dim%{MAX_NUMBER + 1}", ["too large"]),
        ("(" * 1000 + "dim", ["nested"]),
        ("dim%" + "(" * 1000 + "2", ["nested"]),
        ("dim%(2" + "+2" * 1000 + ")", ["in a row"]),
        ("block " * 1000, ["too long"]),
    ],
)
def test_an_order_that_cannot_be_read(text, words):
    with pytest.raises(LayoutError) as caught:
        parse_order(text, "file: piece[0].order")
    message = str(caught.value)
    assert message.startswith("file: piece[0].order: ")
    assert all(word in message for word in words), message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dim = dim", ["'dim' at column 1", "not an axis"]),
        ("m dim", ["'dim' at column 3", "'='"]),
        ("= dim", ["'=' at column 1", "a new name"]),
        ("m = dim slot", ["'slot' at column 9", "parentheses"]),
        ("m =", ["end of the text"]),
    ],
)
def test_a_rename_that_cannot_be_read(text, words):
    with pytest.raises(LayoutError) as caught:
        parse_rename(text)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@given(st.text(alphabet="kvblockheadslotdim 0123456789()/%|=*+-R\n\té", max_size=200))
def test_any_text_is_read_or_refused(text):
    for parse in (parse_order, parse_rename, parse_split):
        with contextlib.suppress(LayoutError):
            parse(text)
