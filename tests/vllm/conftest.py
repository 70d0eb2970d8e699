"""Engines as processes, kept as long as the tests of a file want them, few at a time."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = Path(os.environ.get("HAWK_VLLM_PYTHON") or ROOT / ".venv-vllm/bin/python")
KEPT = 3
"""Engines that live at a time; each takes 1.6 GB."""


def plugged_in(folder: Path) -> Path:
    """A folder in which Python finds the NPU stand-in as an installed plug-in of vLLM's."""
    place = folder / "plugins"
    about = place / "npu_stand_in-1.0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: npu-stand-in\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nnpu_stand_in = tests.vllm.npu:plug_in\n"
    )
    return place


class EngineProcess:
    """One engine; calling it runs a command there and returns the answer."""

    def __init__(self, folder: Path, name: str, processor: int, spec: dict[str, Any]) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        file = folder / f"{name}.json"
        file.write_text(json.dumps(spec))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(plugged_in(folder)), str(ROOT)] if spec.get("npu") else [str(ROOT)]
            ),
            "TMPDIR": str(folder),
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str((processor + n) % 2) for n in range(spec.get("tp", 1))),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [PYTHON, HERE / "engine.py", file],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,
            )

    def ready(self) -> EngineProcess:
        """Returns when it has started."""
        self.answer()
        return self

    def send(self, command: str, **arguments: Any) -> None:
        """A command whose answer is not waited for."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The next answer; an error there is one here."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(f"the engine {self.name} has ended:\n{self.log.read_text(errors='replace')[-4000:]}")
        answer = json.loads(line)
        if "error" in answer:
            pytest.fail(f"{self.name}: {answer['error']}\n{self.log.read_text(errors='replace')[-2000:]}")
        return answer["ok"]

    def __call__(self, command: str, **arguments: Any) -> Any:
        self.send(command, **arguments)
        return self.answer()

    def kill(self) -> None:
        """At once, as a machine that fails."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends it in good order, or else."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.kill()
        self.process.stdout.close()


def transfer(role: str, engine: str, **extra: Any) -> dict[str, Any]:
    """A `--kv-transfer-config`."""
    policy = {"kv_load_failure_policy": extra.pop("policy")} if "policy" in extra else {}
    return {
        "kv_connector": "HawkConnector",
        "kv_connector_module_path": "hawk.integrations.vllm",
        "kv_role": role,
        "engine_id": engine,
        "kv_connector_extra_config": extra,
        **policy,
    }


class Fleet:
    """The engines of a test file, by name; those that were not asked for longest end first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        self._live: OrderedDict[str, EngineProcess] = OrderedDict()
        self._count = 0
        done = subprocess.run(
            [PYTHON, HERE / "model.py", self.model], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def engines(self, **specs: dict[str, Any]) -> list[EngineProcess]:
        """These engines, those that do not run yet started side by side."""
        for name in list(self._live):
            if len(self._live) + sum(n not in self._live for n in specs) > KEPT and name not in specs:
                self._live.pop(name).close()
        for name, spec in specs.items():
            if name not in self._live:
                whole = {"model": str(self.model), **spec}
                self._live[name] = EngineProcess(self.folder, f"{name}{self._count}", self._count % 2, whole)
                self._live[name].fresh = True  # type: ignore[attr-defined]
                self._count += 1
            self._live.move_to_end(name)
        for name in specs:
            if self._live[name].__dict__.pop("fresh", False):
                self._live[name].ready()
        return [self._live[name] for name in specs]

    def forget(self, name: str) -> None:
        """An engine that a test has killed, or spoiled."""
        self._live.pop(name).close()

    def close(self) -> None:
        """Ends them all."""
        while self._live:
            self._live.popitem()[1].close()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is not there: run scripts/test vllm, which makes it")
    with tempfile.TemporaryDirectory(prefix="hk-", dir="/tmp") as name:
        made = Fleet(Path(name))
        try:
            yield made
        finally:
            made.close()
