"""Debian packages the lab needs: what is missing, and installing it where that is possible."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
from dataclasses import dataclass

from vmlab.errors import LabError

APT_SECONDS = 900
"""The longest that one call of apt may take."""


@dataclass(frozen=True)
class Need:
    """A package, and files of which one is there where it is installed (shell patterns)."""

    package: str
    files: tuple[str, ...]

    def met(self) -> bool:
        """Whether one of its files is there."""
        return any(glob.glob(pattern) for pattern in self.files)


class Static(Need):
    """A program that has to be linked statically, since the initrd holds no libraries."""

    def met(self) -> bool:
        """Whether one is there that names no program interpreter."""
        for pattern in self.files:
            for path in glob.glob(pattern):
                with open(path, "rb") as file:
                    head = file.read(4096)
                if b"/ld-linux" not in head and b"/ld-musl" not in head:
                    return True
        return False


BUSYBOX = ("/bin/busybox", "/usr/bin/busybox")

RUNNING = (
    Need("qemu-system-x86", ("/usr/bin/qemu-system-x86_64",)),
    Need("seabios", ("/usr/share/seabios/bios-256k.bin",)),
    Need("ipxe-qemu", ("/usr/lib/ipxe/qemu/efi-virtio.rom",)),
    Static("busybox-static", BUSYBOX),
    Need("kmod", ("/sbin/modprobe", "/usr/sbin/modprobe")),
    Need("iproute2", ("/usr/bin/rdma", "/sbin/rdma", "/usr/sbin/rdma")),
    Need("ibverbs-providers", ("/usr/lib/*/libibverbs/librxe-rdmav*.so",)),
    Need("ibverbs-utils", ("/usr/bin/ibv_devinfo",)),
    Need("perftest", ("/usr/bin/ib_write_bw",)),
    Need("python3-pyverbs", ("/usr/lib/python3/dist-packages/pyverbs/__init__.py",)),
)
"""What every guest needs, on this machine: guests have no files of their own."""


def building(version: str) -> tuple[Need, ...]:
    """What building a module needs: for Debian's kernel of that version, or for one's own ("")."""
    make = Need("make", ("/usr/bin/make",))
    if not version:
        return (make,)
    return (Need(f"linux-headers-{version}", (f"/usr/src/linux-headers-{version}/Makefile",)), make)


def missing(needs: tuple[Need, ...]) -> list[str]:
    """The packages that are not there."""
    return [need.package for need in needs if not need.met()]


def may_install() -> bool:
    """Whether this process can install packages."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def ensure(needs: tuple[Need, ...], say: object = None) -> None:
    """Installs what is missing, or says what to install.

    Raises `LabError` where it may not install, or where apt fails.
    """
    lacking = missing(needs)
    if not lacking:
        return
    names = " ".join(lacking)
    if not may_install():
        raise LabError(
            f"the lab needs {names}; install with: sudo apt-get install --no-install-recommends {names}"
        )
    if callable(say):
        say(f"installing {names}")
    apt("update", "-qq")
    apt("install", "-y", "-qq", "--no-install-recommends", *lacking)
    if still := missing(needs):
        raise LabError(f"apt-get installed {' '.join(still)}, but the files it should bring are not there")


def apt(*arguments: str, folder: str | None = None, program: str = "apt-get") -> str:
    """What an apt program prints; waits for another one's lock.  Raises `LabError` with its last words."""
    command = [program, "-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            timeout=APT_SECONDS,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise LabError(f"{program} is not here; the lab takes its kernel from Debian's archive") from None
    except subprocess.TimeoutExpired:
        raise LabError(f"{program} {arguments[0]} took more than {APT_SECONDS} s") from None
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
        raise LabError(f"{program} {' '.join(arguments)} failed: {words[-1].strip()}")
    return done.stdout
