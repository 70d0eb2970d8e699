"""Every suite of suites.toml, in as few boots as can be; suites of one guest run beside each other where they may."""

from __future__ import annotations

import pytest
from vmlab import Lab, Suite, load_suites, together

from tests.lab.conftest import RESULTS

PLAN = together([suite for suite in load_suites().values() if not suite.by_hand])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("suites", PLAN, ids=lambda suites: "+".join(suite.name for suite in suites))
def test_suites(lab: Lab, suites: tuple[Suite, ...]) -> None:
    results = lab.run_together(suites)
    RESULTS.extend(results)
    bad = [result.report() for result in results if not result.ok]
    assert not bad, "\n".join(bad)
