"""Metrics: names as documented, a registry of one's own, pools read when asked."""

import re
from pathlib import Path

import prometheus_client

from hawk.observe.metrics import Metrics


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


def test_peers_and_jobs_are_what_they_are_now() -> None:
    metrics = Metrics()
    metrics.watch(lambda: metrics.peers_now({"p0": True, "p1": False}))
    metrics.watch(lambda: metrics.jobs_now(queued=3, leases=2))
    assert metrics.value("hawk_peer_up", peer="p0") == 1
    assert metrics.value("hawk_queue_jobs") == 3
    assert 'hawk_peer_up{peer="p1"} 0.0' in metrics.render().decode()
    metrics.peers_now({"p2": True})
    assert metrics.registry.get_sample_value("hawk_peer_up", {"peer": "p0"}) is None


def test_what_a_transport_counts_goes_on_when_it_begins_anew() -> None:
    metrics = Metrics()
    for counted in (3, 5, 5, 2):
        metrics.transport_now("verbs", {"queue-pair-broken": counted})
    assert metrics.value("hawk_transport_events_total", event="queue-pair-broken", transport="verbs") == 7


DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_documentation_and_the_code_name_the_same_metrics() -> None:
    documented = {}
    for name, labels in re.findall(r"^\| `(hawk_\w+)(?:\{([\w,]+)\})?` \|", DOCS.read_text(), re.MULTILINE):
        documented[name] = set(labels.split(",")) - {""}
    metrics = Metrics()
    counted = {}
    for collector in set(metrics.registry._collector_to_names):
        for family in collector.describe():
            name = family.name + ("_total" if family.type == "counter" else "")
            counted[name] = set(collector._labelnames)
    assert documented == counted


def test_what_is_served_are_the_documented_series_and_no_other() -> None:
    metrics = Metrics()
    metrics.job("ready", "fetch", "tcp")
    metrics.phase("read", 0.1)
    metrics.moved("in", "tcp", 1)
    metrics.pool("arena", "free", 1)
    metrics.peers_now({"p0": True})
    metrics.bad_frame("bad-frame")
    metrics.fallback("transfer-failed")
    metrics.transport_now("verbs", {"read-pulled": 1})
    served = set(re.findall(r"^# TYPE (\w+)", metrics.render().decode(), re.MULTILINE))
    documented = set(re.findall(r"^\| `(hawk_\w+)", DOCS.read_text(), re.MULTILINE))
    assert served == documented
