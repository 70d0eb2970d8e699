"""A proxy in front of prefill and decode engines that speak OpenAI's HTTP: it has both begin at once.

The first request to a prefill engine goes in sequence, prefill and then decode: its answer says where the engine's
agents are.  From then on a request goes to both sides at once under a transfer's name that the proxy draws, so that the
decode engine's fetch is there while the prefill runs.  Where the prefill fails the decode engine computes by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hawk.errors import BadFrame, Busy, DeadlineExceeded, HawkError, InternalError, InvalidArgument, PeerLost
from hawk.integrations import http
from hawk.integrations.remote import new_transfer
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from hawk.integrations.http import Head, Server

log = get_log("hawk.integrations.proxy")

READ = 60.0
"""Seconds in which a client has to have said its request."""

PATHS = ("/v1/completions", "/v1/chat/completions")
"""What is prefilled apart; all else goes to a decode engine as it is."""

_PLACE = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size")
_PASSED = ("authorization", "content-type", "accept", "x-request-id", "openai-organization")


@dataclass(eq=False)
class Prefill:
    """A prefill engine; `place` is what it said of its agents, or nothing yet."""

    server: Server
    place: dict[str, Any] = field(default_factory=dict)

    def learn(self, params: Mapping[str, Any]) -> bool:
        """Takes over where its agents are; whether that is new.  One of several engines tells nothing of the others."""
        known = params.get("hawk_early") is not False
        place = {key: params[key] for key in _PLACE if key in params and known}
        old, self.place = self.place, place
        return old != place


class Proxy:
    """Serves clients until it is closed.

    early    whether both sides begin at once; otherwise nothing overlaps but the chunks of a transfer
    most     clients at a time; more are told to come again
    """

    def __init__(
        self, prefills: Sequence[Server], decodes: Sequence[Server], *, early: bool = True, most: int = 4096
    ) -> None:
        self._most = most
        self._prefills = itertools.cycle([Prefill(server) for server in prefills])
        self._decodes = itertools.cycle(decodes)
        self._early = early
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port, which the system chooses for 0.  Raises `InvalidArgument`."""
        try:
            self._server = await asyncio.start_server(
                self._accepted, host, port, limit=http.HEAD, backlog=2048
            )
        except OSError as fault:
            reason = fault.strerror or str(fault)
            if fault.errno == errno.EADDRINUSE:
                reason = "another program listens there"
            raise InvalidArgument(
                "cannot listen", field="--listen", got=f"{host}:{port}", reason=reason
            ) from fault
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Ends every request."""
        if self._server is not None:
            self._server.close()
        for task in list(self._clients):
            task.cancel()
        if self._clients:
            await asyncio.wait(set(self._clients))
        if self._server is not None:
            await self._server.wait_closed()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._client(reader, writer))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._clients) > self._most:
                raise Busy("too many clients", retry_after=1.0)
            async with asyncio.timeout(READ):
                head, body = await http.read_head(reader), b""
                if head is not None:
                    writer.write(http.go_on(head))
                    body = await http.read_body(reader, head)
            if head is not None:
                await _unless_gone(reader, self._serve(head, body, writer))
        except BadFrame as fault:
            _say(writer, 400, "Bad Request", fault)
        except Busy as fault:
            _say(writer, 503, "Service Unavailable", fault)
        except TimeoutError:
            _say(
                writer,
                408,
                "Request Timeout",
                DeadlineExceeded("the request did not come in time", seconds=READ),
            )
        except HawkError as fault:
            log.warning("request failed", reason=str(fault))
            _say(writer, 502, "Bad Gateway", fault)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has left
        except Exception as fault:  # one request's; the others go on
            log.exception("request failed")
            _say(
                writer, 500, "Internal Server Error", InternalError("the request failed", reason=repr(fault))
            )
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _serve(self, head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
        decode = next(self._decodes)
        asked = _parsed(body) if head.first[0] == "POST" else None
        if asked is not None and asked.pop("kv_transfer_params", None) is not None:
            body = json.dumps(asked).encode()  # they say where an engine connects to: no client's word
        if asked is None or head.first[1].partition("?")[0] not in PATHS or not _single(asked):
            await _pass(decode, head, body, writer)  # several would fetch one prefill
            return
        prefill = next(self._prefills)
        if self._early and prefill.place:
            await self._at_once(prefill, decode, head, asked, writer)
        else:
            params = await self._prefilled(prefill, head, asked, {"do_remote_decode": True})
            try:
                await _decode(decode, head, asked, params, writer)
            except HawkError as fault:
                if params is None:
                    fault.facts["failed_too"] = str(prefill.server)
                raise

    async def _prefilled(
        self, prefill: Prefill, head: Head, asked: Mapping[str, Any], params: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Has a prompt prefilled; what the decode engine needs to know, or None where it did not work."""
        short = {**asked, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
        short.pop("stream_options", None)
        for key in ("max_completion_tokens", "min_tokens"):
            if key in short:
                short[key] = 1
        try:
            async with http.asked(prefill.server, _request(prefill.server, head, short)) as (told, reader):
                found = await http.read_body(reader, told, answer=True)
            if told.status != 200:
                raise PeerLost("the prefill engine refused", address=prefill.server, status=told.status)
            answer = _parsed(found) or {}
            back = answer.get("kv_transfer_params")
            if not isinstance(back, dict):
                raise PeerLost("the prefill engine hands nothing over", address=prefill.server)
        except (HawkError, OSError, asyncio.IncompleteReadError) as fault:
            log.warning("prefill failed; the decode engine computes", reason=str(fault))
            return None
        if prefill.learn(back):
            log.info("prefill engine", server=str(prefill.server), **prefill.place)
        return back

    async def _at_once(
        self,
        prefill: Prefill,
        decode: Server,
        head: Head,
        asked: dict[str, Any],
        writer: asyncio.StreamWriter,
    ) -> None:
        transfer, place = new_transfer(), dict(prefill.place)
        early = {"do_remote_prefill": True, "transfer_id": transfer, **place}
        here = {"do_remote_decode": True, "transfer_id": transfer}
        started = asyncio.Event()
        first = asyncio.ensure_future(self._prefilled(prefill, head, asked, here))
        second = asyncio.ensure_future(_decode(decode, head, asked, early, writer, started))
        try:
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            if first.done() and not second.done() and not started.is_set():
                params = first.result()
                if params is None or prefill.place != place:
                    # It waits for what will not come, or at the wrong place.
                    await _ended(second)
                    second = asyncio.ensure_future(_decode(decode, head, asked, params, writer))
            try:
                await second
            except PeerLost as fault:
                if started.is_set():
                    raise
                log.warning("decode failed; the decode engine computes", reason=str(fault))
                if prefill.place == place:
                    prefill.place = {}  # which may be wrong by now: the next request goes in sequence, and learns
                await _decode(decode, head, asked, None, writer)
        finally:
            await _ended(first, second)


async def silent(servers: Sequence[Server]) -> list[Server]:
    """Those that accept no connection now: an engine may take minutes to start."""

    async def answers(server: Server) -> bool:
        try:
            async with asyncio.timeout(http.CONNECT):
                _, writer = await asyncio.open_connection(server.host, server.port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    found = await asyncio.gather(*map(answers, servers))
    return [server for server, well in zip(servers, found, strict=True) if not well]


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancels the tasks and returns when they are over, also where the caller is cancelled meanwhile."""
    cancelled: tuple[object, ...] | None = None
    for task in tasks:
        task.cancel()
    while pending := {task for task in tasks if not task.done()}:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error.args
    if cancelled is not None:
        raise asyncio.CancelledError(*cancelled)


async def _unless_gone(reader: asyncio.StreamReader, work: Coroutine[Any, Any, None]) -> None:
    """Does the work unless the client closes its connection, which ends it: engines then free what they hold."""
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(reader.read(1))
    try:
        while not doing.done():
            await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not doing.done():
                if gone.exception() is None and gone.result():
                    gone = asyncio.ensure_future(reader.read(1 << 16))  # said too much; it is there
                    continue
                return
        doing.result()
    finally:
        await _ended(gone, doing)


async def _decode(
    server: Server,
    head: Head,
    asked: Mapping[str, Any],
    params: dict[str, Any] | None,
    writer: asyncio.StreamWriter,
    started: asyncio.Event | None = None,
) -> None:
    whole = dict(asked) if params is None else {**asked, "kv_transfer_params": params}
    await _relay(server, _request(server, head, whole), writer, started)


async def _pass(server: Server, head: Head, body: bytes, writer: asyncio.StreamWriter) -> None:
    sent = http.request(head.first[0], head.first[1], str(server)[7:], _passed(head), body)
    await _relay(server, sent, writer, None)


async def _relay(
    server: Server, sent: bytes, writer: asyncio.StreamWriter, started: asyncio.Event | None
) -> None:
    """Sends a request, and the answer's bytes to the client as they come.

    With `started` nothing of it before the answer's first byte behind the head, for an engine that streams says that
    all is well before it has begun; raises `PeerLost` where there is none, or where the engine has failed.
    """
    async with http.asked(server, sent) as (told, reader):
        piece = b""
        if told.status >= 500:
            log.warning("an engine answers with an error", server=str(server), status=told.status)
        if started is not None:
            try:
                piece = await reader.read(1 << 16)
            except OSError as fault:
                raise PeerLost("the connection broke", address=server, reason=str(fault)) from fault
            if not piece or told.status >= 500:
                raise PeerLost("the decode engine failed", address=server, status=told.status)
            started.set()
        writer.write(told.raw + piece)
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()


def _request(server: Server, head: Head, body: Mapping[str, Any]) -> bytes:
    return http.request("POST", head.first[1], str(server)[7:], _passed(head), json.dumps(body).encode())


def _passed(head: Head) -> dict[str, str]:
    return {name: head.headers[name] for name in _PASSED if name in head.headers}


def _parsed(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)
    except ValueError:
        return None
    except (
        RecursionError
    ) as fault:  # an engine may read a little deeper, and what it reads is to be known here
        raise BadFrame("the body is nested too deeply", field="http") from fault
    return found if isinstance(found, dict) else None


def _single(asked: Mapping[str, Any]) -> bool:
    """Whether it has one prompt, wants one answer, and needs of the prompt only its cache."""
    prompt = asked.get("prompt", "")
    several = (
        isinstance(prompt, list) and len(prompt) != 1 and not all(isinstance(token, int) for token in prompt)
    )
    more = any(asked.get(key) not in (None, 1) for key in ("n", "best_of")) or asked.get("use_beam_search")
    return not several and not more and asked.get("prompt_logprobs") is None


def _say(writer: asyncio.StreamWriter, status: int, reason: str, fault: HawkError) -> None:
    """An answer of our own, unless one has begun: then the connection just ends, which the client sees."""
    if not writer.is_closing():
        writer.write(
            http.answer(
                status, reason, {"error": {"message": str(fault), "type": fault.code, "code": status}}
            )
        )
