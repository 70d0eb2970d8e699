"""The command line: every failure one line and a status, nothing heavy imported for help."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hawk import cli
from hawk._version import __version__

ROOT = Path(__file__).resolve().parents[3]


def _hawk(*arguments: str, command: str = "main", **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HAWK_")}
    code = f"import hawk.cli; hawk.cli.{command}()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=clean | env,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def test_version() -> None:
    done = _hawk("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"hawk, version {__version__}")
    done = _hawk("--version", command="agent_main")
    assert (done.returncode, done.stdout.strip()) == (0, f"hawk-agent, version {__version__}")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, hawk.cli\n"
        "try: hawk.cli.main(['--help'])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'numpy', 'zmq', 'uvloop', 'rich', 'structlog'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["config", "show", "--nothing"],
        ["bench", "transfer", "--size", "x"],
        ["bench", "fragmentation", "--channels", "1"],
    ],
)
def test_bad_usage_is_2(arguments: list[str]) -> None:
    done = _hawk(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_config_show_says_where_each_value_came_from(tmp_path: Path) -> None:
    node = tmp_path / "node.toml"
    node.write_text('[agent]\nname = "d0"\ninsecure = true\n')
    done = _hawk("config", "show", "--config", str(node), HAWK_AGENT__ROLE="decode")
    assert done.returncode == 0, done.stderr
    lines = {line.partition(" = ")[0]: line for line in done.stdout.splitlines()}
    assert lines["agent.name"].endswith(f"# {node}:2")
    assert lines["agent.role"].split()[2:] == ['"decode"', "#", "HAWK_AGENT__ROLE"]
    assert lines["jobs.lease"].split()[2:] == ['"30s"', "#", "default"]


def test_config_show_tells_what_an_agent_would_refuse(tmp_path: Path) -> None:
    node = tmp_path / "node.toml"
    node.write_text("[agent]\n")
    done = _hawk("config", "show", "--config", str(node))
    assert done.returncode == 2
    assert "security.key_file" in done.stderr
    assert "agent.name" in done.stdout
    assert _hawk("config", "show").returncode == 0


def test_a_bad_configuration_is_all_its_lines_and_2(tmp_path: Path) -> None:
    node = tmp_path / "node.toml"
    node.write_text("[agent]\ndrain = 'x'\nrolle = 1\n")
    for command, arguments in (("main", ["config", "show"]), ("agent_main", [])):
        done = _hawk(*arguments, "--config", str(node), command=command)
        assert done.returncode == 2
        assert done.stdout == ""
        first, *rest = done.stderr.splitlines()
        assert "2 problems" in first
        # In the order of the lines, whatever was found first.
        assert [line.split(": ")[0] for line in rest] == [f"{node}:2", f"{node}:3"]


def test_the_reference_page_is_the_committed_one() -> None:
    done = _hawk("config", "doc")
    assert done.stdout == (ROOT / "docs" / "config.md").read_text(), "run: hawk config doc > docs/config.md"


def test_every_option_is_documented() -> None:
    rows = [line for line in (ROOT / "docs" / "config.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    assert [row for row in rows if row.split("|")[-2].strip() == ""] == []


def test_keys_are_made_private_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    done = _hawk("keys", "new", str(folder), "--name", "d0")
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE((folder / "d0.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    before = (folder / "d0.key").read_bytes()
    again = _hawk("keys", "new", str(folder), "--name", "d0")
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert (folder / "d0.key").read_bytes() == before


def test_public_keys_become_a_peers_file(tmp_path: Path) -> None:
    for name in ("p0", "d0"):
        assert _hawk("keys", "new", str(tmp_path), "--name", name).returncode == 0
    out, pubs = str(tmp_path / "peers.toml"), [str(tmp_path / f"{name}.pub") for name in ("p0", "d0")]
    assert _hawk("keys", "peers", out, pubs[0]).stdout == f"{out}: added p0; 1 peer\n"
    assert _hawk("keys", "peers", out, *pubs).stdout == f"{out}: added d0; 2 peers\n"
    assert _hawk("keys", "peers", out, *pubs).stdout == f"{out}: nothing to add; 2 peers\n"
    assert _hawk("keys", "peers", out).returncode == 2


def test_a_configuration_that_is_not_there_is_one_problem(tmp_path: Path) -> None:
    for command, arguments in (("main", ["config", "show"]), ("agent_main", [])):
        done = _hawk(*arguments, "--config", str(tmp_path / "no.toml"), command=command, HAWK_AGENT__ROLE="x")
        assert done.returncode == 2
        first, *rest = done.stderr.splitlines()
        assert "1 problem " in first
        assert len(rest) == 1
        assert "cannot be read" in rest[0]


def test_layouts_are_listed_and_shown() -> None:
    done = _hawk("layout", "list")
    assert done.returncode == 0, done.stderr
    assert "vllm/nhd" in [line.split()[0] for line in done.stdout.splitlines()]
    assert "order" in _hawk("layout", "show", "vllm/nhd").stdout


def test_a_layout_that_cannot_be_compiled_is_one_line_and_1(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        'name = "my/npu"\ncodec = "bf16"\nbuffers = "layer kv"\n[[piece]]\norder = "block head slot/32 | dim"\n'
    )
    done = _hawk("layout", "show", str(path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "slot%32" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_error_is_one_line_and_1() -> None:
    done = _hawk("layout", "show", "vllm/nhdd")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Did you mean" in done.stderr
    shown = _hawk("layout", "show", "vllm/nhdd", HAWK_DEBUG="1")
    assert "Traceback" in shown.stderr


def test_a_bench_prints_tables_or_json() -> None:
    done = _hawk("bench", "fragmentation", "--channels", "7", "--capacity", "8GiB", "--json")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)
    assert _hawk("bench", "fragmentation", "--channels", "7").stdout


def test_bench_options_reach_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    class Result:
        def to_dict(self) -> dict[str, object]:
            return {}

    def run(**options: object) -> Result:
        asked.append(options)
        return Result()

    for arguments, module in (
        (["retile", "--json"], "retile"),
        (
            ["transfer", "--size", "10MB", "--size", "1KiB", "--transport", "shm", "--runs", "2", "--quick"],
            "transfer",
        ),
        (["retile", "--quick", "--size-mb", "4", "--repeats", "1", "--pair", "nhd > tiles"], "retile"),
    ):
        monkeypatch.setattr(f"hawk.bench.{module}.run", run)
        monkeypatch.setattr(f"hawk.bench.{module}.render", lambda *_: None)
        with pytest.raises(SystemExit) as caught:
            cli.main(["bench", *arguments])
        assert caught.value.code == 0
    assert asked == [
        {"quick": False},
        {"sizes": (10**7, 1024), "transports": ("shm",), "runs": 2, "quick": True},
        {"size_mb": 4, "repeats": 1, "pair": "nhd > tiles", "quick": True},
    ]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (KeyboardInterrupt(), 130, "\nhawk: interrupted"),  # on a line of its own, after the ^C
        (
            FileNotFoundError(2, "No such file or directory", "x.toml"),
            1,
            "hawk: x.toml: No such file or directory",
        ),
        (
            ZeroDivisionError("a\nb"),
            1,
            "hawk: a bug in HAWK: ZeroDivisionError: a b (HAWK_DEBUG=1 shows where)",
        ),
    ],
)
def test_whatever_happens_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    text: str,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.delenv("HAWK_DEBUG", raising=False)
    monkeypatch.setattr("hawk.config_text.reference", broken)
    with pytest.raises(SystemExit) as caught:
        cli.main(["config", "doc"])
    assert caught.value.code == status
    assert capsys.readouterr().err == text + "\n"


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    code = "import hawk.cli; hawk.cli.main(['config', 'doc'])"
    done = subprocess.run(
        ["/bin/sh", "-c", f'"{sys.executable}" -c "{code}" | true'],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
