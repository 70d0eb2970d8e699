"""Finds the distribution's pyverbs, and imports that package alone.

Distributions install pyverbs beside their own Python packages.  Putting that folder on `sys.path` would let every
package in it shadow, or be taken for, the environment's own; so the one package is imported by its place.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from hawk.errors import MissingDependency
from hawk.transports.base import Viability

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

PACKAGE = "python3-pyverbs"

HINT = f"Install {PACKAGE} and ibverbs-providers (Debian, Ubuntu) or {PACKAGE} and libibverbs (Fedora, RHEL)"

SYSFS = Path("/sys/class/infiniband")


VARIABLE = "HAWK_PYVERBS_PATH"
"""Names the folder that has the package `pyverbs` in it, where that is neither this environment's nor found by rule."""


_GONE = "RDMAV_ALLOW_DISASSOC_DESTROY"
"""Tells libibverbs (ibv_open_device(3)) that what is given back to a device that is unplugged is given back.

The kernel has ended it all by then, and says EIO; without this a read would wait for ever for its memory to be closed.
"""


def places() -> list[Path]:
    """Folders in which the package may lie, in the order in which it is looked for.

    That which `VARIABLE` names, and no other, where it is set; else this environment's own and those of distributions.
    """
    if named := os.environ.get(VARIABLE):
        return [Path(named)]
    own = [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")]
    return list(dict.fromkeys([*own, *folders()]))


def folders() -> list[Path]:
    """Where distributions put packages for this version of Python."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = []
    for prefix in dict.fromkeys((Path("/usr"), Path(sys.base_prefix))):
        found += [
            prefix / "lib" / "python3" / "dist-packages",
            prefix / "lib" / version / "dist-packages",
            prefix / "lib64" / version / "site-packages",
            prefix / "lib" / version / "site-packages",
        ]
    return found


def load(within: Sequence[Path] | None = None) -> ModuleType:
    """The pyverbs package, from the environment or else the distribution.

    Raises `MissingDependency` where there is none, or one that was built for another Python.
    """
    os.environ.setdefault(_GONE, "1")
    known = sys.modules.get("pyverbs")
    if known is not None:
        return _usable(known)
    unusable: MissingDependency | None = None
    named = os.environ.get(VARIABLE)
    if within is None and named:
        within = [Path(named)]
    if within is None:
        within = folders()
        try:
            return _usable(importlib.import_module("pyverbs"))
        except ImportError:
            _forget()
        except MissingDependency as error:
            # A folder of that name on the path, for instance; the distribution's may do all the same.
            unusable = error
            _forget()
    for folder in within:
        start = folder / "pyverbs" / "__init__.py"
        if not start.is_file():
            continue
        spec = importlib.util.spec_from_file_location(
            "pyverbs", start, submodule_search_locations=[str(start.parent)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["pyverbs"] = module
        try:
            spec.loader.exec_module(module)
            return _usable(module)
        except ImportError as error:
            _forget()
            raise MissingDependency(
                "pyverbs cannot be loaded", field="transport.verbs", got=f"{start}: {error}", hint=HINT
            ) from error
        except BaseException:
            _forget()
            raise
    if named:
        raise MissingDependency("no package pyverbs is there", field=VARIABLE, got=named, hint=HINT)
    raise unusable or MissingDependency(
        "pyverbs is not installed", field="transport.verbs", got="no package pyverbs", hint=HINT
    )


def _usable(module: ModuleType) -> ModuleType:
    """Whether its compiled parts are there for this Python."""
    try:
        importlib.import_module("pyverbs.device")
    except ImportError as error:
        built = sorted(p.name for place in module.__path__ for p in Path(place).glob("device.*.so"))
        ours = sysconfig.get_config_var("EXT_SUFFIX")
        other = bool(built) and f"device{ours}" not in built
        raise MissingDependency(
            "pyverbs is built for another Python" if other else "pyverbs cannot be loaded",
            field="transport.verbs",
            got=", ".join(built) if other else f"{error}",
            expected=f"device{ours}" if other else None,
            hint="Run HAWK with the Python that the distribution has" if other else HINT,
        ) from error
    return module


def _forget() -> None:
    for name in [n for n in sys.modules if n == "pyverbs" or n.startswith("pyverbs.")]:
        del sys.modules[name]


def probe(
    loaded: Callable[[], ModuleType] = load, sysfs: Path = SYSFS, devices: Path = Path("/dev/infiniband")
) -> Viability:
    """Whether there is a device, and what it takes to use it.  Looks for the device first: it is the cheaper look."""
    try:
        names = sorted(p.name for p in sysfs.iterdir())
    except OSError:
        names = []
    if not names:
        return Viability(
            False,
            "there is no RDMA device; load its driver, or make a software one: "
            "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev NAME",
        )
    if not any(devices.glob("uverbs*")):
        return Viability(
            False,
            f"{', '.join(names)}: no {devices}/uverbs*; load ib_uverbs, or give this container the device",
        )
    try:
        loaded()
    except MissingDependency as error:
        return Viability(False, f"{', '.join(names)}: {error}")
    return Viability(True)
