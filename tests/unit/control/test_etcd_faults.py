"""A directory whose etcd is wrong, slow or hostile: a member that is made up says what the real one never would."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from hawk.control.discovery import Registration
from hawk.control.etcd import EtcdPeers
from hawk.control.etcd_client import PAGE, Entry, Etcd, EtcdFault
from hawk.errors import ConfigError, PeerUnreachable

web = pytest.importorskip("aiohttp.web", reason="aiohttp is not installed (the extra etcd)")

LIMIT = 30.0
GOOD = b'{"address":"tcp://10.0.0.1:7400","generation":"00000000000000aa"}'
NEVER = object()
"""An answer that does not come for as long as the member is there."""

Answer = Callable[[dict[str, Any]], Any]


class Member:
    """Answers every path with what `answers` has for it: an object, bytes, (status, text), `NEVER` or a function."""

    def __init__(self) -> None:
        header = {"revision": "7"}
        self.asked: list[str] = []
        self.url = ""
        self.answers: dict[str, Any] = {
            "/v3/lease/grant": {"ID": "5", "TTL": "2"},
            "/v3/lease/keepalive": {"result": {"TTL": "2"}},
            "/v3/lease/revoke": {},
            "/v3/kv/range": {"header": header},
            "/v3/kv/txn": {"succeeded": True},
            "/v3/watch": {"result": {"created": True}},
            "/v3/auth/authenticate": {"token": "t"},
        }
        self.end = asyncio.Event()

    async def answer(self, request: Any) -> Any:
        self.asked.append(request.path)
        answer = self.answers[request.path]
        if callable(answer):
            answer = answer(await request.json())
        if answer is NEVER:
            await self.end.wait()
            return web.Response()
        if isinstance(answer, tuple):
            status, text = answer
            return web.Response(status=status, body=text.encode(), headers={"Location": "/elsewhere"})
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        if request.path != "/v3/watch":
            return web.Response(body=body)
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(body + b"\n")
        await self.end.wait()
        return stream


@contextlib.asynccontextmanager
async def member(**answers: Any) -> AsyncIterator[Member]:
    made = Member()
    made.answers |= {f"/v3/{path.replace('_', '/')}": answer for path, answer in answers.items()}
    app = web.Application()
    app.router.add_post("/{path:.*}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    made.url = f"http://{host}:{port}"
    try:
        yield made
    finally:
        made.end.set()
        await runner.cleanup()


def peers(*members: Member, timeout: float = 5.0, user: tuple[str, str] | None = None) -> EtcdPeers:
    return EtcdPeers(
        {},
        etcd=Etcd([each.url for each in members], timeout=timeout, user=user),
        prefix="/hawk/",
        name="p0",
        own=lambda: Registration(address="tcp://127.0.0.1:1", generation="0" * 16),
        lease=2.0,
    )


async def becomes(good: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(LIMIT):
            while not good():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"never {what}") from None


@pytest.mark.parametrize("path", ["lease_grant", "kv_range", "watch", "kv_txn"])
async def test_a_member_that_stops_answering_at_any_step_is_left_for_the_next(path: str) -> None:
    async with member(**{path: NEVER}) as stuck, member() as good:
        made = peers(stuck, good, timeout=0.3)
        await made.start()
        try:
            await becomes(lambda: made.up, "up by the other member")
            assert made._etcd.member == good.url
        finally:
            await made.close()


async def test_an_agent_ends_though_its_directory_does_not_answer() -> None:
    """The record goes with its lease; an agent that was told to stop is not to wait for that."""
    async with member(lease_revoke=NEVER) as stuck:
        made = peers(stuck, timeout=600.0)
        await made.start()
        await becomes(lambda: made.up, "up")
        async with asyncio.timeout(LIMIT):
            await made.close()
        assert made._etcd._session is None


async def test_an_end_that_is_cut_short_leaves_no_connection_open() -> None:
    async with member(lease_revoke=NEVER) as stuck:
        made = peers(stuck)
        await made.start()
        await becomes(lambda: made.up, "up")
        closing = asyncio.get_running_loop().create_task(made.close())
        await becomes(lambda: "/v3/lease/revoke" in stuck.asked, "asked")
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert made._etcd._session is None


@pytest.mark.parametrize(
    "answer",
    [
        *(
            {},
            [],
            "x",
            b"<html>",
            b"\xff",
            {"result": None},
            {"result": []},
            {"kvs": 3},
            {"kvs": [{"key": 1}]},
        ),
        *({"ID": "x"}, {"ID": "1", "TTL": "nan"}, {"header": []}, {"responses": [1, 2]}, b"[" * 100_000),
    ],
    ids=lambda answer: str(answer)[:20],
)
async def test_answers_of_another_form_are_the_directorys_fault(answer: Any) -> None:
    async with member() as odd:
        odd.answers = dict.fromkeys(odd.answers, answer)
        client = Etcd([odd.url])
        for ask in (
            lambda: client.read("/"),
            lambda: client.lease(2),
            lambda: client.renew(5),
            lambda: client.put("/k", b"v", 5, over=None),
            lambda: anext(client.watch("/", 1)),
        ):
            with pytest.raises(EtcdFault):
                await ask()
        await client.close()


async def test_a_question_goes_nowhere_but_to_a_member() -> None:
    async with member(auth_authenticate=(307, "elsewhere")) as sends:
        client = Etcd([sends.url], user=("root", "secret"))
        with pytest.raises(EtcdFault, match="307") as told:
            await client.read("/")
        assert sends.asked == ["/v3/auth/authenticate"]
        assert "secret" not in str(told.value)
        await client.close()


async def test_what_a_member_says_of_its_fault_cannot_write_to_a_terminal() -> None:
    said = "down\x1b[2J\nall is well"
    for path, answer in (
        ("lease_grant", (503, said)),
        ("lease_grant", {"error": said}),
        ("watch", {"result": {"created": True, "canceled": True, "cancel_reason": said}}),
    ):
        async with member(**{path: answer}) as odd:
            made = peers(odd)
            await made.start()
            try:
                await becomes(lambda made=made: "down" in made.state, "told")  # type: ignore[misc]
                assert made.state.isprintable()
            finally:
                await made.close()


async def test_a_directory_that_was_never_there_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with member(lease_grant=(403, "permission denied")) as closed:
        made = peers(closed)
        with caplog.at_level(logging.WARNING, "hawk.control.etcd"):
            await made.start()
            await becomes(lambda: closed.asked.count("/v3/lease/grant") >= 2, "asked twice")
            await made.close()
        assert sum("permission denied" in record.getMessage() for record in caplog.records) == 1


async def test_many_are_read_in_pages_of_one_revision() -> None:
    names = [f"/hawk/agents/a{number:05}" for number in range(2 * PAGE + 1)]
    asked: list[dict[str, Any]] = []

    def page(question: dict[str, Any]) -> dict[str, Any]:
        asked.append(question)
        begin = base64.b64decode(question["key"]).decode()
        found = [name for name in names if name >= begin]
        most = int(question["limit"])
        kvs = [
            {"key": base64.b64encode(name.encode()).decode(), "value": base64.b64encode(GOOD).decode()}
            for name in found[:most]
        ]
        return {"header": {"revision": str(7 + len(asked))}, "kvs": kvs, "more": len(found) > most}

    async with member(kv_range=page) as large:
        made = peers(large)
        await made.start()
        await becomes(lambda: made.up, "up")
        assert len(made.registered()) == len(names)
        assert [question.get("revision") for question in asked] == [None, "8", "8"]
        await made.close()


async def test_a_bad_record_under_a_long_name_is_forgotten_when_it_is_taken_away() -> None:
    async with member() as good:
        made = peers(good)
        await made.start()
        await becomes(lambda: made.up, "up")
        key = "/hawk/agents/" + "x" * 300
        made._note([Entry(key, GOOD, 8)])
        assert made.state == "etcd, 0 agents; 1 record cannot be used"
        made._note([Entry(key, None, 9)])
        assert made.state == "etcd, 0 agents"
        await made.close()


@pytest.mark.parametrize("host", ["a..b", "a" * 200, "-"])
async def test_a_peer_that_says_it_is_where_nothing_can_be_cannot_be_reached(host: str) -> None:
    async with member() as good:
        made = peers(good)
        await made.start()
        await becomes(lambda: made.up, "up")
        made._note([Entry("/hawk/agents/p1", GOOD.replace(b"10.0.0.1", host.encode()), 8)])
        assert "p1" in made.registered()
        with pytest.raises(PeerUnreachable):
            await made.resolve("p1")
        await made.close()


async def test_a_token_that_has_ended_is_no_fault() -> None:
    tokens = iter(["first", "second"])
    async with member(auth_authenticate=lambda _: {"token": next(tokens)}) as asks:
        client = Etcd([asks.url], user=("root", "secret"))
        await client.renew(5)
        renewed = asks.answers["/v3/lease/keepalive"]
        once = iter([(401, "invalid auth token"), renewed])
        asks.answers["/v3/lease/keepalive"] = lambda _: next(once)
        assert await client.renew(5)
        asks.answers["/v3/lease/keepalive"] = (401, "invalid auth token")
        asks.answers["/v3/auth/authenticate"] = (400, "authentication failed")
        with pytest.raises(EtcdFault, match="authentication failed"):
            await client.renew(5)
        await client.close()


async def test_a_directory_without_end_is_not_read_for_ever() -> None:
    again = {"header": {"revision": "7"}, "kvs": [{"key": "YQ=="}], "more": True}
    async with member(kv_range=again) as endless:
        client = Etcd([endless.url])
        with pytest.raises(EtcdFault, match="too many keys"):
            await client.read("/")
        await client.close()


def test_files_for_tls_that_would_not_be_used(tmp_path: Path) -> None:
    name = tmp_path / "a.pem"
    for urls, tls, field in (
        (["http://127.0.0.1:1"], (name, None, None), "etcd"),
        (["https://127.0.0.1:1", "http://127.0.0.1:2"], (name, None, None), "etcd"),
        (["https://127.0.0.1:1"], (None, None, name), "etcd_cert"),
    ):
        with pytest.raises(ConfigError) as told:
            Etcd(urls, tls=tls)
        assert told.value.field == f"discovery.{field}"
