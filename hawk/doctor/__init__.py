"""What `hawk doctor` looks at: whether this machine has what HAWK's parts need, and what to do where it has not.

Everything is read from files of the kernel (below a root that tests replace) and from this process; nothing is
started, loaded or changed, and no device library is imported.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from hawk.doctor.findings import Finding, Level
from hawk.doctor.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hawk.config import Config

__all__ = ["Finding", "Level", "Machine", "examine"]


def examine(machine: Machine, config: Config | None = None) -> list[Finding]:
    """Everything that was found, in the order in which it is shown; what `config` needs and lacks is no longer well."""
    from hawk.doctor import limits, modules, rdma, software

    checks: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
        software.python,
        software.package,
        software.core,
        software.libraries,
        limits.files,
        limits.locked,
        limits.shared,
        limits.memfd,
        rdma.devices,
        rdma.pyverbs,
        modules.gpu,
        modules.peermem,
        modules.dmabuf,
        modules.ours,
        functools.partial(modules.drivers, config=config),
        software.transports,
    )
    return [finding for check in checks for finding in check(machine)]
