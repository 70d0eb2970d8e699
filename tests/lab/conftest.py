"""The lab's tests share guests: the lab is made once, and guests are booted when a test asks for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "lib"))

from vmlab import Lab, SuiteResult

RESULTS: list[SuiteResult] = []
BOOTS: list[float] = []


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")

    def say(text: str) -> None:
        if reporter is not None:
            reporter.write_line(f"lab: {text}")

    # Both at once where there are suites to run, nearly all of which need both.
    least = 2 if any("suites" in item.fixturenames for item in request.session.items) else 1  # type: ignore[attr-defined]
    with Lab(say=say, least=least) as made:
        yield made
        BOOTS.extend(made.boots)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if BOOTS:
        times = ", ".join(f"{seconds:.0f}" for seconds in BOOTS)
        terminalreporter.section("lab")
        terminalreporter.write_line(f"boots: {times} s")
    for result in RESULTS:
        terminalreporter.write_line(result.line())
