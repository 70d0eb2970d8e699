"""The configuration: what is read, where it came from, and every problem at once."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hawk.config import Config, Sources, load_config, missing
from hawk.config_read import option
from hawk.config_text import rows
from hawk.errors import ConfigError, InvalidArgument
from hawk.memory import registry as memories
from hawk.units import Duration, Size

WHOLE = """\
[agent]
name = "d0"
role = "decode"
control = "tcp://127.0.0.1:0"
local = "ipc:///run/hawk/d0.sock"
observe = "127.0.0.1:9400"
drain = "45s"

[security]
key_file = "keys/d0.key"
peers_file = "/etc/hawk/peers.toml"

[transport]
prefer = ["tcp"]
on_failure = "next"
tcp = { streams = 3, socket_buffer = "8MiB", stall_timeout = "1m" }

[memory.npu0]
kind = "emulated-npu"
device = "0"
capacity = "1GiB"
channels = 12

[memory."pool-1"]
kind = "host"
capacity = 4096

[arena]
size = "512MiB"

[jobs]
lease = "150ms"
chunk = "1MB"

[peers]
p0 = "tcp://127.0.0.1:7000"
"""


@pytest.fixture
def node(tmp_path: Path) -> Path:
    path = tmp_path / "node.toml"
    path.write_text(WHOLE)
    return path


def _problems(path: Path | None, text: str | None = None, env: dict[str, str] | None = None) -> list[str]:
    if path is not None and text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, env or {}, complete=False)
    assert all("\n" not in problem for problem in caught.value.problems)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return list(caught.value.problems)


# -- what is read -----------------------------------------------------------------------------------------


def test_a_whole_file(node: Path) -> None:
    config, sources = load_config(node, {})
    assert (config.agent.name, config.agent.role, config.agent.drain) == ("d0", "decode", 45.0)
    assert config.security.key_file == node.parent / "keys" / "d0.key"
    assert config.security.peers_file == Path("/etc/hawk/peers.toml")
    assert config.transport.prefer == ("tcp",)
    tcp = config.transport.options["tcp"]
    assert (tcp.streams, tcp.socket_buffer, tcp.stall_timeout) == (3, 8 << 20, 60.0)
    npu = config.memory["npu0"]
    assert (npu.kind, npu.device) == ("emulated-npu", "0")
    assert (npu.options.capacity, npu.options.channels, npu.options.alignment) == (1 << 30, 12, 64)
    assert config.memory["pool-1"].options.capacity == 4096
    assert (config.arena.size, config.jobs.lease, config.jobs.chunk) == (512 << 20, 0.15, 10**6)
    assert config.peers == {"p0": "tcp://127.0.0.1:7000"}
    assert sources.of("agent.name") == f"{node}:2"
    assert sources.of("transport.tcp.streams") == f"{node}:16"
    assert sources.of("memory.npu0.capacity") == f"{node}:21"
    assert sources.of("jobs.max_jobs") == "default"
    assert sources.of("peers.p0") == f"{node}:36"


def test_nothing_at_all_is_the_defaults() -> None:
    config, sources = load_config(None, {}, complete=False)
    assert config.agent.role == "both"
    assert config.transport.prefer == ("shm", "tcp")
    assert set(config.transport.options) >= {"shm", "tcp"}
    assert sources.of("agent.role") == "default"


def test_the_environment_overrides_at_every_depth(node: Path) -> None:
    env = {
        "HAWK_AGENT__ROLE": "prefill",
        "HAWK_AGENT__INSECURE": "true",
        "HAWK_TRANSPORT__PREFER": "shm, tcp",
        "HAWK_TRANSPORT__TCP__STREAMS": "5",
        "HAWK_TRANSPORT__TCP__CHUNK": "1MiB",
        "HAWK_MEMORY__NPU0__CAPACITY": "2GiB",
        "HAWK_MEMORY__EXTRA__KIND": "host",
        "HAWK_MEMORY__EXTRA__CAPACITY": "1MiB",
        "HAWK_PEERS__P1": "tcp://127.0.0.2:1",
        "HAWK_JOBS__MAX_JOBS": "7",
        "HAWK_CORE": "numpy",
        "HAWK_TORCH": "torch==2",
        "OTHER__THING": "x",
    }
    config, sources = load_config(node, env)
    assert (config.agent.role, config.agent.insecure) == ("prefill", True)
    assert config.transport.prefer == ("shm", "tcp")
    tcp = config.transport.options["tcp"]
    assert (tcp.streams, tcp.chunk, tcp.socket_buffer) == (5, 1 << 20, 8 << 20)
    assert config.memory["npu0"].options.capacity == 2 << 30
    assert config.memory["npu0"].options.channels == 12
    assert config.memory["extra"].kind == "host"
    assert config.peers == {"p0": "tcp://127.0.0.1:7000", "p1": "tcp://127.0.0.2:1"}
    assert config.jobs.max_jobs == 7
    assert sources.of("agent.role") == "HAWK_AGENT__ROLE"
    assert sources.of("memory.npu0.capacity") == "HAWK_MEMORY__NPU0__CAPACITY"
    assert sources.of("memory.npu0.channels") == f"{node}:22"


def test_the_environment_finds_names_whatever_their_case(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('[memory.NPU0]\nkind = "host"\ncapacity = 4096\n')
    config, _ = load_config(path, {"HAWK_MEMORY__NPU0__CAPACITY": "8192"}, complete=False)
    assert {name: m.options.capacity for name, m in config.memory.items()} == {"NPU0": 8192}


def test_the_local_socket_lies_in_a_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = load_config(
        None, {"XDG_RUNTIME_DIR": "/run/user/7", "HAWK_AGENT__NAME": "p3"}, complete=False
    )
    assert config.agent.local == "ipc:///run/user/7/hawk/p3.sock"
    monkeypatch.setattr("os.getuid", lambda: 7)
    config, _ = load_config(None, {}, complete=False)
    assert config.agent.local.endswith("/hawk-7/agent.sock")


def test_paths_in_the_environment_count_from_the_working_folder(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = node.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config, _ = load_config(node, {"HAWK_SECURITY__PEERS_FILE": "peers.toml"})
    assert config.security.peers_file == elsewhere / "peers.toml"
    assert config.security.key_file == node.parent / "keys" / "d0.key"


def test_the_process_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAWK_AGENT__NAME", "from-env")
    assert load_config(None, complete=False)[0].agent.name == "from-env"


# -- problems ---------------------------------------------------------------------------------------------


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    text = """\
[agent]
rolle = "decode"
drain = "30"
insecure = "yes"
observe = "9400"
[transport]
prefer = ["shm", "tpc"]
tcp = { streems = 2, streams = true }
[memory.npu0]
kind = "emulated-npuu"
[memory.npu1]
kind = "host"
[jobs]
max_jobs = 0
lease = -1
[peers]
p0 = "127.0.0.1:7000"
p1 = "tcp://host:0"
[agnet]
name = "x"
"""
    env = {"HAWK_JOBS__CHUNKS": "1MiB", "HAWK_ARENA__SIZE": "big", "HAWK_AGENT____NAME": "x"}
    found = _problems(path, text, env)
    expected = [
        (":2", "agent.rolle", "did you mean agent.role?"),
        (":3", 'agent.drain = "30"', 'expected a duration with a unit: "150ms"'),
        (":4", 'agent.insecure = "yes"', "expected true or false"),
        (":5", 'agent.observe = "9400"', 'expected "HOST:PORT"'),
        (":7", "transport.prefer", 'no transport is called "tpc"; did you mean tcp?'),
        (":8", "transport.tcp.streems", "did you mean transport.tcp.streams?"),
        (":8", "transport.tcp.streams = true", "expected a whole number"),
        (":10", "memory.npu0.kind", "did you mean emulated-npu?"),
        (":12", "memory.npu1.capacity", "has to be given"),
        (":14", "jobs.max_jobs = 0", "expected at least 1"),
        (":15", "jobs.lease = -1", "expected a duration"),
        (":17", "peers.p0", 'expected "tcp://HOST:PORT"'),
        (":18", "peers.p1", 'expected "tcp://HOST:PORT"'),
        (":20", "agnet.name", "did you mean agent?"),
        ("HAWK_JOBS__CHUNKS", "jobs.chunks", "did you mean jobs.chunk?"),
        ("HAWK_ARENA__SIZE", 'arena.size = "big"', 'expected a size: "64MiB"'),
        ("HAWK_AGENT____NAME", "empty part", "HAWK_TABLE__KEY"),
    ]
    for parts in expected:
        assert any(all(part in problem for part in parts) for problem in found), (parts, found)
    assert len(found) == len(expected), "\n".join(found)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("agent = 3\n", "expected a table: [agent]"),
        ("[agent.name]\nx = 1\n", "is a table; expected a value"),
        ("[agent\n", "is not TOML"),
        ("[jobs]\nchunk = '512MiB'\nin_flight_per_peer = '1GiB'\n", "must fit into the arena"),
        ("[jobs]\nin_flight_per_peer = '1MiB'\n", "must fit into jobs.in_flight_per_peer"),
        ("[jobs]\nin_flight_per_transport = '1MiB'\n", "must fit into jobs.in_flight_per_transport"),
        ("[transport]\nprefer = []\n", "expected at least one transport"),
        ("[transport]\nprefer = ['tcp', 'tcp']\n", "names a transport twice"),
        ("[transport]\nprefer = 'tcp'\n", "expected a list of texts"),
        ("[transport]\noptions = 3\n", "transport.options = 3: no such key"),
        ("[transport]\ntcp = 3\n", "expected a table: [transport.tcp]"),
        ("[transport.tcp]\nport = 70000\n", "transport.tcp.port = 70000"),
        ("[memory.x]\ncapacity = 3\n", "memory.x.kind: has to be given"),
        ("[memory]\nx = 3\n", "expected a table: [memory.x]"),
        ("[memory.'a b']\nkind = 'host'\ncapacity = 4096\n", "is no name"),
        ("[peers]\np0 = 7\n", "expected text in quotes"),
        ("[peers.p0]\naddress = 'tcp://h:1'\n", "is a table; expected an address"),
        ("[agent]\nname = ''\n", "expected 1 to 64 letters"),
        ("[agent]\ncontrol = 'udp://x:1'\n", 'expected "tcp://HOST:PORT"'),
        ("[agent]\nlocal = 'tcp://127.0.0.1:1'\n", 'expected "ipc://PATH"'),
        ("[agent]\nrole = 'prefil'\n", 'one of "prefill", "decode", "both"'),
        ("[nothing_like_it]\n", "no such table"),
    ],
)
def test_one_problem(tmp_path: Path, text: str, told: str) -> None:
    (problem,) = _problems(tmp_path / "node.toml", text)
    assert told in problem


def test_a_clash_with_a_bad_value_is_not_told_twice(tmp_path: Path) -> None:
    (problem,) = _problems(
        tmp_path / "node.toml",
        "[arena]\nsize = 'small'\n[jobs]\nchunk = '300MiB'\nin_flight_per_peer = '400MiB'\n",
    )
    assert "arena.size" in problem


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path / "nothing.toml")
    assert "nothing.toml: cannot be read: No such file" in problem
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    (problem,) = _problems(tmp_path / "binary.toml")
    assert "is not UTF-8" in problem
    (problem,) = _problems(tmp_path)
    assert "cannot be read" in problem


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"HAWK_AGENT__NAME__X": "1"}, "name is a value in"),
        ({"HAWK_AGENT": "x", "HAWK__AGENT": "x"}, "HAWK__AGENT: has an empty part"),
        ({"HAWK_TRANSPORT__TCP": "x"}, "is a table, not a value"),
        ({"HAWK_NOTHING__LIKE": "x"}, "nothing.like"),
    ],
)
def test_names_in_the_environment_are_checked(node: Path, env: dict[str, str], told: str) -> None:
    (problem,) = _problems(node, env=env)
    assert told in problem


# -- what an agent needs beyond that ------------------------------------------------------------------------


def test_tcp_without_keys_has_to_be_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"security\.key_file and security\.peers_file"):
        load_config(None, {})
    for env in (
        {"HAWK_AGENT__INSECURE": "1"},
        {"HAWK_AGENT__CONTROL": "ipc:///run/hawk/control"},
        {"HAWK_SECURITY__KEY_FILE": "k", "HAWK_SECURITY__PEERS_FILE": "p"},
    ):
        assert missing(load_config(None, env)[0]) == []
    with pytest.raises(ConfigError, match=r"tcp needs security\.peers_file "):
        load_config(None, {"HAWK_SECURITY__KEY_FILE": "k"})


# -- how it is shown --------------------------------------------------------------------------------------


def test_every_value_is_shown_as_the_file_would_say_it(node: Path) -> None:
    config, sources = load_config(node, {"HAWK_AGENT__ROLE": "prefill"})
    shown = {row.path: (row.value, row.source) for row in rows(config, sources)}
    assert shown["agent.role"] == ('"prefill"', "HAWK_AGENT__ROLE")
    assert shown["agent.drain"] == ('"45s"', f"{node}:7")
    assert shown["arena.size"] == ('"512MiB"', f"{node}:29")
    assert shown["transport.prefer"] == ('["tcp"]', f"{node}:14")
    assert shown["transport.tcp.streams"] == ("3", f"{node}:16")
    assert shown["memory.npu0.kind"] == ('"emulated-npu"', f"{node}:19")
    assert shown["memory.npu0.capacity"] == ('"1GiB"', f"{node}:21")
    assert shown["peers.p0"] == ('"tcp://127.0.0.1:7000"', f"{node}:36")
    assert shown["retile.core"] == ('"auto"', "default")


def test_what_is_shown_reads_back_the_same(node: Path, tmp_path: Path) -> None:
    config, sources = load_config(node, {})
    again = tmp_path / "again.toml"
    again.write_text("".join(f"{row.path} = {row.value}\n" for row in rows(config, sources)))
    assert load_config(again, {})[0] == config


@dataclasses.dataclass(frozen=True)
class GuardedConfig:
    """A plug-in's options, with a secret among them."""

    capacity: Size = option(0, "Bytes.", minimum=1)
    token: str = option(
        "", "Opens the device.", secret=True, check=lambda v: "no spaces" if " " in v else None
    )
    patience: Duration = 2.0
    limit: int = 3

    def __post_init__(self) -> None:
        if self.limit > 9:
            raise InvalidArgument("too many", field="guarded.limit", got=self.limit, expected="at most 9")
        if self.token == "wrong":
            raise ValueError("the token is not one of ours")


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    real = memories.config_class

    def config_class(kind: str, **more: Any) -> type[Any]:
        return GuardedConfig if kind == "guarded" else real(kind, **more)

    monkeypatch.setattr(memories, "config_class", config_class)


