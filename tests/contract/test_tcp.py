"""tcp meets the contract, with one stream and with several."""

from hawk.transports.tcp import TcpConfig, TcpTransport
from hawk.transports.testing import MovingContract, TransportContract

# Small buffers and pieces: the same paths as with the defaults, at a size that keeps the tests quick.
SMALL = {"socket_buffer": 128 << 10, "chunk": 256 << 10, "piece": 4 << 20}


class TestOneStream(TransportContract):
    takes_turns = True
    large = 12 << 20

    def make(self) -> TcpTransport:
        return TcpTransport(TcpConfig(streams=1, **SMALL))


class TestThreeStreams(TransportContract):
    large = 12 << 20

    def make(self) -> TcpTransport:
        return TcpTransport(TcpConfig(streams=3, **SMALL))


class TestDefaults(MovingContract):
    large = 40 << 20

    def make(self) -> TcpTransport:
        return TcpTransport()
