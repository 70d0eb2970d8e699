"""The layering contract itself: it sees what it should, and only that."""

import grimp
import pytest

from tests.layering import MayImport


def _contract(**options: object) -> MayImport:
    return MayImport(name="it", session_options={}, contract_options=options)


@pytest.fixture
def graph() -> grimp.ImportGraph:
    graph = grimp.ImportGraph()
    graph.add_import(importer="hawk.low.a", imported="hawk.low.b", line_number=1, line_contents="import b")
    graph.add_import(
        importer="hawk.low.a", imported="hawk.errors", line_number=2, line_contents="import errors"
    )
    graph.add_import(
        importer="hawk.low.b", imported="hawk.lower", line_number=3, line_contents="import lower"
    )
    graph.add_import(importer="hawk.high", imported="hawk.low.a", line_number=4, line_contents="import low")
    return graph


def test_what_is_allowed_passes(graph: grimp.ImportGraph) -> None:
    check = _contract(modules=["hawk.low"], allowed=["hawk.errors", "hawk.lower"]).check(graph, False)
    assert check.kept
    assert check.metadata["seen"] == 2


def test_anything_else_is_named_with_its_line(graph: grimp.ImportGraph) -> None:
    check = _contract(modules=["hawk.low"], allowed=["hawk.errors"]).check(graph, False)
    assert not check.kept
    (fault,) = check.metadata["broken"]
    assert (fault["importer"], fault["imported"], fault["line_number"]) == ("hawk.low.b", "hawk.lower", 3)


def test_a_leaf_may_import_nothing(graph: grimp.ImportGraph) -> None:
    assert _contract(modules=["hawk.lower"]).check(graph, False).kept
    assert not _contract(modules=["hawk.high"]).check(graph, False).kept
