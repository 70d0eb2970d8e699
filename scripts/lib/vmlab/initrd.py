"""The guests' initrd: busybox, the modules that reach this machine's files, and two scripts."""

from __future__ import annotations

import glob
import gzip
import hashlib
import lzma
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from vmlab import packages
from vmlab.kernel import Kernel, load_order

HERE = Path(__file__).resolve().parent
MODULES = ("virtio_pci", "virtio_net", "9pnet_virtio", "9p", "overlay")


class Archive:
    """A cpio archive in the form that the kernel unpacks ("newc": Documentation/driver-api/early-userspace)."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._number = 0
        self._folders: set[str] = set()

    def file(self, name: str, data: bytes, mode: int = 0o644) -> None:
        """A file, and the folders it lies in."""
        self._add(name, stat.S_IFREG | mode, data)

    def folder(self, name: str) -> None:
        """A folder, and those it lies in."""
        if name and name not in self._folders:
            self._folders.add(name)
            self._add(name, stat.S_IFDIR | 0o755, b"")

    def _add(self, name: str, mode: int, data: bytes) -> None:
        self.folder(name.rpartition("/")[0])
        self._number += 1
        self._entry(name, mode, data)

    def _entry(self, name: str, mode: int, data: bytes) -> None:
        path = name.encode() + b"\0"
        fields = (self._number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields)
        for part in (head + path, data):
            self._parts += [part, bytes(-len(part) % 4)]

    def bytes(self) -> bytes:
        """The archive with its end."""
        self._number = 0
        self._entry("TRAILER!!!", 0, b"")
        return b"".join(self._parts)


def _module(path: Path) -> bytes:
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def make(kernel: Kernel, cache: Path, say: Callable[[str], None]) -> Path:
    """The initrd for a kernel, from the cache if what it is made of has not changed."""
    busybox = Path(next(path for pattern in packages.BUSYBOX for path in glob.glob(pattern)))
    parts = {
        "init": (HERE / "initrd.sh").read_bytes(),
        "guest.sh": (HERE / "guest.sh").read_bytes(),
        "bin/busybox": busybox.read_bytes(),
    }
    digest = hashlib.sha256(f"{kernel.version} {kernel.image.stat().st_mtime_ns} {MODULES}".encode())
    for data in parts.values():
        digest.update(data)
    folder = cache / "initrds"
    path = folder / f"{kernel.version}-{digest.hexdigest()[:12]}.gz"
    if path.exists():
        return path
    say(f"making an initrd for {kernel.version}")
    archive = Archive()
    for name in ("proc", "sys", "dev", "lower", "upper", "new"):
        archive.folder(name)
    for name, data in parts.items():
        archive.file(name, data, 0o755)
    order = load_order(kernel, MODULES)
    names = [module.name.removesuffix(".xz") for module in order]
    for module, name in zip(order, names, strict=True):
        archive.file(f"modules/{name}", _module(module))
    archive.file("modules/order", "".join(f"{name}\n" for name in names).encode())
    folder.mkdir(parents=True, exist_ok=True)
    fd, new = tempfile.mkstemp(dir=folder, prefix=".new-")
    try:
        with open(fd, "wb") as file:
            file.write(gzip.compress(archive.bytes(), 1))
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
    return path
