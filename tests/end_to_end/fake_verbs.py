"""An agent whose RDMA devices are without hardware: `python fake_verbs.py --config ...`."""

from __future__ import annotations

from hawk.cli import agent_main
from hawk.transports import verbs
from hawk.transports.base import Viability
from hawk.transports.verbs.testing import FakeDriver


def main() -> None:
    verbs.PyverbsDriver = FakeDriver  # type: ignore[misc, assignment]
    verbs.VerbsTransport.probe = classmethod(lambda cls: Viability(True))  # type: ignore[method-assign, assignment]
    agent_main()


if __name__ == "__main__":
    main()
