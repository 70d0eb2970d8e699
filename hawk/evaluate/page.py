"""The report as one HTML page that needs nothing but itself: style and drawings are in it, and no script is."""

from __future__ import annotations

import re
from importlib import resources
from typing import TYPE_CHECKING, Any

from hawk._version import __version__
from hawk.errors import MissingDependency
from hawk.evaluate import plots
from hawk.evaluate.records import ORIGIN, Figure, inputs_table
from hawk.extras import install

if TYPE_CHECKING:
    from hawk.evaluate.records import Report, Table

LONG = 40
"""Rows of a table beyond which it scrolls."""


def library() -> Any:
    """Jinja2; raises `MissingDependency` without it."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependency(
            "the page needs jinja2", field="jinja2", got=error, hint=install("evaluate")
        ) from error
    return jinja2


def html(report: Report) -> str:
    """The page; raises `MissingDependency` without the extra `evaluate`."""
    jinja2 = library()
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    folder = resources.files("hawk.evaluate")
    page, item = (
        environment.from_string(folder.joinpath(name).read_text(encoding="utf-8"))
        for name in ("page.html", "item.html")
    )

    def rendered(one: Figure | Table) -> Markup:
        about = {"name": one.name, "title": one.title, "caption": one.caption}
        about["origins"] = [origin.value for origin in one.origins]  # type: ignore[assignment]
        if isinstance(one, Figure):
            return Markup(item.render(svg=Markup(plots.svg(one)), **about))
        return Markup(item.render(svg="", **about, **_cells(one)))

    sections = [
        {
            "id": re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-"),
            "title": section.title,
            "words": section.words,
            "parts": [rendered(one) for one in section.items],
        }
        for section in report.sections
    ]
    text: str = page.render(
        report=report,
        sections=sections,
        inputs=rendered(inputs_table(report.inputs)),
        key=Markup(plots.legend_of_origins()),
        version=__version__,
    )
    return text


def _cells(table: Table) -> dict[str, Any]:
    columns = [
        # A column that is called as what its numbers are is called so once.
        {
            "title": "" if c.origin and c.title == c.origin.value else c.title,
            "number": bool(c.form) or c.right,
            "origin": c.origin.value if c.origin else "",
        }
        for c in table.columns
    ]
    rows = [
        [
            {
                "text": column.shown(value),
                "number": bool(column.form) or column.right,
                "tag": column.column == ORIGIN,
            }
            for column, value in zip(table.columns, row, strict=True)
        ]
        for row in table.body
    ]
    return {"columns": columns, "rows": rows, "long": len(rows) > LONG}
