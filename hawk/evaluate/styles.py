"""How series look: colour by configuration; marker and line by configuration and by where the numbers come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hawk.evaluate.records import Origin


@dataclass(frozen=True)
class Look:
    """A series' colour, marker (as matplotlib names them), its size in points, how it is filled, and its line.

    fill    "full", "left" (half of it) or "none", as matplotlib names them
    """

    colour: str
    marker: str
    size: float
    fill: str
    line: Any


_COLOURS = {
    # Of Okabe and Ito's palette, the four that differ most in lightness, darkened where a thin line would be too faint.
    "gg-host": "#0072b2",
    "gn-host": "#d55e00",
    "gg-direct": "#000000",
    "gn-hawk": "#009e73",
    "ggh-direct": "#7b4b94",
    "gn-host-overlapped": "#b8860b",
    "first-channel": "#d55e00",
    "emptiest-channel": "#0072b2",
    "every-channel": "#009e73",
    # What belongs to no configuration: whose numbers they are is what differs.
    "this machine": "#000000",
    "another machine": "#0072b2",
    "a third machine": "#d55e00",
    "a fourth machine": "#009e73",
    "a fifth machine": "#7b4b94",
}
_OTHER = "#555555"

_MEASURED = {
    "gg-host": "s",
    "gn-host": "^",
    "gg-direct": "o",
    "gn-hawk": "D",
    "ggh-direct": "P",
    "gn-host-overlapped": "<",
    "this machine": "o",
    "another machine": "s",
    "a third machine": "^",
    "a fourth machine": "D",
    "a fifth machine": "P",
}
_SIMULATED = {
    "gg-host": "p",
    "gn-host": "v",
    "gg-direct": "h",
    "gn-hawk": "*",
    "ggh-direct": "8",
    "gn-host-overlapped": ">",
    "first-channel": "v",
    "emptiest-channel": "p",
    "every-channel": "*",
}
_BROKEN = {
    "gg-host": (0, (6, 2)),
    "gn-host": (0, (2, 1.5)),
    "gg-direct": (0, (8, 2, 2, 2)),
    "gn-hawk": (0, (4, 1.5)),
    "ggh-direct": (0, (6, 1.5, 1, 1.5, 1, 1.5)),
}

HATCHES = {"gg-host": "//", "gn-host": "xx", "gg-direct": "\\\\", "gn-hawk": "||", "ggh-direct": "--"}
"""Of bars, as matplotlib names them."""


def style(way: str, origin: Origin) -> Look:
    """The look of a configuration's numbers of that origin; no two origins share marker, filling and line."""
    colour = _COLOURS.get(way, _OTHER)
    if origin is Origin.PAPER:
        return Look(colour, "X", 9.0, "full", "none")
    if origin is Origin.SIMULATED:
        return Look(colour, _SIMULATED.get(way, "d"), 8.5, "none", _BROKEN.get(way, (0, (3, 2))))
    marker = _MEASURED.get(way, "o")
    if origin is Origin.ELSEWHERE:
        return Look(colour, marker, 7.5, "left", "-")
    return Look(colour, marker, 5.5, "full", "-")
