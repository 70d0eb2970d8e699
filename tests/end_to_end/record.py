"""Records what agents of this version write to each other and to their clients: `tests/data/protocol-N.json`.

    python -m tests.end_to_end.record > tests/data/protocol-N.json

Run once for each protocol version.  `test_protocol.py` replays the recordings, so that an agent of version N + 1 is
held to what one of version N really says, and a later one of version N too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

import hawk
from hawk.agent import Agent
from hawk.client import Client
from hawk.config import load_config
from hawk.control.frames import (
    PROTOCOL_VERSION,
    Header,
    Kind,
    decode_header,
    encode_body,
    encode_header,
    new_generation,
)
from hawk.control.sockets import Endpoint
from hawk.errors import HawkError
from tests.end_to_end import caches as c

SOURCE = c.source_spec(layers=2, heads=1, dim=32, block_size=16, blocks=2)
TARGET = c.target_spec(layers=2, heads=1, dim=32, block_size=32, blocks=2)
TOKENS = 32
BLOCKS = [1]
"""The request's blocks in the target: one, so that a chunk is one layer of it."""
CHUNK = 4096


def fill(cache: hawk.KVCache) -> None:
    """Bits that are the same on every machine and with every library."""
    for layer, buffer in enumerate(cache.buffers):
        rows = buffer.view(np.uint16)
        rows[:] = (np.arange(rows.size) * 40_503 + layer * 7_919) & 0xFFFF


class Recorder:
    """Keeps what the sockets of this process send: all that agents say to each other, one of each local message."""

    def __init__(self, prefill: Agent) -> None:
        self.peer: list[dict[str, Any]] = []
        self.local: dict[str, dict[str, Any]] = {}
        self._prefill = prefill
        # Which machine it was is nobody's business; as long as it was, so that it fits in its place.
        self._machine = prefill.transports["tcp"].endpoint["net"].encode()

    def took(self, endpoint: Endpoint, frames: Sequence[bytes], identity: bytes | None) -> None:
        header = decode_header(frames[0])
        body = frames[1].replace(self._machine, b"0" * len(self._machine))
        entry: dict[str, Any] = {
            "from": "client" if identity is None else "agent",
            "kind": header.kind.name,
            "header": frames[0].hex(),
            "body": body.hex(),
        }
        if header.kind is Kind.MESSAGE:
            fields = msgspec.msgpack.decode(body)
            entry["type"] = fields.pop("type")
            entry["fields"] = _plain(fields)
        if endpoint.address.startswith("ipc://"):
            if header.kind is Kind.MESSAGE:
                self.local.setdefault(entry["type"], entry)
            return
        entry["from"] = "D" if identity is None else "P"
        if entry.get("type") == "prepared":
            offset, nbytes = fields["offset"], fields["nbytes"]
            entry["bytes"] = self._prefill.arena.region.array[offset : offset + nbytes].tobytes().hex()
        if header.kind is Kind.MESSAGE or all(entry["kind"] != old["kind"] for old in self.peer):
            self.peer.append(entry)


def _plain(value: Any) -> Any:
    """The value as JSON can hold it; bytes as {"hex": ...}."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {key: _plain(below) for key, below in value.items()}
    return [_plain(below) for below in value] if isinstance(value, list) else value


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Everything that is sent inside the block goes to the recorder too."""
    real = Endpoint.send

    def send(self: Endpoint, frames: Sequence[bytes], identity: bytes | None = None) -> None:
        real(self, frames, identity)
        recorder.took(self, frames, identity)

    Endpoint.send = send  # type: ignore[method-assign]
    try:
        yield
    finally:
        Endpoint.send = real  # type: ignore[method-assign]


def agent(folder: Path, name: str, role: str, more: str = "") -> Agent:
    """An agent without keys whose chunks are one layer each, and whose consumers have to poll often."""
    path = folder / f"{name}.toml"
    path.write_text(
        f'[agent]\nname = "{name}"\nrole = "{role}"\nlocal = "ipc://{folder}/{name}.sock"\ninsecure = true\n'
        f'[arena]\nsize = "1MiB"\n[jobs]\nchunk = {CHUNK}\nlease = "2s"\n[transport]\nprefer = ["tcp"]\n{more}'
    )
    return Agent(load_config(path, {})[0])


