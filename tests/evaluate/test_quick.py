"""`hawk evaluate --quick` as a person runs it: benchmarks and simulation for real, and the page in a browser."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def hawk(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from hawk.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=900
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate") / "out"
    began = time.monotonic()
    done = hawk(
        "evaluate", "--quick", "--out", str(folder), "--from", str(ROOT / "docs" / "measured" / "two-h200")
    )
    assert done.returncode == 0, done.stderr
    print(f"{time.monotonic() - began:.0f} s")
    return folder


@pytest.mark.timeout(900)
def test_everything_that_was_asked_is_there(out: Path) -> None:
    told = json.loads((out / "summary.json").read_text())
    for name in told["files"]:
        assert (out / name).stat().st_size > 0
    assert {"measured/between.json", "measured/retile.json", "measured/fragmentation.json"} <= set(
        told["measured"]
    )
    for name in ("figure-9-here", "figure-9-elsewhere-1", "figure-9-simulated"):
        with (out / f"{name}.csv").open(newline="") as file:
            ways = {row["configuration"] for row in csv.DictReader(file)}
        assert ways == {"gg-host", "gn-host", "gg-direct", "gn-hawk"}


@pytest.mark.timeout(900)
def test_a_second_run_is_refused_and_replaces_the_first_where_it_may(out: Path) -> None:
    done = hawk("evaluate", "--quick", "--no-measure", "--out", str(out))
    assert done.returncode == 1
    assert "--overwrite" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.timeout(900)
@pytest.mark.skipif(BROWSER is None, reason="no Chromium to look with")
@pytest.mark.parametrize("width", [1366, 800])
def test_a_browser_shows_it(out: Path, width: int, tmp_path: Path) -> None:
    """Everything is laid out within the window: nothing but tables scrolls sideways, and no drawing is empty."""
    assert BROWSER is not None
    text = (out / "report.html").read_text()
    look = """<script>
      addEventListener("load", () => {
        const wide = [...document.querySelectorAll("main *")].filter(e => !e.closest(".scroll") && !e.closest("svg")
          && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + "." + e.className);
        const drawings = [...document.querySelectorAll("figure svg")].map(s => s.getBoundingClientRect());
        const cut = [...document.querySelectorAll("svg")].flatMap(s => {
          const frame = s.getBoundingClientRect();
          return [...s.querySelectorAll("text")].filter(t => {
            const box = t.getBoundingClientRect();
            return box.left < frame.left - 1 || box.right > frame.right + 1
              || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
          }).map(t => t.textContent);
        });
        document.body.textContent = JSON.stringify({wide, cut, empty: drawings.filter(b => b.height < 100).length,
          scrolls: document.documentElement.scrollWidth > innerWidth});
      });
    </script>"""
    page = tmp_path / "looked.html"
    page.write_text(text.replace("</body>", look + "</body>"))
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command += [f"--window-size={width},900", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    body = done.stdout[done.stdout.index("<body>") + 6 : done.stdout.index("</body>")]
    assert json.loads(body) == {"wide": [], "cut": [], "empty": 0, "scrolls": False}
