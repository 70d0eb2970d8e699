"""What the control tests share: loops of both kinds, and sockets that are closed afterwards."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
import uvloop

from hawk.control.keys import KeyPair
from hawk.control.sockets import Sockets

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=sorted(LOOPS))
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """Runs coroutines on a plain asyncio loop, and again on uvloop."""
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as made:
        yield made


@pytest.fixture
def make_sockets() -> Iterator[Callable[..., Sockets]]:
    """`Sockets(...)`, closed when the test ends.  A context that cannot end would hang the test."""
    made: list[Sockets] = []

    def make(**kw: object) -> Sockets:
        sockets = Sockets(**kw)
        made.append(sockets)
        return sockets

    yield make
    for sockets in made:
        sockets.close()


@pytest.fixture
def new_key() -> Callable[[str], KeyPair]:
    import zmq

    def make(name: str) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return KeyPair(name, public.decode(), secret.decode())

    return make
