"""The unit for systemd says what docs/operations.md promises, and systemd understands it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

UNIT = Path(__file__).parents[3] / "docs" / "hawk-agent@.service"
ANALYZE = shutil.which("systemd-analyze")

WANTED = {
    "ExecReload": "/bin/kill -HUP $MAINPID",
    "Restart": "on-failure",
    "RuntimeDirectory": "hawk",
    "RuntimeDirectoryMode": "0700",
    "LimitNOFILE": "8192",
    "LimitCORE": "0",
    "LimitMEMLOCK": "infinity",
}
HIDES = {
    "PrivateTmp",
    "PrivateDevices",
    "PrivateNetwork",
    "PrivateIPC",
    "ProcSubset",
    "MemoryDenyWriteExecute",
}
"""What would hide clients' sockets and descriptors, devices or other agents; `no` is what they are by default."""


def settings() -> dict[str, dict[str, str]]:
    """Section to name to value; every line is a setting, a section, a comment or empty."""
    found: dict[str, dict[str, str]] = {}
    section = ""
    for line in UNIT.read_text().splitlines():
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
            found[section] = {}
        elif line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert equals
            assert name.isidentifier()
            assert name not in found[section]
            found[section][name] = value
    return found


def test_it_says_what_is_promised() -> None:
    found = settings()
    assert set(found) == {"Unit", "Service", "Install"}
    service = found["Service"]
    assert {name: service.get(name) for name in WANTED} == WANTED
    assert service["ExecStart"].endswith("hawk-agent --config /etc/hawk/%i.toml")
    # What docs/operations.md installs there is what env finds.
    assert "PATH=/opt/hawk/bin:" in service["Environment"]
    assert all(service.get(name, "no") == "no" for name in HIDES)
    assert {"AF_UNIX", "AF_INET", "AF_INET6"} <= set(service["RestrictAddressFamilies"].split())


def test_systemd_understands_it(tmp_path: Path) -> None:
    if ANALYZE is None:
        return  # what can be told without it stands above
    unit = tmp_path / "hawk-agent@p0.service"
    shutil.copy(UNIT, unit)
    done = subprocess.run(
        [ANALYZE, "verify", "--man=no", unit],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    ours = [line for line in done.stderr.splitlines() if "hawk-agent@" in line]
    assert not ours, done.stderr
