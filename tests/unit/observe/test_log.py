"""Logs: the host's own logging is left alone; an agent's process writes lines."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from hawk.observe.log import configure, get


@pytest.fixture
def own_process() -> Iterator[None]:
    """What `configure` changes is put back, since the tests' process is not an agent's."""
    root, hawk = logging.getLogger(), logging.getLogger("hawk")
    before = (list(root.handlers), root.level, hawk.level)
    yield
    root.handlers[:], root.level, hawk.level = before[0], before[1], before[2]
    logging.getLogger("hawk").manager._clear_cache()  # type: ignore[attr-defined]


def test_a_host_sees_ordinary_records(caplog: pytest.LogCaptureFixture) -> None:
    handlers = list(logging.getLogger().handlers), list(logging.getLogger("hawk").handlers)
    configured = structlog.is_configured()
    with caplog.at_level(logging.INFO, "hawk.test"):
        get("hawk.test").info("range left quarantine", job="j1", bytes=64, message="any name is free")
    (record,) = caplog.records
    assert record.getMessage() == "range left quarantine job=j1 bytes=64 message=any name is free"
    assert record.name == "hawk.test"
    assert (list(logging.getLogger().handlers), list(logging.getLogger("hawk").handlers)) == handlers
    assert structlog.is_configured() == configured


def test_a_percent_sign_is_only_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hawk.test"):
        get("hawk.test").info("100%s done", name="%d")
    assert caplog.records[0].getMessage() == "100%s done name=%d"


@pytest.mark.usefixtures("own_process")
def test_an_agent_writes_json_lines_away_from_a_terminal() -> None:
    out = io.StringIO()
    configure("info", "auto", out)
    log = get("hawk.test", node="d0")
    log.debug("unheard")
    log.info("chosen", transport="shm", level="kept under another name")
    logging.getLogger("hawk.other").warning("plain %s", "record")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["chosen", "plain record"]
    assert lines[0]["transport"] == "shm"
    assert lines[0]["node"] == "d0"
    assert lines[0]["level"] == "info"
    assert lines[0]["level_"] == "kept under another name"
    assert lines[1]["logger"] == "hawk.other"
    assert lines[0]["time"].endswith("+00:00")


@pytest.mark.usefixtures("own_process")
def test_a_fault_comes_with_its_traceback_in_one_line() -> None:
    out = io.StringIO()
    configure("debug", "json", out)
    try:
        raise ValueError("broken")
    except ValueError as error:
        get("hawk.test").error("failed", exc_info=error)
    (line,) = out.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]


@pytest.mark.usefixtures("own_process")
def test_people_get_text_and_configuring_again_replaces() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure("info", "console", first)
    configure("warning", "console", second)
    get("hawk.test").info("unheard")
    get("hawk.test").warning("heard", job="j1")
    assert first.getvalue() == ""
    assert "heard" in second.getvalue()
    assert "j1" in second.getvalue()
    assert not second.getvalue().startswith("{")


def test_lines_are_made_by_the_programs_own_factory() -> None:
    """An engine's formatter may ask for what its factory adds."""
    old, seen = logging.getLogRecordFactory(), []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(getattr(record, "engine", ""))

    def factory(*args: object, **more: object) -> logging.LogRecord:
        record = old(*args, **more)
        record.engine = "core 3"
        return record

    logger, handler = logging.getLogger("hawk.made.up"), Keep()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logging.setLogRecordFactory(factory)
    try:
        get("hawk.made.up").info("what every job says", job=1)
        get("hawk.made.up").warning("what few say", job=2)
    finally:
        logging.setLogRecordFactory(old)
        logger.removeHandler(handler)
    assert seen == ["core 3"] * 2