DEVICE = '[memory.npu0]\nkind = "emulated-npu"\ncapacity = "1MiB"\nchannels = 4\n'


async def _story(hp: Client, hd: Client, seen: Recorder) -> None:
    """A job that ends ready, one that is aborted, and a call of every kind."""
    source = hawk.KVCache.alloc(SOURCE)
    fill(source)
    cache, device = await hp.register(source), await hd.allocate(TARGET, memory="npu0")
    offer = await hp.offer(
        "good", cache, [0, 1], tokens=TOKENS, layers_ready=1, consumer="d0", note=b"token 17"
    )
    job = hd.fetch(request="good", source="p0", into=device, blocks=BLOCKS, timeout="30s")
    await job.start()
    while not any(frame.get("type") == "alive" for frame in seen.peer):
        await asyncio.sleep(0.05)
    await offer.layers_ready(SOURCE.layers)
    await job
    await offer.ended()
    stuck = await hp.offer("stuck", cache, [0, 1], tokens=TOKENS, layers_ready=1)
    job = hd.fetch(stuck, into=device, blocks=BLOCKS, timeout="30s")
    await job.start()
    async for progress in job.progress():
        if progress.nbytes:
            break
    await job.abort()
    await stuck.withdraw()
    await hp.forgo("given up", "c" * 32, why="its prefill failed")
    halves = []
    for layer in range(SOURCE.layers):
        half = hawk.KVCache.alloc(SOURCE.shard(layers=range(layer, layer + 1)))
        fill(half)
        halves.append(await hp.register(half))
    parts = [await hp.offer("parts", half, [0, 1], tokens=TOKENS) for half in halves]
    await hd.fetch(parts, into=device, blocks=BLOCKS, timeout="30s")
    for part in parts:
        await part.ended()
    with contextlib.suppress(HawkError):  # answered by `Failed`, which is wanted here
        await hp.offer("none", cache, [9], tokens=TOKENS)
    await hd.try_peer("p0")
    await hp.status()
    await hp.peers()
    await hp.jobs()
    await hp.drain()
    await cache.release()


def _refusal(address: str) -> dict[str, Any]:
    """What a server of this version answers to one that is newer."""
    newer = encode_header(Header(PROTOCOL_VERSION + 1, Kind.PING, new_generation(), 0))
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.connect(address)
        sock.send_multipart([newer, encode_body([1])])
        header, body = sock.recv_multipart()
    return {"from": "P", "kind": "VERSION", "header": header.hex(), "body": body.hex()}


async def record() -> dict[str, Any]:
    """All of it, as what goes into the file."""
    with tempfile.TemporaryDirectory() as name:
        async with agent(Path(name), "p0", "prefill") as p:
            peers = f'[peers]\np0 = "{p.control_address}"\n'
            async with agent(Path(name), "d0", "decode", DEVICE + peers) as d:
                recorder = Recorder(p)
                with recording(recorder):
                    # By their addresses: what passes through a socket is recorded.
                    addresses = p.config.agent.local, d.config.agent.local
                    async with hawk.connect(addresses[0]) as hp, hawk.connect(addresses[1]) as hd:
                        await _story(hp, hd, recorder)
                loop = asyncio.get_running_loop()
                refusal = await loop.run_in_executor(None, _refusal, p.control_address)
    return {
        "protocol": PROTOCOL_VERSION,
        "peer": [refusal, *recorder.peer],
        "local": [recorder.local[kind] for kind in sorted(recorder.local)],
    }


def _written(recorded: dict[str, Any]) -> str:
    """One frame a line, so that a difference between two recordings can be read."""
    parts = [f'{{"protocol": {recorded["protocol"]}']
    for family in ("peer", "local"):
        lines = ",\n".join(json.dumps(frame) for frame in recorded[family])
        parts.append(f'"{family}": [\n{lines}\n]')
    return ",\n".join(parts) + "}\n"


if __name__ == "__main__":
    print(_written(asyncio.run(record())), end="")