def _guarded(**values: str) -> tuple[Config, Sources]:
    env = {f"HAWK_MEMORY__M__{key.upper()}": value for key, value in values.items()}
    return load_config(None, {"HAWK_MEMORY__M__KIND": "guarded", **env}, complete=False)


@pytest.mark.usefixtures("guarded")
def test_secrets_are_never_printed() -> None:
    shown = {row.path: row.value for row in rows(*_guarded(capacity="1KiB", token="s3cret"))}
    assert shown["memory.m.token"] == '"(not shown)"'
    assert shown["memory.m.patience"] == '"2s"'
    with pytest.raises(ConfigError) as caught:
        _guarded(capacity="1KiB", token="s3c ret")
    assert "s3c" not in str(caught.value)
    assert "memory.m.token = (not shown): expected no spaces" in str(caught.value)


@pytest.mark.usefixtures("guarded")
def test_what_a_dataclass_says_itself_is_a_problem_like_any_other() -> None:
    with pytest.raises(
        ConfigError, match=r"HAWK_MEMORY__M__LIMIT: memory\.m\.limit = .10.: too many; expected at most 9"
    ):
        _guarded(capacity="1", limit="10")
    with pytest.raises(ConfigError, match=r"memory\.m: the token is not one of ours"):
        _guarded(capacity="1", token="wrong")
    with pytest.raises(ConfigError) as caught:  # one beside the other, and nothing of a stand-in
        _guarded(capacity="none", limit="10")
    assert ["capacity" in problem for problem in caught.value.problems] == [True, False]
    with pytest.raises(ConfigError) as caught:
        _guarded(capacity="none", token="wrong")
    assert len(caught.value.problems) == 1
