"""The contract of a transport, as tests to inherit, and helpers for tests that move bytes.

    from hawk.transports.testing import TransportContract

    class TestMine(TransportContract):
        def make(self):
            return MyTransport(MyConfig(...))

That is all that a transport needs to be held to the contract by pytest.  See `ContractBase` for the hooks that
make some of the tests sharper.  The killed-process test starts Python on the file of the class, so the class
stands at the top level of its module and `make` needs nothing but that module.
"""

from __future__ import annotations

from hawk.transports.testing._access import AccessContract
from hawk.transports.testing._descriptors import descriptors, fresh
from hawk.transports.testing._ends import EndsContract, serve_in_child
from hawk.transports.testing._helpers import (
    CANARY,
    FRESH,
    Gate,
    HoldingMemory,
    SharedArena,
    Targets,
    pattern,
    scatter,
)
from hawk.transports.testing._moving import MovingContract
from hawk.transports.testing._rig import LIMIT, ContractBase, Rig, on_a_loop, refused

__all__ = [
    "CANARY",
    "FRESH",
    "LIMIT",
    "AccessContract",
    "ContractBase",
    "EndsContract",
    "Gate",
    "HoldingMemory",
    "MovingContract",
    "Rig",
    "SharedArena",
    "Targets",
    "TransportContract",
    "descriptors",
    "fresh",
    "on_a_loop",
    "pattern",
    "refused",
    "scatter",
    "serve_in_child",
]


class TransportContract(MovingContract, AccessContract, EndsContract):
    """What every transport has to show; subclass it and write `make`."""
