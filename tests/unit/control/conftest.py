"""What the control tests share: loops of both kinds, and sockets that are closed afterwards."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from hawk.control.keys import KeyPair
from hawk.control.sockets import Sockets
from tests.unit.control.ends import Ends, MakeSockets
from tests.unit.control.sidecars import Agent

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def tmp_path(short_path: Path) -> Path:
    """Nearly every test here puts a socket into it."""
    return short_path


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


@pytest.fixture
async def ends(make_sockets: MakeSockets) -> AsyncIterator[Ends]:
    made = Ends(make_sockets)
    yield made
    for end in made.open:
        end.close()
        end.close()


@pytest.fixture(params=["tcp", "ipc"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/s"


@pytest.fixture
async def make_agent(tmp_path: Path) -> AsyncIterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def make(**kw: Any) -> Agent:
        made.append(Agent(tmp_path / "d0.sock.fd", **kw))
        return made[-1]

    yield make
    for agent in made:
        agent.sidecar.close()
        agent.sidecar.close()
    assert not os.listdir(tmp_path)
