"""An agent whose RDMA devices are without hardware: `python fake_verbs.py --config ...`."""

from __future__ import annotations

import dataclasses
import os

from hawk.cli import agent_main
from hawk.transports import verbs
from hawk.transports.base import Viability
from hawk.transports.verbs.testing import PORT, FakeDriver


def driver() -> FakeDriver:
    """What the agent takes for the machine's devices; with FAKE_VERBS=down their cable is not plugged in."""
    active = os.environ.get("FAKE_VERBS") != "down"
    return FakeDriver(ports={"fake0": [dataclasses.replace(PORT, active=active)]})


def main() -> None:
    verbs.PyverbsDriver = driver  # type: ignore[misc, assignment]
    verbs.VerbsTransport.probe = classmethod(lambda cls: Viability(True))  # type: ignore[method-assign, assignment]
    agent_main()


if __name__ == "__main__":
    main()
