"""Options of memories and transports: each table's own checks take part in telling every problem at once."""

from pathlib import Path

import pytest

from hawk.config import load_config
from hawk.errors import ConfigError


def problems(folder: Path, text: str, env: dict[str, str] | None = None) -> list[str]:
    path = folder / "node.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, env or {}, complete=False)
    return list(caught.value.problems)


OPTIONS = """\
[memory.npu0]
kind = "emulated-npu"
capacity = "7B"
channels = 0
alignment = 3
[memory.host]
kind = "host"
capacity = "63B"
huge_pages = "yes"
[transport.tcp]
port = 70000
streams = 0
stall_timeout = "0s"
chunk = "big"
[transport.shm]
threads = 65
[retile]
threads = 100000
[jobs]
max_jobs = 0
"""


def test_every_option_of_memories_and_transports_is_told_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, OPTIONS)
    expected = [
        (":3: memory.npu0.capacity", "at least 512 bytes"),
        (":4: memory.npu0.channels = 0", "expected 1 to 4096"),
        (":5: memory.npu0.alignment = 3", "a power of two"),
        (":8: memory.host.capacity", "at least 64 bytes"),
        (":9: memory.host.huge_pages", "true or false"),
        (":11: transport.tcp.port = 70000", "0..65535"),
        (":12: transport.tcp.streams = 0", "1..64"),
        (":13: transport.tcp.stall_timeout", "seconds above 0"),
        (":14: transport.tcp.chunk", "whole number"),
        (":16: transport.shm.threads = 65", "1..64"),
        (":18: retile.threads = 100000", "at most 256"),
        (":20: jobs.max_jobs = 0", "at least 1"),
    ]
    for parts in expected:
        assert any(all(part in problem for part in parts) for problem in found), (parts, found)
    assert len(found) == len(expected), "\n".join(found)


def test_values_that_only_together_are_wrong_are_one_problem(tmp_path: Path) -> None:
    text = "[memory.n]\nkind = 'emulated-npu'\ncapacity = '1KiB'\nchannels = 64\n"
    (problem,) = problems(tmp_path, text)
    assert ":3: memory.n.capacity" in problem
    (problem,) = problems(tmp_path, "[transport.tcp]\nhost = '0.0.0.0'\n")
    assert "transport.tcp.advertise" in problem


def test_a_file_that_is_not_toml_is_that_one_problem(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "[agent\n", {"HAWK_AGENT__ROLE": "prefil"})
    assert "is not TOML" in problem


def test_paths_of_a_transport_count_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[transport.tcp]\ntls_cert = "a.pem"\ntls_key = "/keys/a.key"\n')
    config, _ = load_config(file, {"HAWK_TRANSPORT__TCP__TLS_CA": "ca.pem"}, complete=False)
    tcp = config.transport.options["tcp"]
    assert tcp.tls_cert == tmp_path / "a.pem"
    assert tcp.tls_key == Path("/keys/a.key")
    assert tcp.tls_ca == Path.cwd() / "ca.pem"


def test_a_part_of_what_tls_needs_is_told_at_the_table(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[transport.tcp]\ntls_cert = "a.pem"\n')
    with pytest.raises(ConfigError, match=r"transport\.tcp\.tls_key: TLS needs all three files"):
        load_config(file, {}, complete=False)


@pytest.mark.parametrize("value", ["0", "-0.5", "1.5", '"much"', "nan"])
def test_a_sample_is_a_part(value: str, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(f"[integrity]\nsample = {value}\n")
    with pytest.raises(ConfigError, match=r"node\.toml:2: integrity\.sample"):
        load_config(file, {}, complete=False)
