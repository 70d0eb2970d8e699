"""What to do where the package of an extra is missing.  A leaf module."""

from __future__ import annotations

import os
import sys


def install(extra: str) -> str:
    """What to do where a package of an extra is missing; HAWK is installed from a clone (README).

    Where the clone itself is what runs (`pip install -e`, as `scripts/` do it), it is named: installing it otherwise
    would put a copy in its place, which no `git pull` changes.
    """
    clone = _clone()
    if clone is None:
        return f'Install the extra {extra}: pip install "PATH_OF_THE_CLONE[{extra}]"'
    return f'Install the extra {extra}: {sys.executable} -m pip install -e "{clone}[{extra}]"'


def _clone() -> str | None:
    """The clone whose `hawk` runs, if this environment has it as an editable install; None otherwise."""
    import importlib.metadata  # these take time, and an error that names an extra is rare
    import json
    import urllib.parse

    try:
        said = json.loads(importlib.metadata.distribution("hawk-kv").read_text("direct_url.json") or "{}")
        place = urllib.parse.urlparse(said["url"])
        editable = bool(said["dir_info"]["editable"])
    except (importlib.metadata.PackageNotFoundError, ValueError, LookupError, TypeError, OSError):
        return None
    clone = urllib.parse.unquote(place.path)
    runs = os.path.realpath(os.path.join(os.path.dirname(__file__), os.pardir))
    return clone if editable and place.scheme == "file" and os.path.realpath(clone) == runs else None
