"""What tests of jobs share."""

import pytest

from hawk.jobs import dialogue


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was lost is asked for again at once."""
    monkeypatch.setattr(dialogue, "NUDGE", 0.02)
