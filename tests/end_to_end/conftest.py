"""Agents that tests share, and a fresh site for those that end them."""

from collections.abc import Iterator

import pytest

from tests.end_to_end.harness import AgentProcess, Site, npu


@pytest.fixture
def site() -> Iterator[Site]:
    """A site of the test's own."""
    made = Site()
    yield made
    made.close()


@pytest.fixture(scope="session")
def shared_site() -> Iterator[Site]:
    """The site of agents that no test ends."""
    made = Site()
    yield made
    made.close()


@pytest.fixture(scope="session")
def prefill(shared_site: Site) -> AgentProcess:
    """A prefill agent with every transport."""
    return shared_site.start("p0", {"transport": {"prefer": ["shm", "tcp"]}}, role="prefill")


DECODERS = {
    ("tcp", "direct"): "d0",
    ("tcp", "staged"): "d1",
    ("shm", "direct"): "d2",
    ("shm", "staged"): "d3",
}


class Decoders:
    """A decode agent for each transport and mode, started when first wanted."""

    def __init__(self, site: Site, prefill: AgentProcess) -> None:
        self._site = site
        self._prefill = prefill
        self._made: dict[str, AgentProcess] = {}

    def get(self, transport: str, mode: str) -> AgentProcess:
        name = DECODERS[transport, mode]
        if name not in self._made:
            self._made[name] = self._site.start(
                name,
                {
                    "transport": {"prefer": [transport], "mode": mode},
                    "peers": {"p0": self._prefill.control},
                    **{f"memory.npu{c}": npu(c) for c in (7, 8, 12)},
                },
                role="decode",
            )
        return self._made[name]


@pytest.fixture(scope="session")
def decoders(shared_site: Site, prefill: AgentProcess) -> Decoders:
    return Decoders(shared_site, prefill)
