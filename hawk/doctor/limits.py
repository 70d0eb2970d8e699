"""What this process may have: descriptors, locked memory, shared memory."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING

from hawk.doctor.findings import Finding, fail, ok, warn
from hawk.doctor.machine import CAP_IPC_LOCK
from hawk.doctor.rdma import has_devices
from hawk.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hawk.doctor.machine import Machine

FILES = 8192
"""Open files that an agent should be allowed (docs/operations.md)."""

LOCKED = 1 << 30
"""Bytes that can be registered with a card, below which agents of any use do not start."""

SHARED = 256 << 20
"""Bytes of /dev/shm below which engines that share tensors through it run out: containers begin with 64 MiB."""


def files(machine: Machine) -> Iterator[Finding]:
    """The limit of open files, which agents raise as far as they may."""
    _, hard = machine.limit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= FILES:
        yield ok("open files", "unlimited" if hard == resource.RLIM_INFINITY else f"{hard} at most")
    else:
        yield warn(
            "open files",
            f"{hard} at most, {FILES} are wanted",
            f"LimitNOFILE={FILES} in the unit, or `ulimit -Hn`",
        )


def locked(machine: Machine) -> Iterator[Finding]:
    """How much memory may be locked, which is how much may be registered with an RDMA device."""
    soft, _ = machine.limit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or machine.capable(CAP_IPC_LOCK):
        yield ok(
            "locked memory", "unlimited" if soft == resource.RLIM_INFINITY else "unlimited by CAP_IPC_LOCK"
        )
    elif not has_devices(machine):
        yield ok("locked memory", f"{approximate_size(soft)}; only RDMA needs more")
    elif soft < LOCKED:
        yield fail(
            "locked memory",
            f"{approximate_size(soft)}: an RDMA device can use no more than that",
            "LimitMEMLOCK=infinity in the unit, `ulimit -l unlimited`, --ulimit memlock=-1 for a container",
        )
    else:
        yield warn(
            "locked memory",
            f"{approximate_size(soft)}: arena and memories together have to fit, if they go by RDMA",
            "LimitMEMLOCK=infinity in the unit makes it no concern",
        )


def shared(machine: Machine) -> Iterator[Finding]:
    """The size of /dev/shm.  HAWK's own shared memory is not there (memfd), that of engines is."""
    try:
        about = os.statvfs(machine.path("/dev/shm"))
    except OSError as error:
        yield warn("/dev/shm", f"{error.strerror}", "Mount a tmpfs there: engines share tensors through it")
        return
    total = about.f_blocks * about.f_frsize
    if total < SHARED:
        yield warn(
            "/dev/shm",
            f"{approximate_size(total)}, which engines that share tensors through it may exceed",
            "`mount -o remount,size=4g /dev/shm`, --shm-size for a container",
        )
    else:
        yield ok("/dev/shm", approximate_size(total))


def memfd(machine: Machine) -> Iterator[Finding]:
    """Whether shared memory can be made as HAWK makes it."""
    del machine  # only a try tells
    try:
        os.close(os.memfd_create("hawk-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        yield fail(
            "memfd",
            f"cannot be made: {error.strerror}",
            "Allow memfd_create in the container's seccomp profile",
        )
    else:
        yield ok("memfd", "can be made")
