"""One model, one prefill, and a pair of agents as processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.end_to_end.harness import AgentProcess, Site, npu
from tests.model.llama import Prefilled, make_model, make_prompt, prefill

PROMPT = 77
"""Tokens: more than one block on either side, and no multiple of any."""


@pytest.fixture(scope="session")
def model() -> torch.nn.Module:
    torch.set_num_threads(2)
    return make_model()


@pytest.fixture(scope="session")
def prefilled(model: torch.nn.Module) -> Prefilled:
    return prefill(model, make_prompt(PROMPT))


@pytest.fixture(scope="session")
def pair() -> Iterator[tuple[AgentProcess, AgentProcess]]:
    """A prefill and a decode agent."""
    site = Site()
    p0 = site.start("p0", role="prefill")
    d0 = site.start("d0", {"memory.npu0": npu(8, "16MiB"), "peers": {"p0": p0.control}}, role="decode")
    yield p0, d0
    site.close()
