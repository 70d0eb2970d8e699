"""The guests' kernel: taken from Debian's archive without being installed, and kept in a cache."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vmlab import packages
from vmlab.errors import LabError

DEFAULT = "linux-image-amd64"
CHOICE = "HAWK_LAB_KERNEL"
NEEDED_MB = 1200


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel package: `root` holds boot/vmlinuz-VERSION and lib/modules/VERSION."""

    version: str
    root: Path

    @property
    def image(self) -> Path:
        """What QEMU boots."""
        return self.root / "boot" / f"vmlinuz-{self.version}"

    @property
    def modules(self) -> Path:
        """What the guest has as /lib/modules."""
        return self.root / "lib" / "modules"

    @property
    def headers(self) -> Path | None:
        """The tree that it was built in, where it came by `make modules_install`; what modules are built against."""
        own = self.modules / self.version / "build"
        return own.resolve() if (own / "Makefile").exists() else None

    def check(self) -> Kernel:
        """Itself.  Raises `LabError` where a part is missing."""
        for part in (self.image, self.modules / self.version / "modules.dep"):
            if not part.exists():
                raise LabError(f"the kernel {self.root} lacks {part}; remove the folder and run this again")
        return self

    def config(self) -> dict[str, str]:
        """How it was built, CONFIG_ left away; empty where it does not say."""
        try:
            text = (self.root / "boot" / f"config-{self.version}").read_text()
        except OSError:
            return {}
        return dict(re.findall(r"^CONFIG_(\w+)=(.*)$", text, re.MULTILINE))

    @property
    def patience(self) -> float:
        """By how much limits of time are stretched for it: with checkers it runs several times as long."""
        config = self.config()
        return 4.0 if "y" in (config.get("KASAN"), config.get("PROVE_LOCKING")) else 1.0


def cache_folder() -> Path:
    """Where kernels, initrds and built modules are kept: HAWK_LAB_CACHE, or hawk/lab in the user's cache."""
    if given := os.environ.get("HAWK_LAB_CACHE"):
        return Path(given).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "hawk" / "lab"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One at a time prepares in a cache; the lock ends with its process."""
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def find(choice: str, cache: Path, say: Callable[[str], None]) -> Kernel:
    """The kernel that `choice` names: a package of Debian's, or the folder of one that is unpacked already.

    A package is looked up once; afterwards the cache holds it under its name.  Raises `LabError`.
    """
    if "/" in choice:
        return _unpacked(Path(choice).absolute())
    kept = cache / "kernels" / choice
    if kept.exists():
        return _unpacked(kept.resolve())
    kernels = kept.parent
    kernels.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(kernels).free // 1_000_000) < NEEDED_MB:
        raise LabError(f"{free} MB free in {kernels}, {NEEDED_MB} MB needed; or set HAWK_LAB_CACHE elsewhere")
    package = _concrete(choice)
    folder = kernels / package
    if not folder.exists():
        say(f"fetching {package}")
        _fetch(package, folder)
    if choice != package:
        link = kernels / f".{choice}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(package)
        link.replace(kept)
    return _unpacked(folder)


def _unpacked(root: Path) -> Kernel:
    found = sorted((root / "lib" / "modules").glob("*")) if root.exists() else []
    if len(found) != 1:
        raise LabError(f"{root} is no unpacked kernel: lib/modules holds {len(found)} versions, expected one")
    return Kernel(found[0].name, root).check()


def _concrete(choice: str) -> str:
    """The package with the files: the one named, or the one that a package for "the current kernel" depends on."""

    def depends() -> str:
        text = packages.apt("depends", choice, program="apt-cache")
        match = re.search(r"Depends: (linux-image-\d\S+)", text)
        return match.group(1) if match else choice

    try:
        name = depends()
    except LabError:
        if not packages.may_install():
            raise
        packages.apt("update", "-qq")
        name = depends()
    return name


def _fetch(package: str, folder: Path) -> None:
    """Unpacks a kernel package into `folder`, which appears whole or not at all."""
    work = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        work.chmod(0o755)  # apt drops its rights to download
        try:
            packages.apt("download", "-qq", package, folder=str(work))
        except LabError:
            if not packages.may_install():
                raise
            packages.apt("update", "-qq")
            packages.apt("download", "-qq", package, folder=str(work))
        (archive,) = work.glob("*.deb")
        tree = work / "tree"
        _run("dpkg-deb", "-x", str(archive), str(tree))
        if not (tree / "lib").exists():
            (tree / "lib").symlink_to("usr/lib")
        versions = [path.name for path in (tree / "lib" / "modules").glob("*")]
        if len(versions) != 1:
            raise LabError(f"the package {package} holds no kernel; {CHOICE} may name another, or a folder")
        _run("depmod", "-b", str(tree), versions[0])
        tree.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(*command: str) -> str:
    """What a program prints.  Programs of the administrator may be off an ordinary user's path."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    program = shutil.which(command[0], path=path)
    if program is None:
        raise LabError(f"{command[0]} is not here")
    done = subprocess.run(
        [program, *command[1:]],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or ["no reason given"]
        raise LabError(f"{' '.join(command)} failed: {words[-1]}")
    return done.stdout


def load_order(kernel: Kernel, wanted: tuple[str, ...]) -> list[Path]:
    """Module files in the order in which they can be loaded, everything that `wanted` depend on before them.

    Raises `LabError` where the kernel has no such module, as Debian's cloud flavour has not.
    """
    order: dict[Path, None] = {}
    for name in wanted:
        try:
            text = _run("modprobe", "-d", str(kernel.root), "-S", kernel.version, "--show-depends", name)
        except LabError as error:
            raise LabError(f"the kernel {kernel.version} has no module {name} ({error})") from None
        for line in text.splitlines():
            kind, _, rest = line.partition(" ")
            if kind == "insmod":
                order[Path(rest.split()[0])] = None
    return list(order)


def build(kernel: Kernel, source: Path, cache: Path, say: Callable[[str], None]) -> Path:
    """`make lab` in a copy of `source` against the kernel's headers; the folder with the results, kept by content.

    The Makefile is given KDIR.  Raises `LabError` with the end of the compiler's words.
    """
    import hashlib

    headers = kernel.headers
    packages.ensure(packages.building("" if headers else kernel.version), say)
    # One's own kernel keeps its name when it is built anew with another configuration.
    digest = hashlib.sha256(f"{kernel.version} {kernel.image.stat().st_mtime_ns}".encode())
    files = sorted(
        p for p in source.rglob("*") if p.is_file() and p.suffix not in (".o", ".ko", ".cmd", ".mod")
    )
    for path in files:
        digest.update(f"{path.relative_to(source)}\0".encode() + path.read_bytes() + b"\0")
    folder = cache / "builds" / f"{source.name}-{kernel.version}-{digest.hexdigest()[:12]}"
    if folder.exists():
        return folder
    say(f"building {source.name} for {kernel.version}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        tree = work / source.name
        for path in files:
            (tree / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, tree / path.relative_to(source))
        where = f"KDIR={headers or f'/usr/src/linux-headers-{kernel.version}'}"
        done = subprocess.run(
            ["make", "-C", str(tree), f"-j{len(os.sched_getaffinity(0))}", where, "lab"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=600,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            raise LabError(f"make in {source} failed:\n" + "\n".join(done.stdout.splitlines()[-30:]))
        tree.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder
