"""What cannot be built as asked, and what no number of instances can keep."""

from dataclasses import replace
from typing import Literal

import pytest

from hawk.errors import InvalidArgument
from hawk.serving import Decode, Device, Prefill, Scenario, Slo, Transfer, load_device, simulate
from hawk.serving.model import load_served
from hawk.serving.possible import check_blocks, check_share, joins, most_kept
from hawk.serving.transfer import Side
from hawk.serving.workload import Workload

MODEL = load_served("llama-3.1-8b")


def test_devices_of_no_known_kind_may_be_of_any() -> None:
    a100, p150a = load_device("a100"), load_device("p150a")
    mine = Device.measured("mine", prefill={100: 0.1}, decode={1: 0.1})
    assert joins("gg-host", a100, a100)
    assert joins("gn-hawk", a100, p150a)
    assert not joins("gn-hawk", p150a, p150a)
    assert not joins("gg-host", a100, p150a)
    assert not joins("single-buffer", a100, a100)
    assert joins("gg-direct", mine, a100)
    assert joins("gn-host", a100, mine)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_heads_are_shared_out_evenly(tp: int) -> None:
    check_share(MODEL, tp)


@pytest.mark.parametrize("tp", [3, 6, 12])
def test_heads_that_are_not_are_refused(tp: int) -> None:
    with pytest.raises(InvalidArgument, match="1, 2, 4, 8, or a multiple of 8"):
        check_share(MODEL, tp)


def test_blocks_hold_whole_tiles() -> None:
    check_blocks(MODEL, Side("vllm/nhd", block=100), 4, "prefill")
    check_blocks(MODEL, Side("tenstorrent/kv", block=96), 16, "decode")
    with pytest.raises(InvalidArgument, match="a multiple of 32"):
        check_blocks(MODEL, Side("tenstorrent/kv", block=48), 1, "decode")


@pytest.mark.parametrize("overlap", ["none", "layers"])
@pytest.mark.parametrize("slo", [Slo(0.05, 0.0135), Slo(0.1, 0.02), Slo(0.3, 1.0)])
def test_no_simulation_keeps_more_than_an_idle_cluster_could(
    slo: Slo, overlap: Literal["none", "layers"]
) -> None:
    base = Scenario(
        Prefill(load_device("a100"), instances=4),
        Decode(load_device("p150a"), instances=4),
        Workload.chatbot(),
        replace(Transfer(), overlap=overlap),
        model=MODEL.name,
        rate=0.05,
        requests=200,
        slo=slo,
    )
    first, later = most_kept(base)
    outcome = simulate(base)
    assert outcome.ttft_attainment <= first
    assert outcome.tpot_attainment <= later
    if overlap == "none":
        assert first - outcome.ttft_attainment < 0.05
