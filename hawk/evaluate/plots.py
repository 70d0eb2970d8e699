"""Figures as SVG, by matplotlib.

What was measured has filled markers (half filled where it was elsewhere) and unbroken lines; what is simulated has
hollow markers of other shapes and broken lines; the paper's numbers are crosses without a line.  Each legend says which
as well.  Configurations differ in colour, in marker and, where lines are broken, in the pattern, so that a grey print
still tells them apart.
"""

from __future__ import annotations

import io
import math
import re
from typing import Any

from hawk.errors import MissingDependency
from hawk.evaluate.records import Axis, Figure, Origin, Panel, Point, Series
from hawk.evaluate.styles import HATCHES, style
from hawk.extras import install

WIDTH, HEIGHT = 10.6, 4.1
"""Inches of a figure; at the page's width an inch is about 100 pixels."""

KEY = (6.0, 1.3)

LONGEST = 60
"""Characters of a series' name in a legend."""

_SETTINGS = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.labelsize": 10,
    "legend.fontsize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "path.simplify": False,
    # Names come from files: a "$" in them is no formula.
    "text.parse_math": False,
}

_FONTS = "font-family: system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def library() -> Any:
    """Matplotlib; raises `MissingDependency` without it."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingDependency(
            "plots need matplotlib", field="matplotlib", got=error, hint=install("evaluate")
        ) from error
    return mpl


def svg(figure: Figure) -> str:
    """`figure` as one `<svg>` element that stands on its own, with a title and a description.

    Ids begin with the figure's name, so that many can stand in one page.  Raises `MissingDependency`.
    """
    mpl = library()
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Drawing

    with mpl.rc_context({**_SETTINGS, "svg.hashsalt": figure.name}):
        columns = len(figure.panels)
        size = KEY if figure.form == "key" else (WIDTH, HEIGHT)
        drawing = Drawing(figsize=size, layout="constrained")
        FigureCanvasSVG(drawing)
        axes = drawing.subplots(1, columns, squeeze=False)[0]
        for ax, panel in zip(axes, figure.panels, strict=True):
            _panel(ax, figure, panel)
        handles: dict[str, Any] = {}
        for ax in sorted(axes, key=lambda ax: -len(ax.get_legend_handles_labels()[1])):
            for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        if figure.form == "key":
            _key(axes[0], figure.panels[0])
        elif handles:
            drawing.legend(
                list(handles.values()),
                list(handles),
                loc="outside lower center",
                ncols=_columns(handles),
                frameon=False,
                handlelength=3.4,
            )
        out = io.StringIO()
        drawing.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return _standalone(out.getvalue(), figure)


def _columns(labels: dict[str, Any]) -> int:
    """How many entries stand side by side: as many as fit, in rows as even as they can be."""
    longest = max(len(label) for label in labels)
    fit = max(1, min(4, int(150 / (longest + 9))))
    return math.ceil(len(labels) / math.ceil(len(labels) / fit))


def _panel(ax: Any, figure: Figure, panel: Panel) -> None:
    y = panel.y or figure.y
    ax.set_title(panel.title, loc="left")
    for one in panel.series:
        if figure.form == "bars":
            _bars(ax, one)
        else:
            _series(ax, one, figure.form != "points")
    for line in panel.lines:
        ax.axhline(line.at, color="#666666", linewidth=0.9, zorder=1)
        # Named where it lies, at the right edge, and readable where a series passes.
        ax.annotate(
            line.label,
            (1.0, line.at),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=9,
            color="#333333",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8},
            zorder=4,
        )
    _axis(ax, "x", figure.x, [p.x for s in panel.series for p in s.points], len(figure.panels))
    values = [v for s in panel.series for p in s.points for v in (p.y, p.low, p.high) if v is not None]
    _axis(
        ax,
        "y",
        y,
        [*values, *(line.at for line in panel.lines)],
        room=1.15 if figure.form == "bars" else 1.06,
    )


def _key(ax: Any, panel: Panel) -> None:
    """Each series named beside itself, without axes."""
    ax.set_axis_off()
    ax.set_xlim(-0.1, 3.2)
    ax.set_ylim(-len(panel.series) + 0.5, 0.5)
    for one in panel.series:
        ax.annotate(one.told, (1.15, one.points[0].y), va="center")


def _series(ax: Any, one: Series, joined: bool) -> None:
    look = style(one.way, one.origin)
    xs, ys = [p.x for p in one.points], [p.y for p in one.points]
    spread = [p for p in one.points if p.low is not None and p.high is not None]
    if spread:
        below = [p.y - (p.low or 0.0) for p in spread]
        above = [(p.high or 0.0) - p.y for p in spread]
        ax.errorbar(
            [p.x for p in spread],
            [p.y for p in spread],
            yerr=[[max(0.0, v) for v in below], [max(0.0, v) for v in above]],
            fmt="none",
            ecolor=look.colour,
            elinewidth=1.0,
            capsize=2.5,
        )
    ax.plot(
        xs,
        ys,
        label=_label(one),
        color=look.colour,
        marker=look.marker,
        markersize=look.size,
        fillstyle=look.fill if look.fill != "none" else "full",
        markerfacecolor="white" if look.fill == "none" else look.colour,
        markerfacecoloralt="white",
        markeredgecolor=look.colour,
        markeredgewidth=1.3,
        linestyle=look.line if joined else "none",
        linewidth=1.6,
    )


def _label(one: Series) -> str:
    """What a legend says: in all of a name that one line has room for; matplotlib leaves out what begins with "_"."""
    name = one.label if len(one.label) <= LONGEST else one.label[: LONGEST - 1] + "\u2026"
    told = f"{name} ({one.origin.value})"
    return f" {told}" if told.startswith("_") else told


def _bars(ax: Any, one: Series) -> None:
    """Bars with their values on them; simulated ones are hollow and hatched, with a broken edge."""
    look = style(one.way, one.origin)
    drawn = ax.bar(
        [p.x for p in one.points],
        [p.y for p in one.points],
        width=0.6,
        label=_label(one),
        facecolor=look.colour if look.fill == "full" else "white",
        edgecolor=look.colour,
        linewidth=1.4,
        linestyle="--" if one.origin is Origin.SIMULATED else "-",
        hatch={"none": HATCHES.get(one.way, "//"), "left": "..", "full": ""}[look.fill],
    )
    ax.bar_label(drawn, labels=[f"{p.y:.4g}" for p in one.points], padding=3)


def _axis(
    ax: Any, which: str, axis: Axis, values: list[float], side_by_side: int = 1, room: float = 1.06
) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    getattr(ax, f"set_{which}label")(axis.told)
    own = ax.xaxis if which == "x" else ax.yaxis
    positive = [v for v in values if v > 0]
    if axis.log and positive:
        getattr(ax, f"set_{which}scale")("log")
        own.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
        own.set_minor_formatter(NullFormatter())
        if which == "x":
            ticks = _doublings(min(positive), max(positive), side_by_side)
            own.set_major_locator(FixedLocator(ticks))
            own.set_minor_locator(NullLocator())
        else:
            own.set_major_locator(FixedLocator(_decades(min(positive), max(positive))))
    elif which == "y":
        ax.set_ylim(bottom=0, top=room * max(values, default=1.0) or 1.0)
    if axis.names:
        own.set_major_locator(FixedLocator(range(len(axis.names))))
        own.set_ticklabels(axis.names)
        ax.margins(x=0.08)


def _doublings(least: float, most: float, side_by_side: int) -> list[float]:
    """10, 20, 40, ...: sizes of the paper; every second or third of them where there is little room."""
    found = [10.0 * 2**e for e in range(-12, 24, min(side_by_side, 3))]
    inside = [v for v in found if least / 1.3 <= v <= most * 1.3]
    return inside or [least, most]


def _decades(least: float, most: float) -> list[float]:
    """1, 2 and 5 of each power of ten between; more where there are few, the powers alone where there are many."""
    steps = (1, 1.5, 2, 3, 5, 7) if most / least < 10 else (1, 2, 5) if most / least < 1000 else (1,)
    found = [s * 10.0**e for e in range(-9, 13) for s in steps]
    inside = [v for v in found if least / 1.5 <= v <= most * 1.5]
    return inside or [least, most]


_ID = re.compile(r'\bid="([^"]+)"')
_DROPPED = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)


def _standalone(text: str, figure: Figure) -> str:
    """The `<svg>` element alone, without what names other places, with ids of its own, titled."""
    text = _DROPPED.sub("", text[text.index("<svg") :])
    own = f"{figure.name}-"
    for name in sorted(set(_ID.findall(text)), key=len, reverse=True):
        text = text.replace(f'id="{name}"', f'id="{own}{name}"')
        text = text.replace(f'xlink:href="#{name}"', f'href="#{own}{name}"')
        text = text.replace(f"url(#{name})", f"url(#{own}{name})")
    head = text[: text.index(">")]
    box = re.search(r'viewBox="[^"]+"', head)
    assert box is not None
    opening = (
        f'<svg {box.group()} role="img" aria-labelledby="{own}title {own}desc" style="{_FONTS}">'
        f'<title id="{own}title">{_text(figure.title)}</title>'
        f'<desc id="{own}desc">{_text(figure.described())}</desc>'
    )
    return opening + text[len(head) + 1 :]


def _text(words: str) -> str:
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def legend_of_origins() -> str:
    """One small drawing of what measured, simulated and printed points look like."""
    kinds = (Origin.HERE, Origin.ELSEWHERE, Origin.SIMULATED, Origin.PAPER)
    series = tuple(
        Series("GN-HAWK", "gn-hawk", kind, "an example", tuple(Point(x, -float(i)) for x in (0.0, 0.5, 1.0)))
        for i, kind in enumerate(kinds)
    )
    axis = Axis("", "", "example")
    return svg(
        Figure(
            "key", "How the origins of numbers are drawn", "", axis, axis, (Panel("", series),), form="key"
        )
    )
