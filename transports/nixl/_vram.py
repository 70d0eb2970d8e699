"""Whether UCX, as NIXL brings it, can be given memory of GPUs here; and the context in which it wants to be called."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from hawk.errors import HawkError
from hawk.memory import cuda_driver
from hawk.memory.cuda import device

if TYPE_CHECKING:
    from collections.abc import Iterator

_MODULE = "libuct_cuda.so"
_LIBRARY = "libuct-"
_WAYS = {"all", "cuda", "cuda_copy"}
"""Names in `tls` with which UCX knows memory of GPUs when it sees it."""


def left_out(tls: str) -> str:
    """Why a choice of UCX's ways leaves memory of GPUs out, or nothing."""
    names = set(tls.removeprefix("^").split(","))
    if not tls or bool(names & _WAYS) != tls.startswith("^"):
        return ""
    return f"transport.nixl.tls leaves out UCX's own way to it: {tls!r} would have to name cuda"


def tolerated(tls: str) -> str:
    """Several of UCX's ways as NIXL takes them from the environment.

    Where the host has a GPU it makes no back end from a list that leaves out memory of GPUs.  So UCX is to know of
    that, whether or not it is given any (`left_out`); where there is no GPU, it does without.
    """
    names = [name.strip() for name in tls.removeprefix("^").split(",")]
    if tls.startswith("^"):
        others = [name for name in names if name not in _WAYS]
        return "^" + ",".join(others) if others else "all"
    return tls if _WAYS & set(names) else f"{tls},cuda_copy"


def driver() -> str:
    """Why there is no GPU to be seen here, or nothing."""
    try:
        return "" if cuda_driver.load().device_count() > 0 else "the CUDA driver finds no GPU"
    except HawkError as error:
        return error.message
    except cuda_driver.CudaFault as fault:
        return f"the CUDA driver does not answer: {fault}"


def modules(package: str = "nixl") -> list[Path]:
    """UCX's modules for CUDA in the wheels that NIXL's package comes in, as files; nothing is loaded."""
    found = importlib.util.find_spec(package)
    places = (found.submodule_search_locations or ()) if found is not None else ()
    return sorted(
        file for place in places for file in Path(place).parent.glob(f"{package}_cu*.libs/ucx/{_MODULE}*")
    )


@functools.cache
def loaded(maps: str = "/proc/self/maps") -> str:
    """Why UCX, which is loaded, has no module for CUDA loaded with it, or nothing where it has."""
    lines = Path(maps).read_text().splitlines()
    files = {Path(line.split(maxsplit=5)[5].strip()) for line in lines if "/" in line}
    if any(file.name.startswith(_MODULE) for file in files):
        return ""
    beside = [file.parent / "ucx" for file in files if file.name.startswith(_LIBRARY)]
    there = sorted(found for folder in beside for found in folder.glob(f"{_MODULE}*"))
    if not there:
        return "UCX was built without its module for CUDA"
    try:
        ctypes.CDLL(str(there[0]))
    except OSError as error:
        return f"UCX's module for CUDA does not load: {error}"
    return "UCX did not take its module for CUDA, though it loads"


def why_not(tls: str) -> str:
    """Why memory of GPUs cannot be registered with NIXL's back end, which is loaded; nothing where it can."""
    return left_out(tls) or driver() or loaded()


def foreseen(tls: str = "") -> str:
    """`why_not` as far as that can be told before NIXL is loaded."""
    return left_out(tls) or driver() or ("" if modules() else "UCX was built without its module for CUDA")


@contextlib.contextmanager
def current(gpu: int) -> Iterator[None]:
    """Within the block that GPU's context is this thread's, which UCX copies by; -1 leaves all as it is."""
    if gpu < 0:
        yield
        return
    with device(gpu).current():
        yield
