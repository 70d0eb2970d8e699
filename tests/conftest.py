"""Rules for every test: in CI a skip is a failure, unless it stands in the list below with its reason."""

import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fake_cuda import FakeCuda

if (
    "HAWK_LAB_NODE" not in os.environ
):  # in an emulated machine importing it takes seconds, and nobody there needs it
    from hypothesis import settings

    # No test is about how long it takes: a busy machine is no fault.
    settings.register_profile("hawk", parent=settings(), deadline=None)
    settings.load_profile("hawk")

SKIPS_ALLOWED_IN_CI: dict[str, str] = {}
"""Part of a test's id, and why no CI machine can run it."""

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not IN_CI or report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    if any(part in report.nodeid for part in SKIPS_ALLOWED_IN_CI):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"skipped, and CI allows no skip that tests/conftest.py does not list: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip(report)
    return report


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for a Unix socket's; with a user's name in it pytest's own may not."""
    with tempfile.TemporaryDirectory(prefix="hk-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def driver_with_rows(driver: "FakeCuda", monkeypatch: pytest.MonkeyPatch) -> "FakeCuda":
    """The same with the kernel that copies rows, made up as well."""
    from tests.fake_cuda_parts import fake_rows

    fake_rows(monkeypatch, driver)
    return driver


@pytest.fixture
def driver() -> Iterator["FakeCuda"]:
    """A CUDA driver of two GPUs that is made up; tests of whole jobs leave nothing on them."""
    from hawk.memory import cuda_driver
    from tests.fake_cuda import FakeCuda

    fake = FakeCuda(devices=2)
    with cuda_driver.using(fake):
        yield fake
