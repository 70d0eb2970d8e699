"""Rolling upgrade: peers of the version before, and of this, played from what they were recorded to say."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

import hawk
from hawk import connection
from hawk.control.frames import PROTOCOL_VERSION, Header, Kind, decode_header, encode_header, new_generation
from hawk.control.messages import LocalMessage, PeerMessage
from hawk.memory.region import Region, Segments
from hawk.transports.tcp import TcpTransport
from tests.end_to_end import caches as c
from tests.end_to_end.harness import LIMIT, AgentProcess, Site, clients
from tests.end_to_end.record import BLOCKS, CHUNK, SOURCE, TARGET, TOKENS, fill, record
from tests.recorded import Frame, job_of, lacks, recorded, versions

OLD = PROTOCOL_VERSION - 1
SPOKEN = [version for version in versions() if version >= OLD]
UNRECORDED = {"refused"}
"""Said only to a peer whose key is filed under another name, and the recorder's agents have no keys."""
JOBS = {"jobs": {"chunk": CHUNK, "lease": "5s"}}


async def test_the_recorder_meets_every_type_that_this_version_has() -> None:
    """So that the next version can be held to it: a new type needs its place in the recorder's story."""
    made = await record()
    assert made["protocol"] == PROTOCOL_VERSION
    for family, union in (("peer", PeerMessage), ("local", LocalMessage)):
        tags = {msgspec.inspect.type_info(kind).tag for kind in get_args(union)}
        assert {frame.get("type") for frame in made[family]} - {None} == tags - UNRECORDED


class OldPeer:
    """A program of some version: what it says is recorded, and it reads nothing that it does not know."""

    def __init__(self, sock: zmq.asyncio.Socket, side: str, version: int) -> None:
        self.sock = sock
        self.side = side
        self.version = version
        self.frames = recorded(version)["peer"]
        self.generation = new_generation()
        self.other = 0
        self.identity: list[bytes] = []
        self.refused = 0

    def first(self, kind: str) -> Frame:
        """The first recorded message of that type, or frame of that kind."""
        return next(f for f in self.frames if kind in (f.type, f.kind.name))

    async def say(self, frame: Frame, **changed: Any) -> None:
        """Sends a recorded frame, with what this run and not the recorded one decides put in."""
        assert frame.sender == self.side
        recorded_as = decode_header(frame.header, self.version)
        header = encode_header(Header(self.version, recorded_as.kind, self.generation, self.other))
        body = frame.with_fields(**changed) if changed else frame.body
        await self.sock.send_multipart([*self.identity, header, body])

    async def hear(self) -> dict[str, Any]:
        """The next message; pings are answered, and another version is refused, as the old program did."""
        async with asyncio.timeout(LIMIT):
            while True:
                *identity, header, body = await self.sock.recv_multipart()
                self.identity = identity
                if header[4] != self.version:
                    self.refused += 1
                    if header[5] != Kind.VERSION and identity:
                        version = self.first("VERSION")
                        await self.sock.send_multipart([*identity, version.header, version.body])
                    continue
                told = decode_header(header, self.version)
                assert told.to_generation in (0, self.generation)
                self.other = told.from_generation
                if told.kind is Kind.PING:
                    pong = encode_header(Header(self.version, Kind.PONG, self.generation, self.other))
                    await self.sock.send_multipart([*identity, pong, body])
                elif told.kind is Kind.MESSAGE:
                    message: dict[str, Any] = msgspec.msgpack.decode(body)
                    known = next((f.fields for f in self.frames if f.type == message["type"]), None)
                    assert known is not None, f"an old peer knows no {message['type']}"
                    assert not lacks(known, message)
                    return message

    async def hear_until(self, kind: str) -> list[dict[str, Any]]:
        """All messages up to the first of that type."""
        heard = [await self.hear()]
        while heard[-1]["type"] != kind:
            heard.append(await self.hear())
        return heard


Make = Callable[[int], zmq.asyncio.Socket]


@pytest.fixture
def make() -> Iterator[Make]:
    context = zmq.asyncio.Context()
    made: list[zmq.asyncio.Socket] = []

    def socket(kind: int) -> zmq.asyncio.Socket:
        made.append(context.socket(kind))
        return made[-1]

    yield socket
    for sock in made:
        sock.close(linger=0)
    context.term()


def secured(sock: zmq.asyncio.Socket, site: Site, name: str, server: str = "") -> zmq.asyncio.Socket:
    sock.curve_publickey = site.keys[name].public.encode()
    sock.curve_secretkey = site.keys[name].secret.encode()
    if server:
        sock.curve_serverkey = site.keys[server].public.encode()
    else:
        sock.curve_server = True
    return sock


