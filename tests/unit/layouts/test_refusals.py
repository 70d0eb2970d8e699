"""Whoever is refused a layout or a plan is told what was given, and what would have done."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KINDS = {"LayoutError", "InvalidArgument", "Unmappable"}
FILES = sorted([*(ROOT / "layouts").glob("*.py"), *(ROOT / "hawk" / "plan").glob("*.py")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_refusals_say_field_got_and_expected(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
            continue
        name = getattr(node.exc.func, "id", "")
        told = {keyword.arg for keyword in node.exc.keywords}
        if name in KINDS and None not in told:
            assert {"field", "got", "expected"} <= told, (
                f"line {node.lineno}: {name} says only {sorted(told)}"
            )
