"""Kernel modules by which a network card reaches the memory of other devices."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from hawk.doctor.findings import Finding, Level, ok, warn
from hawk.doctor.rdma import has_devices
from hawk.extras import install
from hawk.memory import registry as memories

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hawk.config import Config
    from hawk.doctor.machine import Machine

NPU_MODULE = "hawk_npu"

DMABUF_RELEASE = (5, 12)
"""The first kernel in which a dma-buf can be registered with an RDMA device (`ibv_reg_dmabuf_mr`)."""


def _open_nvidia(machine: Machine) -> bool:
    """Whether NVIDIA's driver is the open one, which alone exports device memory as dma-bufs."""
    return "Open Kernel Module" in machine.read("/proc/driver/nvidia/version")


def peermem(machine: Machine) -> Iterator[Finding]:
    """Whether a card can register CUDA memory by its address."""
    name = "nvidia-peermem"
    if not machine.loaded("nvidia"):
        yield ok(name, "no NVIDIA driver is loaded, so there is nothing for it to do")
    elif machine.loaded("nvidia_peermem") or machine.loaded("nv_peer_mem"):
        yield ok(name, "loaded")
    elif not has_devices(machine):
        yield ok(name, "not loaded; it serves RDMA devices, and there is none")
    elif _open_nvidia(machine) and _dmabuf_kernel(machine):
        yield ok(name, "not loaded; dma-bufs do its work here")
    else:
        yield warn(name, "not loaded", "`modprobe nvidia-peermem`, or CUDA memory goes by way of host memory")


def gpu(machine: Machine, known: Callable[[str], object] = importlib.util.find_spec) -> Iterator[Finding]:
    """Whether caches on a GPU can be sources: its driver, and the library that starts kernels."""
    if not machine.loaded("nvidia"):
        yield ok("GPU", "no NVIDIA driver is loaded; caches are in memory of the host")
    elif known("cupy") is None:
        yield warn("GPU", "its driver is loaded, but CuPy is not installed", install("cuda"))
    else:
        yield ok("GPU", "its driver is loaded, and CuPy is installed")


def _dmabuf_kernel(machine: Machine) -> bool:
    built = machine.configured("DMA_SHARED_BUFFER")
    return machine.release_numbers >= DMABUF_RELEASE and built is not False


def dmabuf(machine: Machine) -> Iterator[Finding]:
    """Whether the kernel, and a GPU's driver if there is one, can hand memory to a card as a dma-buf."""
    name = "dma-buf"
    if machine.release_numbers < DMABUF_RELEASE:
        needed = ".".join(map(str, DMABUF_RELEASE))
        yield warn(
            name, f"Linux {machine.release or 'unknown'} cannot register them", f"Linux {needed} or later can"
        )
        return
    if machine.configured("DMA_SHARED_BUFFER") is False:
        yield warn(
            name, f"Linux {machine.release} was built without", "Use a kernel with CONFIG_DMA_SHARED_BUFFER=y"
        )
        return
    if machine.loaded("nvidia") and not _open_nvidia(machine):
        yield warn(
            name,
            "NVIDIA's driver is the closed one, which exports none",
            "Install its open kernel modules, or use nvidia-peermem",
        )
        return
    sure = "" if machine.configured("DMA_SHARED_BUFFER") else ", as far as its version tells"
    soft = [device for device in machine.names("/sys/class/infiniband") if device.startswith("rxe")]
    but = f"; {', '.join(soft)} (Soft-RoCE) cannot" if soft else ""
    yield ok(name, f"Linux {machine.release} can register them{sure}{but}")


def ours(machine: Machine) -> Iterator[Finding]:
    """HAWK's own module, for NPU channel memory (docs/kmod.md)."""
    nodes = [name for name in machine.names("/dev") if name.startswith(NPU_MODULE)]
    if not machine.loaded(NPU_MODULE):
        yield ok(
            NPU_MODULE,
            "not loaded; memories in host memory, and drivers with an export of their own, need it not",
        )
        return
    version = machine.read(f"/sys/module/{NPU_MODULE}/version")
    loaded = f"loaded{', version ' + version if version else ''}"
    if not nodes:
        yield warn(NPU_MODULE, f"{loaded}, but there is no device file", "`dmesg` says why no device came up")
        return
    shut = [name for name in nodes if not os.access(machine.path(f"/dev/{name}"), os.R_OK | os.W_OK)]
    if shut:
        yield warn(
            NPU_MODULE,
            f"{loaded}; this user may not open {', '.join('/dev/' + name for name in shut)}",
            "Run the agent as a user of the device's group, or change the group by a udev rule",
        )
        return
    yield ok(NPU_MODULE, f"{loaded}; {', '.join('/dev/' + name for name in nodes)}")


def drivers(machine: Machine, config: Config | None = None) -> Iterator[Finding]:
    """What kinds of memory that know a driver of their own say of it, and of what `config` names of them."""
    named = config.memory.items() if config is not None else ()
    lacking = {e.kind for name, e in named if memories.objection(e.kind, name, e.options) is not None}
    for kind, survey in memories.surveys().items():
        for name, well, text, remedy in survey(machine, lacking=kind in lacking):
            yield Finding(name, Level.OK if well else Level.WARN, text, remedy)