@pytest.mark.parametrize("version", SPOKEN)
async def test_an_old_decode_side_fetches_from_this_version(site: Site, make: Make, version: int) -> None:
    prefill = site.start("p0", {**JOBS, "transport": {"prefer": ["tcp"]}}, role="prefill")
    sock = secured(make(zmq.DEALER), site, "d0", "p0")
    sock.connect(prefill.control)
    old = OldPeer(sock, "D", version)
    script = [f for f in job_of(old.frames, 0) if f.sender == "D"]
    told = {f.fields["chunk"]: f for f in job_of(old.frames, 0) if f.type == "prepared"}
    transport = TcpTransport()
    async with clients(prefill) as (hp,):
        source = hawk.KVCache.alloc(SOURCE)
        fill(source)
        cache = await hp.register(source)
        offer = await hp.offer("good", cache, [0, 1], tokens=TOKENS, consumer="d0", note=b"token 17")
        await transport.start()
        try:
            await old.say(old.first("hello"))
            welcome = (await old.hear_until("welcome"))[-1]
            link = await transport.connect(welcome["endpoints"]["tcp"], timeout=LIMIT)
            await old.say(script[0])
            accepted = (await old.hear_until("accepted"))[-1]
            assert (accepted["tokens"], accepted["chunks"], accepted["note"]) == (TOKENS, 2, b"token 17")
            await old.say(next(f for f in script if f.type == "poll"), consumed=[], seq=1)
            read: dict[int, bytes] = {}
            while len(read) < accepted["chunks"]:
                message = await old.hear()
                if message["type"] != "prepared" or message["chunk"] in read:
                    continue
                frame = told[message["chunk"]]
                same = ("layer", "layers", "block", "blocks", "nbytes")
                assert [message[name] for name in same] == [frame.fields[name] for name in same]
                into = Region("here", np.zeros(message["nbytes"], np.uint8))
                segments = Segments.of([(0, 0, message["offset"], message["nbytes"])])
                await link.read(message["key"], segments, [into], timeout=LIMIT)
                read[message["chunk"]] = into.array.tobytes()
                await old.say(next(f for f in script if f.fields.get("chunk") == message["chunk"]))
            assert read == {number: frame.carried for number, frame in told.items()}
            await old.say(script[-1])
            assert script[-1].type == "release"
            assert (await old.hear_until("released"))[-1]["job"] == script[-1].fields["job"]
            assert await offer.ended() == "consumed"
            await link.close()
        finally:
            await transport.close()
    assert old.refused == 0  # nothing but its own version was ever said to it


async def _serve(old: OldPeer, transport: TcpTransport) -> list[str]:
    """The prefill side of one job, by the recording; returns the types of what the other side said."""
    script = {f.type: f for f in job_of(old.frames, 0) if f.sender == "P"}
    chunks = {f.fields["chunk"]: f for f in job_of(old.frames, 0) if f.type == "prepared"}
    arena = Region("arena", np.zeros(len(chunks) * CHUNK, np.uint8))
    transport.serve(arena)
    heard: list[str] = []
    while True:
        message = await old.hear()
        heard.append(message["type"])
        match message["type"]:
            case "hello":
                await old.say(old.first("welcome"), endpoints={"tcp": transport.endpoint})
            case "fetch":
                await old.say(script["accepted"], job=message["job"])
                for number, frame in chunks.items():
                    at = number * CHUNK
                    arena.array[at : at + CHUNK] = np.frombuffer(frame.carried, np.uint8)
                    key = transport.grant(at, CHUNK).key
                    await old.say(frame, job=message["job"], offset=at, key=key)
            case "poll":
                await old.say(script["alive"], job=message["job"], seq=message["seq"])
            case "release":
                await old.say(script["released"], job=message["job"])
                return heard


@pytest.mark.parametrize("version", SPOKEN)
async def test_this_version_fetches_from_an_old_prefill_side(site: Site, make: Make, version: int) -> None:
    sock = secured(make(zmq.ROUTER), site, "p0")
    sock.bind("tcp://127.0.0.1:0")
    old = OldPeer(sock, "P", version)
    address = sock.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
    decode: AgentProcess = site.start(
        "d0",
        {
            **JOBS,
            "transport": {"prefer": ["tcp"]},
            "peers": {"p0": address},
            "memory.npu0": {"kind": "emulated-npu", "channels": 4, "capacity": "1MiB"},
        },
        role="decode",
    )
    transport = TcpTransport()
    await transport.start()
    try:
        async with clients(decode) as (hd,):
            device = await hd.allocate(TARGET, memory="npu0")
            c.paint(device)
            serving = asyncio.create_task(_serve(old, transport))
            ready = await hd.fetch(
                request="good", source="p0", into=device, blocks=BLOCKS, tokens=TOKENS, timeout="20s"
            )
            heard = await serving
            source = hawk.KVCache.alloc(SOURCE)
            fill(source)
            c.check(device, TARGET, c.Moved(source, [0, 1], BLOCKS, 0, TOKENS))
            assert (ready.tokens, ready.note) == (TOKENS, b"token 17")
            assert heard.count("consumed") == 2
    finally:
        await transport.close()
    # It began with its own version, and went down to the old one's.
    assert (old.refused >= 1) == (version < PROTOCOL_VERSION)


async def test_a_client_and_an_agent_of_neighbouring_versions(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What both know works; what only the newer one knows is refused by name, and not asked in vain."""
    prefill = site.start("p0", role="prefill")
    monkeypatch.setattr(connection, "Channel", functools.partial(connection.Channel, version=OLD))
    async with clients(prefill) as (hp,):
        assert hp.version == OLD
        cache = await hp.register(hawk.KVCache.alloc(SOURCE))
        offer = await hp.offer("r", cache, [0, 1], tokens=TOKENS)
        await offer.withdraw()
        assert (await hp.status()).offers == 0
        if OLD < 2:
            for question in (hp.peers, hp.jobs, hp.drain):
                with pytest.raises(hawk.VersionMismatch, match="too old"):
                    await question()
