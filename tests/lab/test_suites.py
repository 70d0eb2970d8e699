"""Every suite of suites.toml, in as few boots as can be: both guests are booted where any suite needs two."""

from __future__ import annotations

import pytest
from vmlab import Lab, load_suites

from tests.lab.conftest import RESULTS

SUITES = load_suites()


@pytest.fixture(scope="module")
def booted(request: pytest.FixtureRequest, lab: Lab) -> Lab:
    chosen = [SUITES[name] for item in request.session.items if (name := _suite_of(item)) in SUITES]
    lab.guests(max(suite.guests for suite in chosen))
    return lab


def _suite_of(item: pytest.Item) -> str:
    return getattr(item, "callspec", None) and item.callspec.params.get("name", "")  # type: ignore[attr-defined]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name, suite in SUITES.items() if not suite.by_hand])
def test_suite(booted: Lab, name: str) -> None:
    result = booted.run(SUITES[name])
    RESULTS.append(result)
    assert result.ok, result.report()
