"""Moves inside banks as a program of ttnn: arguments, tables, launches, and the kernel itself on the host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hawk.errors import DeviceReset, HawkMemoryError, InvalidArgument, MissingDependency
from hawk.integrations.ttnn import BankMover, reserve, trial
from hawk.integrations.ttnn.moves import Shares, launches, require_apart
from hawk.memory.region import Moves
from hawk.memory.tenstorrent import Reservation
from tests import fake_ttnn_programs as programs
from tests.fake_ttnn import Mesh

ROOM = 1 << 14
RUNS: list[Any] = [
    programs.interpreted,
    pytest.param(
        programs.compiled,
        marks=pytest.mark.skipif(
            programs.COMPILER is None, reason="no C++ compiler to build the kernel with"
        ),
    ),
]
SMALL = {"slots": 4, "piece": 128, "pages": 1}
"""Moves in many pieces, batches and launches."""


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> Callable[..., programs.Programs]:
    def install(run: programs.Run = programs.interpreted) -> programs.Programs:
        made = programs.Programs(run)
        made.install(monkeypatch)
        return made

    return install


def moves(rows: Any) -> Moves:
    table = np.asarray(rows, np.int64).reshape(-1, 4)
    return Moves(table[:, 0].astype(np.int32), table[:, 1].copy(), table[:, 2].copy(), table[:, 3].copy())


def filled(mesh: Mesh, held: Reservation, seed: int) -> list[np.ndarray]:
    """Random bytes in the reservation, and a copy of them by bank; canaries on both sides stay as they are."""
    random = np.random.default_rng(seed)
    for bank in range(mesh.banks):
        mesh.view(0, bank, held.address, held.nbytes)[:] = random.integers(0, 256, held.nbytes, np.uint8)
    return [mesh.memory[0][bank].copy() for bank in range(mesh.banks)]


def carried_out(before: list[np.ndarray], held: Reservation, rows: Any, first: int) -> list[np.ndarray]:
    """The plain model."""
    after = [bank.copy() for bank in before]
    at = held.address - first
    for bank, source, target, nbytes in rows:
        after[bank][at + target : at + target + nbytes] = before[bank][at + source : at + source + nbytes]
    return after


@st.composite
def apart(draw: st.DrawFn, banks: int) -> list[tuple[int, int, int, int]]:
    """Rows of every length and alignment whose targets meet nothing."""
    rows = []
    step = draw(st.sampled_from([1, 16, 64]))
    for bank in range(banks):
        sizes = draw(st.lists(st.integers(1, 700), max_size=8))
        gaps = draw(st.lists(st.integers(0, 40), min_size=2 * len(sizes), max_size=2 * len(sizes)))
        at, places = 0, []
        for number, gap in enumerate(gaps):
            at = -(-(at + gap) // step) * step
            places.append(at)
            at += sizes[number // 2]
        order = draw(st.permutations(range(len(places))))
        for number, nbytes in enumerate(sizes):
            # Both of a pair have this size's room, whichever of them is the source.
            pair = [2 * number, 2 * number + 1]
            source, target = (places[i] for i in (pair if order[number] % 2 else pair[::-1]))
            rows.append((bank, source, target, nbytes))
    return draw(st.permutations(rows))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("banks", "cores", "alignment"), [(4, 1, 64), (3, 3, 32)])
def test_what_is_moved_is_where_the_plain_model_has_it(run, banks, cores, alignment, lent):
    held_by = lent(run)
    mesh = Mesh(banks=banks, bank_bytes=3 * ROOM)
    programs_ttnn = __import__("ttnn")
    programs_ttnn.get_dram_alignment = lambda: alignment
    held = reserve(mesh, ROOM)
    mover = BankMover(mesh, held, cores=cores, **SMALL)
    first = held.address

    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(rows=apart(banks), seed=st.integers(0, 99))
    def check(rows: list[tuple[int, int, int, int]], seed: int) -> None:
        before = filled(mesh, held, seed)
        launched = mover.launched
        asyncio.run(mover(moves(rows)))
        wanted = carried_out(before, held, rows, first)
        at = mesh.memory[0].shape[1] - (3 * ROOM - ROOM)  # the table lies behind the reservation
        for bank in range(banks):
            assert np.array_equal(mesh.memory[0][bank][:at], wanted[bank][:at])
        assert (mover.launched > launched) == bool(rows)

    check()
    mover.close()
    assert held_by.seen


@pytest.mark.parametrize("run", RUNS)
def test_thousands_of_moves_take_few_launches(run, lent):
    seen = lent(run).seen
    mesh = Mesh(banks=4, bank_bytes=1 << 21)
    held = reserve(mesh, 1 << 20)
    mover = BankMover(mesh, held, cores=2, pages=4)
    number = np.arange(700)
    rows = [
        (bank, source * 1088 % (1 << 19) // 64 * 64, (1 << 19) + int(target) * 704, 576)
        for bank in range(4)
        for source, target in zip(number, np.random.default_rng(bank).permutation(700), strict=True)
    ]
    before = filled(mesh, held, 1)
    asyncio.run(mover(moves(rows)))
    for bank, wanted in enumerate(carried_out(before, held, rows, held.address)):
        assert np.array_equal(mesh.memory[0][bank][: 1 << 20], wanted[: 1 << 20])
    assert len(seen) == mover.launched == 2  # 4 pages of 128 moves, for 700
    # What differs is the arguments alone, so that one program serves.
    (first,), (second,) = (program.programs for program in seen)
    assert first[1].kernels[0].compile_time_args == second[1].kernels[0].compile_time_args == [2048, 16, 64]
    assert first[1].kernels[0].core_ranges.cores == second[1].kernels[0].core_ranges.cores
    mover.close()


def test_each_chip_of_a_mesh_moves_its_own(lent):
    seen = lent().seen
    mesh = Mesh(chips=3, banks=2, bank_bytes=1 << 19)
    held = reserve(mesh, 1 << 14)
    for chip in range(3):
        mesh.view(chip, 1, held.address, 64)[:] = chip + 1
    mover = BankMover(mesh, held.of_chip(2))
    asyncio.run(mover(moves([(1, 0, 4096, 64)])))
    found = [int(mesh.view(chip, 1, held.address + 4096, 1)[0]) for chip in range(3)]
    assert found == [0, 0, 3]
    assert [where for where, _ in seen[0].programs] == [((0, 2), (0, 2))]
    mover.close()


def test_shares_are_whole_batches():
    rows = [(bank, 64 * i, 1 << 15 | 128 * i, 64) for bank, n in ((0, 21), (1, 1), (2, 0)) for i in range(n)]
    (one,) = launches(moves(rows), 0, Shares(banks=3, pages=1, cores=3, slots=4, piece=64))
    assert one.first.tolist() == [[0, 8, 16], [0, 1, 1], [0, 0, 0]]
    assert one.count.tolist() == [[8, 8, 5], [1, 0, 0], [0, 0, 0]]


# -- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ([(0, 0, 64, 64), (0, 256, 96, 64)], r"moves\[1\]\.target"),  # two targets
        ([(0, 0, 64, 64), (0, 100, 512, 8)], r"moves\[0\]\.target.*moves\[1\]\.source"),
        ([(0, 0, 32, 64)], r"moves\[0\]\.target.*moves\[0\]\.source"),
        ([(0, 5000, 4936, 65)], r"moves\[0\]\.target"),
    ],
)
def test_moves_that_overlap_are_refused_and_nothing_is_moved(rows, field, lent):
    seen = lent().seen
    mesh = Mesh(banks=2, bank_bytes=1 << 19)
    mover = BankMover(mesh, reserve(mesh, 1 << 14))
    with pytest.raises(InvalidArgument, match=field):
        asyncio.run(mover(moves([*rows, (1, 0, 64, 64)])))
    assert not seen
    mover.close()


def test_rows_that_only_touch_are_taken():
    require_apart(moves([(0, 0, 64, 64), (0, 0, 128, 64), (1, 64, 0, 64), (1, 64, 128, 64)]))


@pytest.mark.parametrize(
    "row",
    [(2, 0, 64, 8), (-1, 0, 64, 8), (0, 0, 64, 0), (0, -1, 64, 8), (0, 16384 - 7, 64, 8), (0, 0, 16384, 8)],
)
def test_moves_that_leave_the_reservation_are_refused(row, lent):
    lent()
    mesh = Mesh(banks=2, bank_bytes=1 << 19)
    mover = BankMover(mesh, reserve(mesh, 16384))
    with pytest.raises(InvalidArgument, match=r"moves\[0\]: .*16384 bytes of banks 0..1"):
        asyncio.run(mover(moves([row])))
    mover.close()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"cores": 0}, "cores"),
        ({"cores": 40}, "cores"),
        ({"slots": 6}, "slots"),
        ({"piece": 100}, "piece"),
        ({"pages": 0}, "pages"),
        ({"cost": -1.0}, "cost"),
        ({"timeout": float("nan")}, "timeout"),
        ({"chips": (0, 1)}, "reservation.chips"),
        ({"chips": (7,)}, "reservation.chips"),
        ({"banks": 3}, "reservation.banks"),
        ({"address": (1 << 32) - 64}, "reservation.nbytes"),
    ],
)
def test_what_makes_no_program_is_refused_by_name(change, field, lent):
    lent()
    mesh = Mesh(chips=2, banks=2)
    figures = {"chips": (1,), "address": 0x100080, "nbytes": 4096, "banks": 2}
    for name in list(change):
        if name in figures:
            figures[name] = change.pop(name)
    with pytest.raises(InvalidArgument) as refused:
        BankMover(mesh, Reservation(**figures), **change)
    assert refused.value.field == field


def test_a_ttnn_without_programs_is_said(lent):
    lent()
    del __import__("ttnn").generic_op
    mesh = Mesh()
    with pytest.raises(MissingDependency, match="generic_op"):
        BankMover(mesh, reserve(mesh, 4096))


# -- what it costs ---------------------------------------------------------------------------------------


def test_costs_are_infinite_until_they_were_measured(lent):
    lent()
    mesh = Mesh(banks=2, bank_bytes=1 << 22)
    mover = BankMover(mesh, reserve(mesh, 4096))
    assert mover.cost == float("inf")
    asyncio.run(mover.measure())
    assert 0 < mover.cost < 1
    assert 0 < mover.row_cost < 1
    assert 0 < mover.call_cost < 10
    mover.close()


def test_a_chip_that_moves_other_bytes_is_not_measured(lent):
    def wrong(mesh: Mesh, chip: int, arguments: list[int], *rest: Any) -> None:
        programs.interpreted(mesh, chip, arguments, *rest)
        if arguments[0] == 1 and arguments[2] > 1:
            mesh.view(chip, 1, mesh.next - trial.PAGES * 2048 // 2 + 5, 1)[:] ^= 1

    lent(wrong)
    mesh = Mesh(banks=2, bank_bytes=1 << 22)
    mover = BankMover(mesh, reserve(mesh, 4096))
    with pytest.raises(HawkMemoryError, match=f"chip 0.*at {trial.PAGES * 1024 + 5} of bank 1"):
        asyncio.run(mover.measure())
    assert mover.cost == float("inf")
    mover.close()


def test_costs_are_those_of_a_chip_that_takes_so_long():
    byte, row, call = 2e-11, 3e-9, 1e-4
    took = [call, call + 512 * row, call + 512 * (row + 2048 * byte)]
    assert trial.costs(took, 512, 512) == pytest.approx((byte, row, call))
    assert trial.costs([1.0, 0.5, 0.25], 512, 512)[:2] == (
        trial.LEAST,
        trial.LEAST,
    )  # a clock that saw nothing


# -- the kernel on the host sees what a chip would not forgive ---------------------------------------------


BROKEN = [
    ("the batch before has left", "noc_async_writes_flushed();", ";"),
    ("stores are there before they are sent", "invalidate_l1_cache();", ";"),
    ("writes agree below 16", "if ((source ^ target) % WRITE_ALIGN)", "if (false)"),
]


@pytest.mark.skipif(programs.COMPILER is None, reason="no C++ compiler to build the kernel with")
@pytest.mark.parametrize(("what", "there", "instead"), BROKEN)
def test_a_kernel_that_is_wrong_is_seen(what, there, instead, lent):
    text = programs.KERNEL.read_text()
    assert text.count(there) == 1, what
    text = text.replace(there, instead)
    lent(lambda *given: programs.compiled(*given, text))
    mesh = Mesh(banks=1, bank_bytes=3 * ROOM)
    held = reserve(mesh, ROOM)
    mover = BankMover(mesh, held, slots=4, piece=128)
    rows = [(0, 300 * i + 7 * (i % 3), ROOM // 2 + 300 * i + i % 32, 100 + i) for i in range(26)]
    before = filled(mesh, held, 3)
    with pytest.raises((AssertionError, DeviceReset)):
        asyncio.run(mover(moves(rows)))
        for bank, wanted in enumerate(carried_out(before, held, rows, held.address)):
            assert np.array_equal(mesh.memory[0][bank][:ROOM], wanted[:ROOM])
    mesh.queue.clear()
    mover.close()
