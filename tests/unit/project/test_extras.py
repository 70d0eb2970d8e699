"""What an error says where the package of an extra is missing: with `-e` where the clone itself is what runs."""

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import hawk
from hawk.extras import install

CLONE = Path(hawk.__file__).resolve().parents[1]


def _installed(monkeypatch: pytest.MonkeyPatch, said: str | None) -> None:
    monkeypatch.setattr(
        importlib.metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _name: said)
    )


def test_a_clone_that_runs_stays_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, json.dumps({"dir_info": {"editable": True}, "url": CLONE.as_uri()}))
    assert install("evaluate").endswith(f'-m pip install -e "{CLONE}[evaluate]"')


@pytest.mark.parametrize(
    "said",
    [
        None,
        "",
        "{",
        "[]",
        json.dumps({"dir_info": {}, "url": CLONE.as_uri()}),
        json.dumps({"dir_info": {"editable": True}, "url": "file:///elsewhere"}),
        json.dumps({"archive_info": {}, "url": "https://example.org/hawk.whl"}),
    ],
)
def test_otherwise_it_is_said_in_general(said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, said)
    # What is a tenth of the size and does the same is said beside it.
    assert "; pip install --no-deps nixl nixl-cu12 is enough)" in install("nixl")
    assert install("tls") == 'Install the extra tls: pip install "PATH_OF_THE_CLONE[tls]"'
