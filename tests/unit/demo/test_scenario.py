"""How much the demo moves: what it is asked for, or what there is memory for."""

import numpy as np
import pytest

from hawk.demo import scenario
from hawk.errors import InvalidArgument, OutOfMemory

MIB = 1 << 20


def test_the_model_is_the_one_it_claims_to_be() -> None:
    scene = scenario.load(4096)
    assert scene.payload == 512 * MIB
    assert scene.channels == 8
    assert scene.source_bytes >= scene.payload
    assert scene.target_bytes >= scene.payload


def test_blocks_are_a_random_choice_without_repetition() -> None:
    scene = scenario.load(1000)
    for table, spec in ((scene.source_blocks(), scene.source), (scene.target_blocks(), scene.target)):
        assert len(table) == -(-1000 // spec.block_size) == len(set(table.tolist()))
        assert table.max() < spec.blocks
        assert (np.diff(table) != 1).any()


def test_codec_and_channels_can_be_chosen() -> None:
    scene = scenario.load(4096, codec="bfp8_b", channels=7)
    assert scene.target.codec == "bfp8_b"
    assert scene.channels == 7
    assert scene.target_bytes < scene.source_bytes


@pytest.mark.parametrize("available", [700 * MIB, 1000 * MIB, 2000 * MIB])
def test_short_memory_means_fewer_tokens(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(scenario, "available_memory", lambda: available)
    scene = scenario.fit(65536, 80 * MIB)
    assert 64 <= scene.tokens < 65536
    assert scene.tokens % scene.target.block_size == 0
    assert scenario.needed(scene, 80 * MIB) <= available
    most = min(available, scenario.needed(scenario.load(4096), 80 * MIB))
    more = scenario.load(scene.tokens + 2 * scene.target.block_size)
    assert scenario.needed(more, 80 * MIB) > most * 0.95


@pytest.mark.parametrize(("available", "reserve"), [(3000, 750), (20480, 5120)])
def test_a_large_request_leaves_a_reserve(
    monkeypatch: pytest.MonkeyPatch, available: int, reserve: int
) -> None:
    monkeypatch.setattr(scenario, "available_memory", lambda: available * MIB)
    scene = scenario.fit(1 << 20, 80 * MIB)
    left = available * MIB - scenario.needed(scene, 80 * MIB)
    assert reserve * MIB <= left < (reserve + 100) * MIB


def test_two_gigabytes_are_enough_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario, "available_memory", lambda: 1900 * MIB)
    assert scenario.fit(4096, 80 * MIB).tokens == 4096


def test_no_room_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario, "available_memory", lambda: 200 * MIB)
    with pytest.raises(OutOfMemory, match="not even one block"):
        scenario.fit(4096, 80 * MIB)


def test_no_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="tokens"):
        scenario.load(0)
