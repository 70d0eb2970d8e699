"""The lock-step allocator: one offset in every bank, single-bank pieces in nobody's way unnoticed."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hawk.errors import InvalidArgument, OutOfMemory
from hawk.memory.lockstep import LockstepAllocator

UNIT, UNITS = 64, 24


@pytest.mark.parametrize("channels", [1, 7, 8, 12])
def test_bottom_up_and_the_same_in_every_bank(channels: int) -> None:
    device = LockstepAllocator(channels, 64 * 1024, 64)
    a = device.allocate(100, "a")
    b = device.allocate(64, "b")
    assert (a.offset, b.offset) == (0, 128)
    assert a.channels == tuple(range(channels))
    assert device.free_bytes() == [64 * 1024 - 192] * channels
    device.free(a)
    assert device.allocate(64, "c").offset == 0


def test_what_is_brief_does_not_break_up_what_is_free() -> None:
    device = LockstepAllocator(2, 1024, 64)
    staging = device.allocate(128, "staging", brief=True)
    assert staging.offset == 1024 - 128
    a, b = device.allocate(256, "a"), device.allocate(384, "b")
    assert (a.offset, b.offset) == (0, 256)
    device.free(staging)
    assert device.largest_common() == 384


def test_a_piece_in_one_bank_takes_its_offset_from_all_lockstep_allocations() -> None:
    device = LockstepAllocator(4, 1024, 64)
    single = device.allocate(512, "buffer", channels=[2])
    assert single.offset == 0
    # Another bank may use the same address; a tensor in all of them may not.
    assert device.allocate(512, "other", channels=[3]).offset == 0
    assert device.allocate(64, "tensor").offset == 512
    with pytest.raises(OutOfMemory) as e:
        device.allocate(512, "tensor")
    assert e.value.facts["channel"] == "2"
    assert e.value.facts["largest_piece"] == "448"
    assert e.value.facts["free"] == "448"
    assert e.value.field is not None
    assert e.value.field.endswith("channel2")


def test_no_common_offset_though_every_bank_has_a_piece() -> None:
    device = LockstepAllocator(2, 1024, 64)
    device.allocate(512, "low", channels=[0])
    block = device.allocate(512, "block", channels=[1])
    device.allocate(512, "high", channels=[1])
    device.free(block)
    with pytest.raises(OutOfMemory, match="no offset is free in all channels") as e:
        device.allocate(512, "tensor")
    assert e.value.facts["largest_piece"] == "512"
    assert e.value.facts["largest_common_piece"] == "0"
    device.check()


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 1 << 32), channels=st.integers(1, 5))
def test_against_a_model_of_every_unit(seed: int, channels: int) -> None:
    rng = random.Random(seed)
    device = LockstepAllocator(channels, UNIT * UNITS, UNIT)
    model = [[False] * UNITS for _ in range(channels)]
    held = []
    for _ in range(40):
        if held and rng.random() < 0.4:
            gone = held.pop(rng.randrange(len(held)))
            device.free(gone)
            for c in gone.channels:
                for u in range(-(-gone.nbytes // UNIT)):
                    model[c][gone.offset // UNIT + u] = False
        else:
            units = rng.randint(1, 6)
            chosen = sorted(rng.sample(range(channels), rng.randint(1, channels)))
            which = None if rng.random() < 0.5 else chosen
            banks = list(range(channels)) if which is None else chosen
            fits = [
                s for s in range(UNITS - units + 1) if not any(any(model[c][s : s + units]) for c in banks)
            ]
            nbytes = units * UNIT - rng.randrange(UNIT)
            brief = rng.random() < 0.5
            if fits:
                place = fits[-1 if brief else 0]
                got = device.allocate(nbytes, "x", channels=which, brief=brief)
                assert got.offset == place * UNIT
                assert got.channels == tuple(banks)
                held.append(got)
                for c in banks:
                    model[c][place : place + units] = [True] * units
            else:
                with pytest.raises(OutOfMemory):
                    device.allocate(nbytes, "x", channels=which, brief=brief)
        device.check()
        assert device.free_bytes() == [bank.count(False) * UNIT for bank in model]
        run = longest = 0
        for u in range(UNITS):
            run = 0 if any(bank[u] for bank in model) else run + 1
            longest = max(longest, run)
        assert device.largest_common() == longest * UNIT
    assert device.allocations() == held


def test_freeing_twice_and_freeing_what_is_not_ours() -> None:
    device, other = LockstepAllocator(2, 1024, 64), LockstepAllocator(2, 1024, 64)
    a = device.allocate(64, "a")
    with pytest.raises(InvalidArgument):
        other.free(a)
    device.free(a)
    with pytest.raises(InvalidArgument):
        device.free(a)
    device.check()
    assert device.free_bytes() == [1024, 1024]


@pytest.mark.parametrize("channels", [[], [0, 0], [-1], [2]])
def test_bad_channels(channels: list[int]) -> None:
    device = LockstepAllocator(2, 1024, 64)
    with pytest.raises(InvalidArgument):
        device.allocate(64, "a", channels=channels)
    assert device.free_bytes() == [1024, 1024]


def test_no_channels_at_all() -> None:
    with pytest.raises(InvalidArgument):
        LockstepAllocator(0, 1024)
