"""Where the connector's threads run in an engine that binds its own."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import hawk
from hawk.errors import ConfigError
from hawk.integrations import processors
from hawk.integrations.engine import Engine
from hawk.integrations.settings import read_settings

ALL = os.sched_getaffinity(0)
ONE = min(ALL)

BOUND = """
import multiprocessing, os, sys
from hawk.integrations import processors

def worker(found):
    os.environ["OMP_PROC_BIND"] = "true"
    os.sched_setaffinity(0, {int(sys.argv[1])})
    processors.take()
    found.put(sorted(os.sched_getaffinity(0)))

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    found = spawn.Queue()
    process = spawn.Process(target=worker, args=(found,))
    process.start()
    print(found.get())
    process.join()
"""


def inside(affinity: set[int], call: object) -> object:
    """What `call` returns in a thread with that affinity."""
    found: list[object] = []

    def run() -> None:
        os.sched_setaffinity(0, affinity)
        try:
            found.append(call())  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def taken(cpus: str = "") -> set[int]:
    processors.take(cpus)
    return os.sched_getaffinity(0)


def test_a_thread_under_openmp_takes_what_the_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PLACES", "{0}")
    assert inside({ONE}, taken) == ALL


def test_other_bindings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in processors._BINDS:
        monkeypatch.delenv(name, raising=False)
    assert inside({ONE}, taken) == {ONE}


def test_named_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PLACES", "{0}")
    assert inside(set(ALL), lambda: taken(str(ONE))) == {ONE}
    problem = inside(set(ALL), lambda: taken("4095"))
    assert isinstance(problem, ConfigError)
    assert "kv_connector_extra_config.cpus" in str(problem)


def test_a_list_of_processors() -> None:
    assert processors.parse("0-2, 8") == {0, 1, 2, 8}
    assert processors._text({0, 1, 2, 8}) == "0-2,8"
    for wrong in ("", "a", "3-1", "1,", "-1", "123456"):
        with pytest.raises(ConfigError, match="no list of processors"):
            processors.parse(wrong)
    with pytest.raises(ConfigError, match="no list of processors"):
        read_settings({"cpus": "all"})


def test_a_worker_takes_what_its_engine_has(tmp_path: Path) -> None:
    """The worker's own threads are all bound; the process that started it is not."""
    script = tmp_path / "bound.py"
    script.write_text(BOUND)
    done = subprocess.run(
        [sys.executable, script, str(ONE)],
        env={**os.environ, "PYTHONPATH": str(Path(hawk.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == str(sorted(ALL)), done.stderr


def test_all_threads_of_an_engine_leave_the_bound_processor(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    before = set(os.listdir("/proc/self/task"))
    tables = {
        "agent": {"local": f"ipc://{short_path}/any.sock"},
        "arena": {"size": "1MiB"},
        "staging": {"size": "1MiB"},
        "jobs": {"chunk": "64KiB"},
    }
    engine = Engine(read_settings({"hawk": tables}), name="p", role="prefill")

    def start() -> set[str]:
        engine.start()
        # Its own thread, which stays bound, can be listed for a while after it has been joined.
        return set(os.listdir("/proc/self/task")) - before - {str(threading.get_native_id())}

    new = inside({ONE}, start)
    try:
        assert isinstance(new, set)
        assert len(new) > 1
        assert all(os.sched_getaffinity(int(thread)) == ALL for thread in new)
    finally:
        engine.close()
