"""shm meets the contract, with one thread and with several."""

from hawk.transports.shm import ShmConfig, ShmTransport
from hawk.transports.testing import TransportContract

SMALL = {"chunk": 256 << 10, "piece": 4 << 20, "grace": 0.2}


class TestOneThread(TransportContract):
    takes_turns = True
    large = 12 << 20

    def make(self) -> ShmTransport:
        return ShmTransport(ShmConfig(**SMALL))


class TestThreeThreads(TransportContract):
    large = 12 << 20

    def make(self) -> ShmTransport:
        return ShmTransport(ShmConfig(threads=3, **SMALL))
