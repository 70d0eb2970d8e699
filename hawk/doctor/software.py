"""Python, this package, the libraries it stands on, and what the transports say of themselves."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hawk.doctor.findings import Finding, fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from hawk.doctor.machine import Machine

DISTRIBUTION = "hawk-kv"
OLDEST, NEWEST = (3, 11), (3, 13)


def python(machine: Machine, version: tuple[int, int] = sys.version_info[:2]) -> Iterator[Finding]:
    """Whether this Python is one that HAWK is made for."""
    del machine
    said = ".".join(map(str, version))
    if version < OLDEST:
        yield fail("Python", said, "Use Python 3.11, 3.12 or 3.13")
    elif version > NEWEST:
        yield warn(
            "Python", f"{said} is newer than any HAWK was tested with", "Use Python 3.11, 3.12 or 3.13"
        )
    else:
        yield ok("Python", f"{said}, {sys.executable}")


def package(
    machine: Machine,
    owners: Callable[[], Mapping[str, Iterable[str]]] = importlib.metadata.packages_distributions,
) -> Iterator[Finding]:
    """Whether `import hawk` is ours: another distribution installs a package of that name as well."""
    del machine
    import hawk

    folder = Path(hawk.__file__ or "").parent
    names = sorted(set(owners().get("hawk", ())))
    others = [name for name in names if name.lower().replace("_", "-") != DISTRIBUTION]
    if others:
        yield fail(
            "import hawk",
            f"{', '.join(others)} installs a package named hawk as well, and either may overwrite the other",
            f"`pip uninstall {' '.join(others)}`, then `pip install --force-reinstall {DISTRIBUTION}`",
        )
    elif not names:
        yield warn("import hawk", f"{folder}, which is not installed", "`pip install -e .` in the checkout")
    else:
        yield ok("import hawk", f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)}, {folder}")


def core(machine: Machine) -> Iterator[Finding]:
    """Whether the C core that converts caches was built."""
    del machine
    from hawk.errors import HawkError
    from hawk.retile import native

    try:
        name = native.core_name()
    except HawkError as error:
        yield fail("C core", str(error), "Unset HAWK_CORE, or install a C compiler and then HAWK once more")
        return
    if name == "c":
        yield ok("C core", "built")
    else:
        yield warn(
            "C core",
            "not in use; numpy converts, several times slower",
            "Install a C compiler, then HAWK again",
        )


def libraries(machine: Machine) -> Iterator[Finding]:
    """The event loop and the sockets."""
    del machine
    try:
        import uvloop
    except ImportError as error:
        yield fail("uvloop", str(error), "`pip install uvloop`")
    else:
        yield ok("uvloop", importlib.metadata.version(uvloop.__name__))
    try:
        import zmq
    except ImportError as error:
        yield fail("pyzmq", str(error), "`pip install pyzmq`")
        return
    about = f"{zmq.__version__}, libzmq {zmq.zmq_version()}"
    if zmq.has("curve"):
        yield ok("pyzmq", f"{about} with CURVE")
    else:
        yield fail(
            "pyzmq", f"{about} without CURVE", "`pip install --force-reinstall --only-binary :all: pyzmq`"
        )


def transports(machine: Machine) -> Iterator[Finding]:
    """What every installed transport says when asked whether it can be used here."""
    del machine
    from hawk.transports import registry

    survey = registry.survey()
    for name, verdict in survey.items():
        if verdict.ok:
            yield ok(
                f"transport {name}", f"can be used; {verdict.reason}" if verdict.reason else "can be used"
            )
        else:
            yield warn(f"transport {name}", verdict.reason, "Without it the others are used")
    if not any(verdict.ok for verdict in survey.values()):
        yield fail("transports", "none can be used here", "See the reason of each")
