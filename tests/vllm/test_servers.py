"""Two of vLLM's HTTP servers, and the proxy in front of them: what a client gets is what one server alone says."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from hawk.errors import HawkError
from hawk.integrations import http
from hawk.integrations.http import Server
from hawk.integrations.proxy import Proxy
from tests.vllm.conftest import PYTHON, ROOT, Fleet, transfer
from tests.vllm.model import prompts

pytestmark = [pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]

START = 600.0
LIMIT = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(folder: Path, model: Path, role: str, name: str, block: int, processor: int) -> tuple[Server, Any]:
    port = free_port()
    options = {
        "--model": model, "--host": "127.0.0.1", "--port": port, "--dtype": "float32", "--max-model-len": 1024,
        "--max-num-seqs": 4, "--block-size": block, "--kv-transfer-config": json.dumps(transfer(role, name)),
    }  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder),
        "VLLM_CPU_OMP_THREADS_BIND": str(processor),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [
                PYTHON,
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--enforce-eager",
                "--trust-request-chat-template",
            ]
            + [str(word) for pair in options.items() for word in pair],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return Server("127.0.0.1", port), process


async def get(server: Server, path: str) -> tuple[int, bytes]:
    async with http.asked(server, http.request("GET", path, "x", {}, b"")) as (head, reader):
        return head.status, await http.read_body(reader, head, answer=True)


async def ask(server: Server, **body: Any) -> list[int]:
    sent = json.dumps(
        {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": 24, **body}
    )
    request = http.request(
        "POST", "/v1/completions", "x", {"content-type": "application/json"}, sent.encode()
    )
    async with asyncio.timeout(LIMIT):
        async with http.asked(server, request) as (head, reader):
            found = json.loads(await http.read_body(reader, head, answer=True))
    assert head.status == 200, found
    return list(found["choices"][0]["token_ids"])


async def count(server: Server, name: str) -> float:
    _, text = await get(server, "/metrics")
    lines = [line for line in text.decode().splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[tuple[Server, Server, str]]:
    with tempfile.TemporaryDirectory(prefix="hk-", dir="/tmp") as name:
        folder = Path(name)
        model = Fleet(folder).model
        p, d = (
            serve(folder, model, role, engine, block, i)
            for i, (role, engine, block) in enumerate([("kv_producer", "p0", 32), ("kv_consumer", "d0", 128)])
        )
        try:
            async with asyncio.timeout(START):
                for server, process in (p, d):
                    while True:
                        try:
                            if (await get(server, "/health"))[0] == 200:
                                break
                        except Exception:  # noqa: BLE001 - it is not there yet
                            assert process.poll() is None, (folder / "p0.log").read_text()[-3000:]
                        await asyncio.sleep(0.5)
            yield p[0], d[0], str(model)
        finally:
            for _, process in (p, d):
                process.terminate()
            for _, process in (p, d):
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@pytest_asyncio.fixture(loop_scope="module")
async def proxy(servers: tuple[Server, Server, str]) -> AsyncIterator[Server]:
    made = Proxy([servers[0]], [servers[1]])
    port = await made.start("127.0.0.1", 0)
    yield Server("127.0.0.1", port)
    await made.close()


async def test_through_the_proxy_as_from_one_server(
    servers: tuple[Server, Server, str], proxy: Server
) -> None:
    p, d, model = servers
    asked = prompts((5, 40, 128, 129, 300), seed=11)
    expected = [await ask(d, model=model, prompt=one) for one in asked]
    assert [
        await ask(proxy, model=model, prompt=one) for one in asked
    ] == expected  # the first goes in sequence
    assert await count(d, "vllm:hawk_fetched_total") == len(asked)
    assert await count(p, "vllm:hawk_offered_total") == len(asked)
    assert await count(d, "vllm:hawk_fetch_failed_total") == 0


async def test_streams_and_a_client_that_leaves(servers: tuple[Server, Server, str], proxy: Server) -> None:
    p, d, model = servers
    (asked,) = prompts((300,), seed=12)
    body = {"model": model, "prompt": asked, "max_tokens": 400, "ignore_eos": True, "stream": True}
    request = http.request(
        "POST", "/v1/completions", "x", {"content-type": "application/json"}, json.dumps(body).encode()
    )
    async with asyncio.timeout(LIMIT):
        async with http.asked(proxy, request) as (head, reader):
            assert head.headers["content-type"].startswith("text/event-stream")
            await reader.readuntil(b"data: ")  # and it leaves
        for server in (p, d):
            while await count(server, "vllm:num_requests_running") + await count(
                server, "vllm:num_requests_waiting{"
            ):
                await asyncio.sleep(0.2)
            while await count(server, "vllm:kv_cache_usage_perc"):
                await asyncio.sleep(0.2)


async def post(server: Server, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    sent = http.request(
        "POST", path, "x", {"content-type": "application/json", **headers}, json.dumps(body).encode()
    )
    async with asyncio.timeout(LIMIT):
        async with http.asked(server, sent) as (head, reader):
            found = json.loads(await http.read_body(reader, head, answer=True))
    assert head.status == 200, found
    return dict(found)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_as_the_routing_sidecar_of_llm_d_asks(servers: tuple[Server, Server, str], path: str) -> None:
    """Its `nixlv2` protocol: what it puts into a request and takes out again, and in which order."""
    p, d, model = servers
    (asked,) = prompts((200,), seed=13)
    text = " ".join(f"w{token}" for token in asked)
    chat = path.endswith("chat/completions")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    own = (
        {"messages": [{"role": "user", "content": text}], "chat_template": template}
        if chat
        else {"prompt": text}
    )
    client = {"model": model, "temperature": 0, "ignore_eos": True, "max_tokens": 24, **own}
    expected = await post(d, path, client)
    before = await count(d, "vllm:hawk_fetched_total")
    empty = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
    first = {
        **client,
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, **empty},
    }
    name = {"x-request-id": "b9a3a1de-0000-11f0-8000-000000000000"}  # of both requests
    there = (await post(p, path, first, **name))["kv_transfer_params"]
    found = await post(d, path, {**client, "kv_transfer_params": there}, **name)
    said = [
        one["choices"][0]["message"]["content"] if chat else one["choices"][0]["text"]
        for one in (found, expected)
    ]
    assert said[0] == said[1]
    assert await count(d, "vllm:hawk_fetched_total") == before + 1
    await post(d, path, {**client, "kv_transfer_params": None}, **name)  # where the answer had none


async def test_vllms_own_example_proxy(servers: tuple[Server, Server, str]) -> None:
    """`toy_proxy_server.py` of vLLM's tests of its NIXL connector, as it is; `HAWK_VLLM_PROXY` says where it lies."""
    file = os.environ.get("HAWK_VLLM_PROXY")
    if not file:
        pytest.skip("HAWK_VLLM_PROXY names no toy_proxy_server.py")
    p, d, model = servers
    asked = prompts((40, 300), seed=14)
    expected = [await ask(d, model=model, prompt=one) for one in asked]
    before = await count(d, "vllm:hawk_fetched_total")
    port = free_port()
    where = {"--port": port, "--prefiller-hosts": p.host, "--prefiller-ports": p.port}
    where |= {"--decoder-hosts": d.host, "--decoder-ports": d.port}
    options = [str(word) for pair in where.items() for word in pair]
    process = await asyncio.create_subprocess_exec(PYTHON, file, *options, stdin=subprocess.DEVNULL)
    try:
        proxy = Server("127.0.0.1", port)
        async with asyncio.timeout(LIMIT):
            while True:
                try:
                    assert (await get(proxy, "/healthcheck"))[0] == 200
                    break
                except HawkError:  # it is not there yet
                    assert process.returncode is None
                    await asyncio.sleep(0.1)
        assert [await ask(proxy, model=model, prompt=one) for one in asked] == expected
        assert await count(d, "vllm:hawk_fetched_total") == before + len(asked)
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), LIMIT)
