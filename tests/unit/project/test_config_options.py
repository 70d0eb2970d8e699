"""Options of memories and transports: each table's own checks take part in telling every problem at once."""

import dataclasses
import re
import typing
from pathlib import Path

import pytest

from hawk.config import load_config
from hawk.config_read import unit_of
from hawk.config_text import rows
from hawk.errors import ConfigError
from hawk.memory import registry as memories
from hawk.transports import registry as transports


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
        (":14: transport.tcp.chunk", "expected a size: "),
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


def test_what_a_transport_takes_has_units_of_its_own_kind(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        '[transport.cuda]\npace = "25GB"\nchunk = "32MiB"\ngrace = "150ms"\n[transport.verbs]\nspin = "20us"\n'
    )
    config, sources = load_config(file, {"HAWK_TRANSPORT__CUDA__PIECE": "1GiB"}, complete=False)
    cuda = config.transport.options["cuda"]
    assert (cuda.pace, cuda.chunk, cuda.grace, cuda.piece) == (25e9, 32 << 20, 0.15, 1 << 30)
    shown = {row.path: row.value for row in rows(config, sources)}
    assert shown["transport.cuda.pace"] == '"25GB/s"'
    assert shown["transport.cuda.chunk"] == '"32MiB"'
    assert shown["transport.verbs.spin"] == '"20us"'


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("cuda.pace", "5s", "expected a rate: .*, not a duration$"),
        ("cuda.chunk", "5s", "expected a size: .*, not a duration$"),
        ("cuda.chunk", "1GB/s", "expected a size: .*, not a rate$"),
        ("cuda.grace", "7KB", "expected a duration .*, not a size$"),
        ("cuda.gpu", "1KiB", "expected a whole number, not a size$"),
        ("tcp.port", "7KB", "expected a whole number, not a size$"),
        ("tcp.streams", "2s", "expected a whole number, not a duration$"),
        ("cuda.chunk", "abc", 'expected a size: "64MiB", "1GB", or a whole number of bytes$'),
    ],
)
def test_a_unit_of_another_kind_is_refused_by_name(key: str, value: str, said: str, tmp_path: Path) -> None:
    table, _, name = key.partition(".")
    (problem,) = problems(tmp_path, f'[transport.{table}]\n{name} = "{value}"\n')
    assert re.search(said, problem), problem
    (problem,) = problems(tmp_path, "", {f"HAWK_TRANSPORT__{table}__{name}".upper(): value})
    assert re.search(said, problem), problem


def test_every_number_of_a_built_in_is_a_count_or_says_its_unit() -> None:
    counts = re.compile(r"gpu|streams|channels|threads|max_connections|max_strangers|port|gid_index|retries")
    for cls in [transports.transport_class(n).Config for n in ("shm", "tcp", "cuda")] + [
        memories.config_class(kind) for kind in ("host", "emulated-npu", "npu", "cuda")
    ]:
        hints = typing.get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(cls):
            if not unit_of(hints[field.name], field.metadata) and hints[field.name] in (int, float):
                assert counts.fullmatch(field.name), f"{cls.__name__}.{field.name}"
