"""The bank map: from what the driver says of a chip, never from what chips usually have."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawk.errors import DeviceDenied, DeviceReset, HawkMemoryError, InvalidArgument, MissingDependency
from hawk.memory.tenstorrent import Chip, Reservation, umd
from hawk.memory.tenstorrent.windows import budget, laid
from tests.fake_tenstorrent import chip, fake_umd

GIB = 1 << 30


def test_each_channel_is_a_bank_where_there_are_as_many() -> None:
    banks = chip(channels=7).banks(7)
    assert [b.core for b in banks] == [(20 + c, 40) for c in range(7)]
    assert {(b.offset, b.nbytes) for b in banks} == {(0, 4 * GIB)}


def test_two_banks_share_a_channel_where_there_are_twice_as_many() -> None:
    banks = chip("wormhole_b0", channels=6, channel_bytes=2 * GIB).banks(12)
    assert [b.core[0] - 20 for b in banks] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [b.offset for b in banks] == [0, GIB] * 6
    assert {b.nbytes for b in banks} == {GIB}


def test_which_of_a_channels_cores_may_be_said() -> None:
    assert [b.core[1] for b in chip(channels=2).banks(2, ports=[2, 4])] == [42, 41]


@pytest.mark.parametrize(("banks", "channels"), [(8, 7), (12, 8), (7, 8)])
def test_banks_that_do_not_divide_over_the_channels_are_refused(banks: int, channels: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"reservation\.banks.*multiple of {channels}"):
        chip(channels=channels).banks(banks)


def test_a_chip_without_dram_is_refused() -> None:
    with pytest.raises(HawkMemoryError, match="no DRAM"):
        Chip(0, "blackhole", (), GIB)


def reserved(address: int, nbytes: int, banks: int = 12, *, alignment: int = 0) -> Reservation:
    return Reservation((0,), address, nbytes, banks, alignment)


def test_a_reservation_is_held_against_the_chip() -> None:
    wormhole = chip("wormhole_b0", channels=6, channel_bytes=2 * GIB)
    assert len(wormhole.check(reserved(0x100040, GIB - 0x100040))) == 12
    with pytest.raises(
        InvalidArgument, match=r"reservation\.nbytes: .*crosses the end of a bank.*a bank has"
    ):
        wormhole.check(reserved(0x100040, GIB - 0x100020))
    with pytest.raises(InvalidArgument, match=r"reservation\.address: .*multiple of 32"):
        wormhole.check(reserved(0x100050, 4096))
    with pytest.raises(InvalidArgument, match=r"reservation\.nbytes: .*multiple of 64"):
        chip().check(reserved(0x100080, 4096 + 32, banks=8))
    with pytest.raises(InvalidArgument, match=r"reservation\.chips"):
        chip(number=3).check(reserved(0x100080, 4096, banks=8))
    chip().check(reserved(0x100080, 4096 + 32, banks=8, alignment=32))


@pytest.mark.parametrize(
    ("described", "banks", "last"),
    [
        (chip(), 8, 4 * GIB - (16 << 20)),
        (chip("wormhole_b0", channels=6, channel_bytes=2 * GIB), 12, GIB),
    ],
)
def test_what_the_chips_own_software_keeps_is_nobodys(described: Chip, banks: int, last: int) -> None:
    first = 1 << 20
    described.check(reserved(first, last - first, banks))
    with pytest.raises(InvalidArgument, match=rf"reservation\.address.*within 0x100000 to {last:#x}"):
        described.check(reserved(first - 64, 4096, banks))
    if last % GIB:
        with pytest.raises(InvalidArgument, match=rf"reservation\.nbytes.*within 0x100000 to {last:#x}"):
            described.check(reserved(last - 4096, 4096 + 64, banks))
    # Its allocator knows better, of which the bank is the end even so.
    asked = Reservation((0,), 0x80000, 4096, banks, lowest=0x80000, highest=last)
    described.check(asked)
    with pytest.raises(InvalidArgument, match="crosses the end of a bank"):
        described.check(Reservation((0,), 0x80000, 4 * GIB, banks, lowest=0x80000, highest=8 * GIB))


# -- what tt-umd says ------------------------------------------------------------------------------------------


def test_the_drivers_own_description_is_taken() -> None:
    device = umd.open_chip(0, umd=lambda: fake_umd(arch="WORMHOLE_B0", channels=5, channel_bytes=2 * GIB))
    assert device.chip == chip("wormhole_b0", channels=5, channel_bytes=2 * GIB)


def test_without_tt_umd_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(MissingDependency, match=r"CLONE\[tenstorrent\]"):
        umd.open_chip(0)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (RuntimeError("Failed opening /dev/tenstorrent/0: Permission denied"), DeviceDenied),
        (RuntimeError("ioctl: No such device"), DeviceReset),
        (RuntimeError("PCIe is hung\nbacktrace"), DeviceReset),
        (ValueError("no such chip"), HawkMemoryError),
    ],
)
def test_what_the_driver_says_in_words_is_an_error_of_ours(fault: Exception, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        umd.open_chip(0, umd=lambda: fake_umd(fault=fault))
    assert type(caught.value) is error
    assert "backtrace" not in str(caught.value)


def test_large_pieces_go_by_dma_where_that_is_wanted() -> None:
    module = fake_umd()
    device = umd.open_chip(0, dma=True, umd=lambda: module)
    for nbytes in (umd.DMA_BYTES, 64):
        data = np.arange(nbytes, dtype=np.uint8)
        into = np.zeros(nbytes, np.uint8)
        device.write((20, 40), 0x1000 * nbytes, data)
        device.read((20, 40), 0x1000 * nbytes, into)
        assert np.array_equal(data, into)
    assert [call[0] for call in module.calls] == ["dma_write", "noc_read", "noc_write", "noc_read"]
    device.close()
    with pytest.raises(HawkMemoryError, match="closed"):
        device.read((20, 40), 0, np.zeros(4, np.uint8))


# -- windows over a reservation --------------------------------------------------------------------------------


def test_one_large_window_covers_a_bank() -> None:
    windows, covered = laid(chip().banks(8), reserved(0x100080, 3 * GIB, 8), {4 * GIB: 8, 2 << 20: 201})
    assert covered == 3 * GIB
    assert [(w.bank, w.size, w.address, w.start, w.skip) for w in windows] == [
        (b, 4 * GIB, 0, 0, 0x100080) for b in range(8)
    ]


def test_short_of_windows_every_bank_has_the_same_less() -> None:
    windows, covered = laid(chip().banks(8), reserved(0x100080, 3 * GIB, 8), {4 * GIB: 7, 2 << 20: 27})
    assert len(windows) == 24
    assert covered == 3 * (2 << 20) - 0x100080
    assert laid(chip().banks(8), reserved(0x100080, GIB, 8), {4 * GIB: 7}) == ([], 0)


def test_a_share_of_the_windows() -> None:
    kinds = ((16 << 20, 19), (2 << 20, 10), (1 << 20, 156))
    assert budget(kinds, 0.5, 1.0) == {16 << 20: 19, 2 << 20: 5, 1 << 20: 78}
    assert budget(kinds, 1.0, 0.1) == {16 << 20: 1, 2 << 20: 10, 1 << 20: 156}
    assert budget((), 1.0, 1.0) == {}


@given(
    channels=st.integers(1, 6),
    each=st.integers(1, 3),
    address=st.integers(0, 1 << 16).map(lambda n: n * 64),
    nbytes=st.integers(1, 1 << 16).map(lambda n: n * 64),
    free=st.dictionaries(st.sampled_from([1 << 14, 1 << 16, 1 << 20]), st.integers(0, 60), max_size=3),
)
def test_windows_lie_side_by_side_within_the_budget_and_cross_nothing(
    channels: int, each: int, address: int, nbytes: int, free: dict[int, int]
) -> None:
    banks = chip(channels=channels, channel_bytes=each * (9 << 20)).banks(channels * each)
    windows, covered = laid(banks, reserved(address, nbytes, len(banks)), free)
    assert 0 <= covered <= nbytes
    for size, count in free.items():
        assert sum(w.size == size for w in windows) <= count
    for number, bank in enumerate(banks):
        mine = [w for w in windows if w.bank == number]
        assert sum(w.nbytes for w in mine) == covered
        at = 0
        for w in mine:
            assert w.start == at
            assert w.address % w.size == 0
            assert w.address + w.skip == bank.offset + address + w.start
            assert 0 < w.nbytes <= w.size - w.skip
            at += w.nbytes
    if (
        covered < nbytes and each == 1
    ):  # nothing more could be had: of no size are there enough for every bank
        used = {size: sum(w.size == size for w in windows) for size in free}
        assert all(count - used[size] < len(banks) for size, count in free.items())
