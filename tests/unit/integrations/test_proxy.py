"""The proxy between made-up servers: what each is sent, when, and what the client gets."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from hawk.integrations import http
from hawk.integrations.http import Head, Server
from hawk.integrations.proxy import Proxy

LIMIT = 30.0
PLACE = {"remote_engine_id": "p0", "remote_host": "10.0.0.7", "remote_port": 7400, "tp_size": 1, "pp_size": 1}
HANDED = {"do_remote_prefill": True, "transfer_id": "t", "hawk_tickets": ["hawk1.x"], **PLACE}
Reply = Callable[[Head, dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


class Fake:
    """A server that notes what it is asked and answers as it is told."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.asked: list[dict[str, Any]] = []
        self.arrived: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.left = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Fake":
        self.server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.address = Server("127.0.0.1", self.server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
        await self.server.wait_closed()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.add(asyncio.get_running_loop().create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting: list[asyncio.Future[Any]] = []
        try:
            head = await http.read_head(reader)
            assert head is not None
            body = await http.read_body(reader, head)
            asked = json.loads(body) if body else {}
            self.asked.append(asked)
            self.arrived.put_nowait(asked)
            answering = asyncio.ensure_future(self.reply(head, asked, writer))
            waiting = [answering, asyncio.ensure_future(reader.read(1))]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.left.set()
        finally:
            writer.close()  # first: the rest may be cut short
            for task in waiting:
                task.cancel()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def says(body: dict[str, Any], status: int = 200) -> Reply:
    async def reply(_: Head, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(http.answer(status, "OK", body))
        await writer.drain()

    return reply


async def never(_: Head, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def standing(prefill: Reply, decode: Reply, **options: Any) -> AsyncIterator[tuple[Server, Fake, Fake]]:
    async with Fake(prefill) as p, Fake(decode) as d:
        proxy = Proxy([p.address], [d.address], **options)
        port = await proxy.start("127.0.0.1", 0)
        try:
            yield Server("127.0.0.1", port), p, d
        finally:
            await proxy.close()


async def ask(
    server: Server, path: str = "/v1/completions", method: str = "POST", **body: Any
) -> tuple[int, Any]:
    async with asyncio.timeout(LIMIT):
        sent = http.request(method, path, "x", {"authorization": "Bearer k"}, json.dumps(body).encode())
        async with http.asked(server, sent) as (head, reader):
            return head.status, json.loads(await http.read_body(reader, head, answer=True))


async def test_the_first_goes_in_sequence_and_the_next_to_both_at_once() -> None:
    both = asyncio.Event()

    async def prefills(_: Head, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(p.asked) > 1:
            await both.wait()  # until the other side has it, too
        await says({"kv_transfer_params": HANDED})(_, asked, writer)

    async def decodes(_: Head, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(d.asked) > 1:
            both.set()
        await says({"text": "yes"})(_, asked, writer)

    async with standing(prefills, decodes) as (proxy, p, d):
        asked = {"prompt": [5, 6], "max_tokens": 9, "stream": True, "stream_options": {}, "min_tokens": 3}
        assert await ask(proxy, **asked) == (200, {"text": "yes"})
        short = {"prompt": [5, 6], "max_tokens": 1, "stream": False, "min_tokens": 1}
        assert p.asked == [{**short, "kv_transfer_params": {"do_remote_decode": True}}]
        assert d.asked == [{**asked, "kv_transfer_params": HANDED}]
        assert await ask(proxy, **asked) == (200, {"text": "yes"})
        transfer = p.asked[1]["kv_transfer_params"]["transfer_id"]
        assert len(transfer) == 32
        early = {"do_remote_prefill": True, "transfer_id": transfer, **PLACE}
        assert d.asked[1] == {**asked, "kv_transfer_params": early}


async def test_sequential_is_sequential() -> None:
    async with standing(says({"kv_transfer_params": HANDED}), says({"text": "yes"}), early=False) as (
        proxy,
        p,
        d,
    ):
        for _ in range(2):
            await ask(proxy, prompt="a")
        assert [one["kv_transfer_params"] for one in p.asked] == [{"do_remote_decode": True}] * 2
        assert [one["kv_transfer_params"] for one in d.asked] == [HANDED] * 2


async def test_an_answer_streams_through_piece_by_piece() -> None:
    more = asyncio.Event()

    async def decodes(_: Head, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n")
        await writer.drain()
        await more.wait()
        writer.write(b"data: 2\n\n")
        await writer.drain()

    async with standing(says({"kv_transfer_params": HANDED}), decodes) as (proxy, _, _d):
        async with asyncio.timeout(LIMIT):
            sent = http.request("POST", "/v1/completions", "x", {}, b'{"prompt": "a", "stream": true}')
            async with http.asked(proxy, sent) as (head, reader):
                assert head.headers["content-type"] == "text/event-stream"
                assert await reader.readuntil(b"\n\n") == b"data: 1\n\n"
                more.set()
                assert await reader.read() == b"data: 2\n\n"


async def test_a_client_that_leaves_ends_both_sides() -> None:
    async def prefills(_: Head, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await (says({"kv_transfer_params": HANDED}) if len(p.asked) == 1 else never)(_, asked, writer)

    async def decodes(_: Head, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await (says({}) if len(d.asked) == 1 else never)(_, asked, writer)

    async with standing(prefills, decodes) as (proxy, p, d):
        await ask(proxy, prompt="a")
        async with asyncio.timeout(LIMIT):
            _, writer = await asyncio.open_connection(proxy.host, proxy.port)
            writer.write(http.request("POST", "/v1/completions", "x", {}, b'{"prompt": "b"}'))
            for fake in (p, p, d, d):
                await fake.arrived.get()
            writer.close()
            await p.left.wait()
            await d.left.wait()


@pytest.mark.parametrize("early", [False, True])
async def test_where_the_prefill_fails_the_decode_engine_computes(early: bool) -> None:
    async def prefills(_: Head, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        good = early and len(p.asked) == 1
        await says({"kv_transfer_params": HANDED} if good else {}, 200 if good else 500)(_, asked, writer)

    async def decodes(_: Head, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        waits = "transfer_id" in asked.get("kv_transfer_params", {}) and len(d.asked) > 1
        await (never if waits else says({"text": "yes"}))(_, asked, writer)

    async with standing(prefills, decodes) as (proxy, p, d):
        if early:
            await ask(proxy, prompt="a")
        assert await ask(proxy, prompt="b") == (200, {"text": "yes"})
        assert d.asked[-1] == {"prompt": "b"}


async def test_a_prefill_engine_that_came_back_elsewhere_is_fetched_from_there() -> None:
    moved = {**HANDED, "remote_engine_id": "p1"}

    async def prefills(_: Head, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await says({"kv_transfer_params": HANDED if len(p.asked) == 1 else moved})(_, asked, writer)

    async def decodes(_: Head, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        old = asked["kv_transfer_params"]["remote_engine_id"] == "p0" and len(d.asked) > 1
        await (never if old else says({"text": "yes"}))(_, asked, writer)

    async with standing(prefills, decodes) as (proxy, p, d):
        await ask(proxy, prompt="a")
        assert await ask(proxy, prompt="b") == (200, {"text": "yes"})
        assert d.asked[-1]["kv_transfer_params"] == moved


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "n": 2},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt": "a", "use_beam_search": True},
        {"prompt": "a", "prompt_logprobs": 1},
    ],
)
async def test_what_would_fetch_one_prefill_twice_is_not_parted(body: dict[str, Any]) -> None:
    async with standing(never, says({"text": "yes"})) as (proxy, p, d):
        assert await ask(proxy, **body) == (200, {"text": "yes"})
        assert (p.asked, d.asked) == ([], [body])


async def test_a_client_cannot_say_where_engines_connect_to() -> None:
    async with standing(says({"kv_transfer_params": HANDED}), says({}), early=False) as (proxy, p, d):
        await ask(proxy, prompt="a", kv_transfer_params={"remote_host": "elsewhere"})
        await ask(proxy, prompt="a", n=2, kv_transfer_params={"remote_host": "elsewhere"})
        for path in ("/v1/completions?", "/v1/chat/completions?a=b", "/v1/responses", "/v1/completion%73"):
            await ask(proxy, path, prompt="a", kv_transfer_params={"remote_host": "elsewhere"})
        assert "elsewhere" not in str(p.asked + d.asked)
        assert len(p.asked) == 3  # the first, and those with something behind the path


async def test_more_clients_than_it_takes_are_told_so() -> None:
    async with standing(never, never, most=1) as (proxy, p, _):
        first = asyncio.ensure_future(ask(proxy, prompt="a"))
        await p.arrived.get()
        assert (await ask(proxy, prompt="b"))[0] == 503
        first.cancel()
        await asyncio.wait({first})


async def test_other_paths_go_to_a_decode_engine() -> None:
    async with standing(never, says({"data": []})) as (proxy, p, _):
        assert await ask(proxy, "/v1/models", "GET") == (200, {"data": []})
        assert p.asked == []


async def test_no_decode_engine_is_a_bad_gateway() -> None:
    async with Fake(says({"kv_transfer_params": HANDED})) as p, Fake(never) as gone:
        nobody = gone.address
    async with Fake(says({"kv_transfer_params": HANDED})) as p:
        proxy = Proxy([p.address], [nobody])
        port = await proxy.start("127.0.0.1", 0)
        status, body = await ask(Server("127.0.0.1", port), prompt="a")
        await proxy.close()
    assert status == 502
    assert body["error"]["type"] == "peer-unreachable"


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST / HTTP/1.1\r\nauthorization: x\nhost: y\r\n\r\n",
        b"POST / HTTP/1.1\ncontent-length: 0\n\nPOST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n",
        b"POST /\tHTTP/1.1 x\r\n\r\n",
        http.request("POST", "/v1/completions", "x", {}, b'{"prompt": "a", "x": ' + b"[" * 200_000),
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + b"0" * (128 << 10),
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nax\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * (128 << 10) + b"\r\n\r\n",
    ],
)
async def test_bad_requests_are_refused(sent: bytes) -> None:
    async with standing(never, never) as (proxy, p, d):
        async with asyncio.timeout(LIMIT):
            reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):  # what it did not read may come back as a reset
                assert (await reader.read()).startswith(b"HTTP/1.1 400")
            writer.close()
        assert (p.asked, d.asked) == ([], [])


@pytest.mark.parametrize("head_first", [False, True])
async def test_a_decode_engine_that_has_said_nothing_yet_is_asked_anew(head_first: bool) -> None:
    waits = asyncio.Event()

    async def prefills(_: Head, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(p.asked) > 1:
            await waits.wait()
        good = len(p.asked) == 1
        await says({"kv_transfer_params": HANDED} if good else {}, 200 if good else 500)(_, asked, writer)

    async def decodes(_: Head, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(d.asked) != 2:
            await says({"text": "yes"})(_, asked, writer)
            return
        if head_first:  # as an engine that streams says at once that all is well
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
            await writer.drain()
        waits.set()
        await asyncio.Event().wait()

    async with standing(prefills, decodes) as (proxy, p, d):
        await ask(proxy, prompt="a")
        assert await ask(proxy, prompt="b", stream=True) == (200, {"text": "yes"})
        assert d.asked[-1] == {"prompt": "b", "stream": True}


@pytest.mark.parametrize(
    "failure",
    [
        http.answer(500, "Internal Server Error", {"error": {}}),
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n",
        b"",
    ],
)
async def test_where_the_transfer_fails_the_decode_engine_computes(failure: bytes) -> None:
    async def decodes(_: Head, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(d.asked) != 2:
            await says({"text": "yes"})(_, asked, writer)
            return
        writer.write(failure)
        await writer.drain()

    async with standing(says({"kv_transfer_params": HANDED}), decodes) as (proxy, _, d):
        await ask(proxy, prompt="a")
        assert await ask(proxy, prompt="b") == (200, {"text": "yes"})
        assert d.asked[-1] == {"prompt": "b"}
        await ask(proxy, prompt="c")  # in sequence: where the prefill engine is may have been wrong
        assert d.asked[-1] == {"prompt": "c", "kv_transfer_params": HANDED}


@pytest.mark.parametrize(
    "answer", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nx: " + b"a" * (128 << 10) + b"\r\n\r\n"]
)
async def test_an_answer_that_is_none_is_the_servers_fault(answer: bytes) -> None:
    async def decodes(_: Head, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        with contextlib.suppress(OSError):
            await writer.drain()

    async with standing(says({}, 500), decodes) as (proxy, _, _d):
        status, body = await ask(proxy, prompt="a")
        assert (status, body["error"]["type"]) == (502, "peer-lost")


async def test_a_client_that_waits_to_be_told_to_go_on_is_told() -> None:
    async with standing(says({}, 500), says({"text": "yes"})) as (proxy, _, d):
        async with asyncio.timeout(LIMIT):
            reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 15\r\n\r\n"
            )
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(b'{"prompt": "a"}')
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
        assert d.asked == [{"prompt": "a"}]
