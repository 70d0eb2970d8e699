"""`hawk bench simulator`: rows for each cluster, and what it is told."""

import io
import json

import pytest
from rich.console import Console

from hawk.bench import simulator
from hawk.errors import InvalidArgument


def test_rows_say_what_an_event_costs() -> None:
    found = simulator.run(nodes=(2, 40), requests=300)
    assert [row.nodes for row in found.rows] == [2, 40]
    for row in found.rows:
        assert row.requests == 300
        assert 4 < row.per_request < 9
        assert row.cpu > 0
        assert row.alone > 0
    assert json.loads(json.dumps(found.to_dict()))["rows"][1]["us_per_event"] > 0
    screen = io.StringIO()
    simulator.render(found, Console(file=screen, width=100))
    assert "us/event" in screen.getvalue()


def test_too_few_nodes_are_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        simulator.run(nodes=(1,))
    assert caught.value.field == "nodes"
