"""Metrics: names as documented, a registry of one's own, pools read when asked."""

import asyncio

import prometheus_client
import pytest

from hawk.observe.metrics import Metrics, watch_loop


def test_the_documented_names_are_there() -> None:
    metrics = Metrics()
    metrics.job("ready", "decode", "shm")
    metrics.job("lease-expired", "decode", "")
    metrics.phase("retile", 0.02)
    metrics.moved("received", "tcp", 4096)
    metrics.pool("arena", "free", 100)
    metrics.bad_frame("magic")
    metrics.fallback("transfer-failed")
    metrics.loop_lag(-0.5)
    text = metrics.render().decode()
    for line in (
        'hawk_jobs_total{ending="ready",role="decode",transport="shm"} 1.0',
        'hawk_jobs_total{ending="lease-expired",role="decode",transport="none"} 1.0',
        'hawk_phase_seconds_count{phase="retile"} 1.0',
        'hawk_bytes_total{direction="received",transport="tcp"} 4096.0',
        'hawk_pool_bytes{pool="arena",state="free"} 100.0',
        'hawk_bad_frames_total{reason="magic"} 1.0',
        'hawk_transport_fallbacks_total{reason="transfer-failed"} 1.0',
        "hawk_loop_lag_seconds_sum 0.0",
    ):
        assert line in text.splitlines()


def test_the_host_registry_stays_empty_of_us() -> None:
    before = prometheus_client.generate_latest()
    Metrics()
    two = Metrics(), Metrics()
    two[0].bad_frame("magic")
    assert two[1].value("hawk_bad_frames_total", reason="magic") == 0
    assert b"hawk_" not in before
    assert b"hawk_" not in prometheus_client.generate_latest()


def test_pools_are_read_when_asked_and_can_be_forgotten() -> None:
    metrics = Metrics()
    state = {"free": 10, "owned": 0}
    metrics.watch_pool("npu0", lambda: state)
    assert metrics.value("hawk_pool_bytes", pool="npu0", state="free") == 10
    state.update(free=3, owned=7)
    assert metrics.value("hawk_pool_bytes", pool="npu0", state="owned") == 7
    metrics.forget_pool("npu0")
    assert b"npu0" not in metrics.render()


async def test_lag_is_measured() -> None:
    metrics = Metrics()
    seen = asyncio.Event()

    def lag(seconds: float) -> None:
        Metrics.loop_lag(metrics, seconds)
        seen.set()

    metrics.loop_lag = lag  # type: ignore[method-assign]
    task = asyncio.create_task(watch_loop(metrics, 0.001))
    await asyncio.wait_for(seen.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert metrics.value("hawk_loop_lag_seconds_count") >= 1
