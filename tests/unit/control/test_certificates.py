"""Certificates: private keys, an authority that is made once, nothing overwritten."""

from __future__ import annotations

import ssl
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hawk.cli.keys import keys
from hawk.control.certificates import new_certificates
from hawk.errors import ConfigError, MissingDependency


def test_an_authority_and_a_certificate_each(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "tls"
    done = CliRunner().invoke(keys, ["tls", str(folder), "p0", "d0"])
    assert done.exit_code == 0, done.output
    assert "transport.tcp.tls_ca" in done.output
    names = {"ca.pem", "ca-tls.key", "p0.pem", "p0-tls.key", "d0.pem", "d0-tls.key"}
    assert {path.name for path in folder.iterdir()} == names
    for path in folder.glob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for name in ("p0", "d0"):
        for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(side)
            context.load_verify_locations(folder / "ca.pem")
            context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}-tls.key")


def test_a_later_one_is_of_the_same_authority_and_none_is_overwritten(tmp_path: Path) -> None:
    new_certificates(tmp_path, ["p0"])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    new_certificates(tmp_path, ["d0"])
    with pytest.raises(ConfigError, match="never overwritten"):
        new_certificates(tmp_path, ["p0"])
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("name", ["ca", "", "../x", "a b"])
def test_names_that_are_none(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        new_certificates(tmp_path / "tls", [name])
    assert caught.value.field == "name"
    assert not (tmp_path / "tls").exists()


def test_an_authority_that_cannot_be_read(tmp_path: Path) -> None:
    new_certificates(tmp_path, ["p0"])
    new_certificates(tmp_path / "other", ["p0"])
    key = tmp_path / "ca-tls.key"
    for content in (b"no key", (tmp_path / "other" / "ca-tls.key").read_bytes(), None):
        if content is None:
            key.unlink()
        else:
            key.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            new_certificates(tmp_path, ["d0"])
        assert caught.value.field == "directory"
    assert not (tmp_path / "d0.pem").exists()


def test_without_the_package_the_hint_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingDependency, match=r"CLONE\[tls\]"):
        new_certificates(tmp_path / "tls", ["p0"])
