"""The arithmetic of many small jobs."""

from __future__ import annotations

import asyncio
from io import StringIO

import pytest
from rich.console import Console

from hawk.bench import jobs
from hawk.bench.distance import Distance
from hawk.errors import InvalidArgument


def crowd(count: int) -> jobs.Crowd:
    return jobs.Crowd(count, 2.0, [i / count for i in range(1, count + 1)], busy=3)


def test_a_crowd() -> None:
    told = crowd(100).to_dict()
    assert told["jobs_per_s"] == pytest.approx(50)
    assert told["each"] == pytest.approx(0.02)
    assert told["p50"] == pytest.approx(0.505)
    assert told["p99"] == pytest.approx(0.99, abs=0.01)
    assert told["busy"] == 3


def test_every_job_of_a_scene_is_one_block_of_the_device() -> None:
    scene = jobs._scene(7)
    assert scene.tokens == 7 * jobs.TOKENS
    assert scene.target.block_size == jobs.TOKENS
    assert len(scene.target_blocks()) == 7
    assert len(scene.source_blocks()) == 7 * (jobs.TOKENS // scene.source.block_size)


@pytest.mark.parametrize("field", ["runs", "at_once", "queued"])
def test_nonsense_is_refused(field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        jobs.run(**{field: (0,) if field == "queued" else 0})  # type: ignore[arg-type]


def test_the_tables_name_what_they_show() -> None:
    light = jobs.Light(1e-3, 1e-3, *({"embedded": 1.2e-3, "separate": 3e-3} for _ in range(2)), {}, {})
    light.ratio = {"embedded": 1.2, "separate": 3.0}
    result = jobs.JobsResult(
        5, 32 << 10, {"shm": light}, {"shm": light}, {"shm": crowd(10)}, {"shm": [crowd(20)]}, [10_000]
    )
    out = StringIO()
    jobs.render(result, Console(file=out, width=140))
    for words in (
        "32 KiB a job",
        "embedded",
        "separate",
        "1.2",
        "64 at work",
        "at a distance",
        "10000 jobs left out",
    ):
        assert words in out.getvalue()
    assert result.to_dict()["correct"] is True


async def test_a_distance_loses_nothing_and_takes_its_time() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with Distance(0.01) as far:
        far.target = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        host, _, port = far.address.removeprefix("tcp://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        sent = bytes(range(256)) * 40
        loop = asyncio.get_running_loop()
        began = loop.time()
        for at in range(0, len(sent), 1000):
            writer.write(sent[at : at + 1000])
            await writer.drain()
        assert await reader.readexactly(len(sent)) == sent
        assert loop.time() - began >= 0.02
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
    server.close()
