"""What to do where the package of an extra is missing.  A leaf module."""

from __future__ import annotations

import os
import sys

_SMALLER = {"nixl": ("3 GB, with torch", "nixl nixl-cu12")}
"""By extra: what it takes, and the packages that are enough without what they ask for."""


def install(extra: str) -> str:
    """What to do where a package of an extra is missing; HAWK is installed from a clone (README).

    Where the clone itself is what runs (`pip install -e`, as `scripts/` do it), it is named: installing it otherwise
    would put a copy in its place, which no `git pull` changes.
    """
    clone = _clone()
    pip = "pip" if clone is None else f"{sys.executable} -m pip"
    what = f'"PATH_OF_THE_CLONE[{extra}]"' if clone is None else f'-e "{clone}[{extra}]"'
    less = ""
    if extra in _SMALLER:
        takes, packages = _SMALLER[extra]
        less = f" ({takes}; {pip} install --no-deps {packages} is enough)"
    return f"Install the extra {extra}: {pip} install {what}{less}"


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
