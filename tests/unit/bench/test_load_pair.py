"""How `hawk bench serving` starts engines and asks them, without vLLM."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hawk.bench import load_pair
from hawk.bench.load_pair import Servers, Spoken
from hawk.errors import InternalError
from hawk.integrations import http
from hawk.integrations.http import Server


class Engine:
    """An HTTP server that streams as vLLM's does, and tells what it counted."""

    def __init__(self, events: list[str], status: int = 200, metrics: str = "") -> None:
        self.events, self.status, self.metrics = events, status, metrics
        self.asked: list[dict[str, Any]] = []

    async def __aenter__(self) -> Server:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return Server("127.0.0.1", self.server.sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        await self.server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await http.read_head(reader)
        assert head is not None
        body = await http.read_body(reader, head)
        if head.first[0] == "GET":
            pieces = [self.metrics]
        else:
            self.asked.append(json.loads(body))
            pieces = [f"data: {event}\n\n" for event in self.events]
        writer.write(f"HTTP/1.1 {self.status} OK\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for piece in pieces:
            for part in (piece[:9], piece[9:]):  # a chunk need not be an event
                writer.write(f"{len(part):x}\r\n{part}\r\n".encode())
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()


def token(*ids: int) -> str:
    return json.dumps({"choices": [{"token_ids": ids}]})


async def test_a_stream_of_events_is_counted_by_tokens() -> None:
    first = json.dumps({"choices": [{"prompt_token_ids": [5, 6], "token_ids": None}]})
    engine = Engine([first, token(7), token(8, 9), json.dumps({"choices": []}), "[DONE]"])
    async with engine as where:
        spoken = Spoken(0.0)
        await Servers({"decode": where}, "m").stream("decode", [5, 6], 3, spoken)
    assert len(spoken.times) == 3
    assert spoken.sent <= spoken.times[0] <= spoken.times[-1]
    (asked,) = engine.asked
    assert asked["prompt"] == [5, 6]
    assert asked["max_tokens"] == 3
    assert asked["ignore_eos"]


@pytest.mark.parametrize(
    ("events", "status", "says"),
    [
        ([token(7)], 200, "another number of tokens; got 1; expected 2"),
        ([token(7), '{"error": {"message": "no room"}}'], 200, "no room"),
        (['{"error": 1}'], 503, "answers with an error; got 503"),
        (["half an ev"], 200, "no event"),
        (["[1]"], 200, "no event"),
        (['{"choices": [7]}'], 200, "no event"),
    ],
)
async def test_an_answer_that_is_none_is_an_error(events: list[str], status: int, says: str) -> None:
    async with Engine(events, status) as where:
        with pytest.raises(InternalError, match=says):
            await Servers({"proxy": where}, "m").stream("proxy", [5, 6], 2, Spoken(0.0))


async def test_counts_of_several_engines_are_summed_and_others_left_out() -> None:
    metrics = '# HELP x\nvllm:a_sum{engine="0"} 1.5\nvllm:a_sum{engine="1"} 2\nvllm:a_sum_more 9\nother 3\n'
    async with Engine([], metrics=metrics) as where:
        counted = await Servers({"decode": where}, "m").counts("decode", ["a_sum", "none"])
    assert counted == {"a_sum": 3.5, "none": 0.0}


TELLS = f"""#!{sys.executable}
import json, os
print(json.dumps({{"cpus": sorted(os.sched_getaffinity(0)), **os.environ}}))
"""


def test_an_engine_has_its_own_processors_and_computes_where_it_schedules(tmp_path: Path) -> None:
    python, before = tmp_path / "python", os.sched_getaffinity(0)
    python.write_text(TELLS)
    python.chmod(0o755)
    mine = frozenset([max(before)])
    engine = load_pair._Engine(python, tmp_path, "prefill", {}, mine)
    engine._process.wait()
    told = json.loads(engine.log.read_text())
    assert told["cpus"] == sorted(mine)
    # A worker apart from its scheduler would poll for the other's word, and keep the agent's threads from running.
    assert told["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert told["OMP_NUM_THREADS"] == "1"
    assert os.sched_getaffinity(0) == before
    with pytest.raises(FileNotFoundError):
        load_pair._Engine(tmp_path / "none", tmp_path, "decode", {}, mine)
    assert os.sched_getaffinity(0) == before
