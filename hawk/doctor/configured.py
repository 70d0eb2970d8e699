"""Whether an agent of a given configuration could start on this machine; nothing is opened or allocated."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from hawk.control.local import socket_path
from hawk.doctor.findings import Finding, fail, ok, warn
from hawk.errors import ConfigError, HawkError, NotViable
from hawk.memory import registry as memories
from hawk.memory.available import available_memory
from hawk.transports import registry as transports
from hawk.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hawk.config import Config
    from hawk.doctor.machine import Machine

_IN_HOST_MEMORY = ("host", "emulated-npu")
"""Kinds whose capacity is taken of this machine's memory, all of it at the start."""


def configured(machine: Machine, config: Config) -> Iterator[Finding]:
    """What stands in the way of a start; one line that says so where nothing does."""
    found = [
        *_local(config),
        *_transports(config),
        *_unused(config),
        *_directory(config),
        *_memories(config),
        *_room(machine, config),
    ]
    yield from found or [ok("start", "folder, transports, memories and their sizes are to be had")]


def _local(config: Config) -> Iterator[Finding]:
    name, remedy = (
        "agent.local",
        "Give the socket a folder of the agent's user, mode 0700, or leave agent.local out",
    )
    try:
        folder = socket_path(config.agent.local).parent
    except ConfigError as error:
        yield fail(name, str(error), remedy)
        return
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    # Only what is not there as yet is made, so a folder above it need not be the agent's.
    if there == folder and folder.stat().st_uid not in (0, os.geteuid()):
        yield fail(name, f"{folder} belongs to user {folder.stat().st_uid}", remedy)
    elif not os.access(there, os.W_OK | os.X_OK):
        yield fail(name, f"this user may not write into {there}", remedy)


def _transports(config: Config) -> Iterator[Finding]:
    try:
        transports.require(config.transport.prefer)
    except NotViable as error:
        yield fail(
            "transport.prefer", f"{error.message}: {error.got}", "Name one that can be used, such as tcp"
        )


def _directory(config: Config) -> Iterator[Finding]:
    """Whether etcd can be asked as the configuration says; it is not asked."""
    if not config.discovery.etcd:
        return
    from hawk.agent.finding import client

    try:
        client(config.discovery)
    except HawkError as error:
        hint, error.hint = error.hint, None
        yield fail(error.field or "discovery", str(error), hint or "Mend the setting, or take it out")


def _unused(config: Config) -> Iterator[Finding]:
    """Tables of transports that `prefer` leaves out: nobody looks at what stands in them, so nobody finds it wrong."""
    for name, options in config.transport.options.items():
        if name not in config.transport.prefer and options != type(options)():
            yield warn(
                f"transport.{name}",
                "nothing in its table is used or looked at, for transport.prefer does not name it",
                f'Add "{name}" to transport.prefer, or take the table out',
            )


def _memories(config: Config) -> Iterator[Finding]:
    for name, entry in config.memory.items():
        error = memories.objection(entry.kind, name, entry.options)
        if error is not None:
            hint, error.hint = error.hint, None
            yield fail(f"memory.{name}", str(error), hint or "Mend the table, or take it out")


def _room(machine: Machine, config: Config) -> Iterator[Finding]:
    sizes = {
        f"memory.{name}": int(entry.options.capacity)
        for name, entry in config.memory.items()
        if entry.kind in _IN_HOST_MEMORY
    }
    need, there = config.arena_bytes + sum(sizes.values()), available_memory(machine.root)
    if need <= there:
        return
    largest = max({"arena": config.arena_bytes, **sizes}.items(), key=lambda item: item[1])[0]
    name, takes = "memory of the machine", f"arena and memories take {approximate_size(need)}"
    if need > (total := _total(machine)):
        yield fail(
            name, f"{takes}, and there are {approximate_size(total)}", f"Make {largest} smaller, the largest"
        )
    else:
        yield warn(
            name,
            f"{takes}, and {approximate_size(there)} are available",
            f"Make {largest} smaller, the largest; an agent of this configuration that runs has its part already",
        )


def _total(machine: Machine) -> int:
    """Bytes of memory that the machine has; without end where it does not say."""
    for line in machine.read("/proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        if key == "MemTotal" and rest.split():
            return int(rest.split()[0]) * 1024
    return sys.maxsize
