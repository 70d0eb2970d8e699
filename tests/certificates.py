"""Certificates for tests: made once per run, in a folder that child processes find again."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from hawk.control.certificates import new_certificates

_FOLDER = "HAWK_TEST_CERTIFICATES"


def folder() -> Path:
    """Of `ca.pem`, and NAME.pem with NAME-tls.key for `one`, `two`; below `other`, `stranger` of another authority."""
    known = os.environ.get(_FOLDER)
    if known is None:
        made = Path(tempfile.mkdtemp(prefix="hawk-certificates-"))
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        new_certificates(made, ["one", "two"])
        new_certificates(made / "other", ["stranger"])
        # Not a setting of HAWK's, which know tables only; children inherit it.
        known = os.environ[_FOLDER] = str(made)
    return Path(known)


def settings(name: str = "one", *, authority: str = "ca.pem", where: str = "") -> dict[str, Path]:
    """What `TcpConfig` takes."""
    at = folder() / where
    return {
        "tls_cert": at / f"{name}.pem",
        "tls_key": at / f"{name}-tls.key",
        "tls_ca": folder() / authority,
    }
