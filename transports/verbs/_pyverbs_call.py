"""Calls into pyverbs: its modules, its errors, and the two objects that others refer to."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import os
import re
import threading
from typing import TYPE_CHECKING, Any

from hawk.transports.verbs import _find
from hawk.transports.verbs._device import VerbsError

if TYPE_CHECKING:
    from collections.abc import Iterator


descriptors = threading.Lock()
"""Held while anything is opened or closed that has an event descriptor: a device or a completion channel.

Which one belongs to a channel is seen by what appears while it is made, and nothing else may come or go meanwhile.
"""


def event_descriptors() -> set[int]:
    """Descriptors of this process by which devices and completion channels tell of something."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
    return found


@functools.cache
def part(name: str) -> Any:
    """A module of pyverbs."""
    _find.load()
    return importlib.import_module(f"pyverbs.{name}")


@contextlib.contextmanager
def calling(what: str) -> Iterator[None]:
    """Turns pyverbs' errors into `VerbsError`; they carry the number as an attribute or only in their text."""
    errors = part("pyverbs_error")
    try:
        yield
    except errors.PyverbsError as error:
        raise VerbsError(_number(error), what) from error


def _number(error: Exception) -> int:
    code = getattr(error, "error_code", None)
    if isinstance(code, int) and code:
        return abs(code)
    found = re.search(r"[Ee]rrno:? *(-?\d+)", str(error))
    return abs(int(found.group(1))) if found else errno.EIO


class PyverbsRegistration:
    """See `Registration`."""

    def __init__(self, mr: Any, address: int, nbytes: int) -> None:
        self._mr = mr
        self.address = address
        self.nbytes = nbytes
        self.lkey = int(mr.lkey)
        self.rkey = int(mr.rkey)

    @property
    def raw(self) -> Any:
        """The object of pyverbs."""
        return self._mr

    def close(self) -> None:
        """See `Registration.close`."""
        with calling("ibv_dereg_mr"):
            self._mr.close()


class PyverbsWindow:
    """See `Window`."""

    def __init__(self, mw: Any) -> None:
        self.raw = mw

    def close(self) -> None:
        """See `Window.close`."""
        with calling("ibv_dealloc_mw"):
            self.raw.close()
