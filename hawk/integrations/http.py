"""As much of HTTP/1.1 as a proxy between engines needs: one request a connection, bodies as they come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hawk.errors import BadFrame, InvalidArgument, PeerLost, PeerUnreachable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

HEAD = 64 << 10
"""Bytes of a request's or answer's head, at most."""

BODY = 256 << 20
"""Bytes of a body that is read whole, at most."""

CONNECT = 5.0
"""Seconds for a connection to a server."""

_PIECE = 64 << 10
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Head:
    """First line and headers of a request or an answer; names of headers in lower case."""

    first: tuple[str, str, str]
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes = b""

    @property
    def status(self) -> int:
        """An answer's number."""
        return int(self.first[1]) if self.first[1].isdecimal() else 0


@dataclass(frozen=True, slots=True)
class Server:
    """Where an engine's HTTP server is, from `http://HOST:PORT`."""

    host: str
    port: int

    @classmethod
    def parse(cls, address: str, field: str, expected: str = "http://HOST:PORT") -> Server:
        """Raises `InvalidArgument`, saying why, for what is no such address."""

        def wrong(why: str) -> InvalidArgument:
            return InvalidArgument(why, field=field, got=address, expected=expected)

        try:
            parts = urlsplit(address if "//" in address else f"//{address}")
            host = parts.hostname
        except ValueError:
            raise wrong("no address of a server") from None
        if parts.scheme not in ("", "http"):
            raise wrong(f"engines are asked by plain http, not by {parts.scheme}")
        if not host or (address.isdecimal() and "//" not in address):
            raise wrong("the host is missing")
        try:
            port = parts.port
        except ValueError:
            raise wrong("no port: it is a number up to 65535") from None
        if port is None:
            raise wrong("the port is missing")
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise wrong("an address ends with its port: the path is each request's own")
        return cls(host, port)

    def __str__(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next head; None where the other side has closed before one.  Raises `BadFrame`."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as end:
        if not end.partial:
            return None
        raise BadFrame("the connection ended inside a head", field="http") from end
    except asyncio.LimitOverrunError as fault:
        raise BadFrame("the head is too long", field="http", expected=f"{HEAD} bytes at most") from fault
    line, *lines = raw[:-4].decode("latin-1").split("\r\n")
    first = line.split(" ", 2)
    headers = {}
    for text in lines:
        name, colon, value = text.partition(":")
        if not colon or not name or name != name.strip() or _CONTROL.search(text):
            raise BadFrame("no header", field="http", got=text[:80])
        headers[name.lower()] = value.strip()
    if len(first) < 2 or _CONTROL.search(line) or "\t" in line:
        raise BadFrame("no first line", field="http", got=line[:80])
    return Head((first[0], first[1], first[2] if len(first) > 2 else ""), headers, raw)


async def read_body(reader: asyncio.StreamReader, head: Head, *, answer: bool = False) -> bytes:
    """The whole body, whichever way its length is said; an answer's may last until the end.  Raises `BadFrame`."""
    return b"".join([piece async for piece in pieces(reader, head, answer=answer)])


async def pieces(reader: asyncio.StreamReader, head: Head, *, answer: bool = False) -> AsyncIterator[bytes]:
    """A body's bytes as they come, none of them empty; for its length see `read_body`.  Raises `BadFrame`."""
    left = BODY
    if "chunked" in head.headers.get("transfer-encoding", "").lower():
        while piece := await _chunk(reader, left):
            left -= len(piece)
            yield piece
        return
    length = head.headers.get("content-length")
    if length is None:
        while answer and (piece := await reader.read(_PIECE)):
            left -= len(piece)
            if left < 0:
                raise BadFrame("the body is too long", field="http", expected=f"{BODY} bytes at most")
            yield piece
        return
    if not length.isdecimal() or int(length) > BODY:
        raise BadFrame(
            "no length of a bearable body", field="content-length", got=length, expected=f"0..{BODY}"
        )
    if int(length):
        yield await reader.readexactly(int(length))


async def _chunk(reader: asyncio.StreamReader, most: int) -> bytes:
    """The next chunk, of `most` bytes at most; nothing after the last."""
    line = (await _line(reader)).split(b";")[0].strip()
    try:
        size = int(line, 16)
    except ValueError:
        raise BadFrame("no chunk", field="http", got=line[:20]) from None
    if not 0 <= size <= most:
        raise BadFrame("the body is too long", field="http", expected=f"{BODY} bytes at most")
    if size == 0:
        while (await _line(reader)).strip():
            continue
        return b""
    piece = await reader.readexactly(size)
    if await reader.readexactly(2) != b"\r\n":
        raise BadFrame("a chunk is longer than it says", field="http", expected=f"{size} bytes")
    return piece


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ValueError as fault:
        raise BadFrame("the line is too long", field="http", expected=f"{HEAD} bytes at most") from fault


def go_on(head: Head) -> bytes:
    """What a client is told that sends its body only then; nothing to others."""
    waits = head.headers.get("expect", "").lower() == "100-continue"
    return b"HTTP/1.1 100 Continue\r\n\r\n" if waits else b""


def request(method: str, path: str, host: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """The bytes of a request on a connection of its own."""
    lines = [
        f"{method} {path} HTTP/1.1",
        f"host: {host}",
        "connection: close",
        f"content-length: {len(body)}",
    ]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def answer(status: int, reason: str, body: Mapping[str, Any]) -> bytes:
    """The bytes of an answer of our own, JSON."""
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + text


@contextlib.asynccontextmanager
async def asked(server: Server, sent: bytes) -> AsyncIterator[tuple[Head, asyncio.StreamReader]]:
    """Sends a request and gives the answer's head and the rest to read; leaving closes the connection.

    Raises `PeerUnreachable` where nobody answers, `PeerLost` where the connection ends before the answer's head.
    """
    try:
        async with asyncio.timeout(CONNECT):
            reader, writer = await asyncio.open_connection(server.host, server.port, limit=HEAD)
    except (OSError, TimeoutError) as fault:
        raise PeerUnreachable("no server answers", address=server, reason=str(fault) or "timeout") from fault
    try:
        try:
            writer.write(sent)
            await writer.drain()
            head = await read_head(reader)
        except OSError as fault:
            raise PeerLost("the connection broke", address=server, reason=str(fault)) from fault
        except BadFrame as fault:
            raise PeerLost("the server's answer is none", address=server, reason=str(fault)) from fault
        if head is None:
            raise PeerLost("the server closed the connection", address=server)
        yield head, reader
    finally:
        writer.close()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await writer.wait_closed()
