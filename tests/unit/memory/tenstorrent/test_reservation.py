"""What may be reserved of a chip's memory, as a plain value."""

import pickle
from typing import Any

import pytest

from hawk.errors import InvalidArgument
from hawk.memory.tenstorrent import Reservation

GOOD: dict[str, Any] = {"chips": (0,), "address": 0x100080, "nbytes": 1 << 20, "banks": 8}


def test_a_reservation_is_a_value() -> None:
    held = Reservation(**GOOD, holder=object())
    assert held == Reservation(**GOOD)
    assert (held.end, held.total) == (0x200080, 8 << 20)
    Reservation(**GOOD, lowest=0x100080, highest=0x200080)
    assert pickle.loads(pickle.dumps(Reservation(**GOOD))) == held


def test_one_of_a_mesh() -> None:
    tensor = object()
    mesh = Reservation(**GOOD | {"chips": (2, 0, 1, 3)}, holder=tensor)
    assert [one.chips for one in mesh.each()] == [(2,), (0,), (1,), (3,)]
    assert mesh.of_chip(1).holder is tensor
    with pytest.raises(InvalidArgument, match=r"reservation\.chip: .*got 4"):
        mesh.of_chip(4)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"chips": ()}, "chips"),
        ({"chips": (0, 0)}, "chips"),
        ({"chips": (-1,)}, "chips"),
        ({"banks": 0}, "banks"),
        ({"banks": 65}, "banks"),
        ({"address": -64}, "address"),
        ({"nbytes": 0}, "nbytes"),
        ({"nbytes": 1 << 50}, "nbytes"),
        ({"alignment": 48}, "alignment"),
        ({"alignment": None}, "alignment"),
        ({"banks": "8"}, "banks"),
        ({"banks": True}, "banks"),
        ({"address": 1048704.0}, "address"),
        ({"nbytes": None}, "nbytes"),
        ({"chips": 0}, "chips"),
        ({"chips": ("0",)}, "chips"),
        ({"alignment": 256}, "address"),
        ({"lowest": 0x1000C0}, "address"),
        ({"highest": 0x200040}, "nbytes"),
        ({"highest": "0x200080"}, "highest"),
        ({"alignment": 64, "nbytes": 100}, "nbytes"),
    ],
)
def test_what_is_no_reservation_is_refused_with_the_field(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"reservation\.{field}"):
        Reservation(**GOOD | wrong)
