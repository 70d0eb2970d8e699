"""A server and its channels, for the tests of links."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from hawk.control.frames import Codec, Header
from hawk.control.link import Beat, Channel, Server
from hawk.control.sockets import Endpoint, Limits, Sockets

MakeSockets = Callable[..., Sockets]


class Text(msgspec.Struct, tag=True):
    text: str
    blob: bytes = b""


CODEC: Codec[Text] = Codec(msgspec.msgpack.Decoder(Text))
QUICK = Beat(interval=0.05, timeout=0.5)
SLOW = Beat(interval=30.0, timeout=300.0)


class Ends:
    """Servers and channels of one test, with everything they said in one queue."""

    def __init__(self, make_sockets: MakeSockets) -> None:
        self.make_sockets = make_sockets
        self.events: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.open: list[Server[Text] | Channel[Text]] = []

    def server(self, address: str, *, echo: bool = False, **kw: Any) -> Server[Text]:
        put = self.events.put_nowait

        def take(identity: bytes, header: Header, message: Text) -> None:
            if echo:
                made.send(identity, message)
            put(("server", message.text, identity, header))

        made: Server[Text] = Server(
            self.make_sockets(insecure=True).router(address),
            CODEC,
            take,
            on_bad=lambda identity, error: put(("bad", error, identity)),
            on_gone=lambda peer, error: put(("gone", peer, error)),
            **{"beat": QUICK, **kw},
        )
        made.start()
        self.open.append(made)
        return made

    def channel(self, address: str | Endpoint, *, limits: Limits | None = None, **kw: Any) -> Channel[Text]:
        put = self.events.put_nowait
        if isinstance(address, str):
            address = self.make_sockets(insecure=True, limits=limits).dealer(address)
        made: Channel[Text] = Channel(
            address,
            CODEC,
            lambda header, message: put(("channel", message.text, header)),
            on_lost=lambda error: put(("lost", error)),
            on_restarted=lambda old, new: put(("restarted", old, new)),
            on_up=lambda: put(("up",)),
            on_bad=lambda error: put(("bad-channel", error)),
            **{"peer": "d0", "beat": QUICK, **kw},
        )
        made.start()
        self.open.append(made)
        return made

    async def next(self, kind: str) -> tuple[Any, ...]:
        """The next event of a kind; others are passed over."""
        async with asyncio.timeout(30):
            while True:
                event = await self.events.get()
                if event[0] == kind:
                    return event
