"""One guest: a QEMU process, the folder shared with it, and the commands that run there."""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vmlab.errors import GuestDied, GuestStuck, LabError
from vmlab.kernel import Kernel

BOOT_SECONDS = 180.0
"""Until a guest has to be ready.  Two at a time on two busy cores need less than half of it."""

GRACE = 45.0
"""Seconds beyond a command's own limit, which the guest itself keeps, until the guest is taken for stuck."""

COMPLAINT = re.compile(
    r"\bBUG\b|\bWARNING:|\bOops\b|Kernel panic|general protection fault|KASAN|KCSAN|UBSAN"
    r"|possible recursive locking|possible circular locking|suspicious RCU usage|unreferenced object"
    r"|refcount_t: |scheduling while atomic|blocked for more than|soft lockup|DMA-API:"
)
"""What a kernel says when something is wrong with it, and not with what it was asked."""

APPEND = (
    "console=ttyS0 loglevel=5 panic=-1 mitigations=off nokaslr tsc=reliable no_timer_check random.trust_cpu=on"
    " hung_task_timeout_secs=60"
)


@dataclass(frozen=True)
class Done:
    """How a command ended: its status (124: out of time), what it printed, the seconds it took."""

    node: int
    number: int
    status: int
    output: str
    seconds: float

    @property
    def timed_out(self) -> bool:
        """Whether it was ended by its limit."""
        return self.status in (124, 137)


@dataclass
class Running:
    """A command that a guest was given."""

    guest: Guest
    number: int
    limit: float
    began: float
    seen: int = 0
    done: Done | None = None

    @property
    def log(self) -> Path:
        """What it printed, so far."""
        return self.guest.shared / "did" / f"{self.number}.log"

    def news(self) -> str:
        """Whole lines that came since this was asked before; all there is once it is done."""
        with contextlib.suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(self.seen)
            data = file.read()
            if self.done is None:
                data = data[: data.rfind(b"\n") + 1]
            self.seen += len(data)
            return data.decode(errors="replace")
        return ""

    def poll(self) -> Done | None:
        """How it ended, or None so far.  Raises `GuestDied` or `GuestStuck`."""
        if self.done is not None:
            return self.done
        status = self.guest.shared / "did" / f"{self.number}.status"
        if status.exists():
            text = self.log.read_text(errors="replace") if self.log.exists() else ""
            seconds = time.monotonic() - self.began
            self.done = Done(self.guest.node, self.number, int(status.read_text()), text, seconds)
            return self.done
        self.guest.check()
        if time.monotonic() > self.began + self.limit + GRACE:
            self.guest.close()
            raise GuestStuck(
                f"node {self.guest.node} did not end a command of {self.limit:.0f} s\n{self.guest.tail()}"
            )
        return None


def _die_with_parent() -> None:
    """In the child: ends with this process, however that ends (PR_SET_PDEATHSIG)."""
    _LIBC.prctl(1, signal.SIGKILL)


_LIBC = ctypes.CDLL(None)


class Guest:
    """A virtual machine with its own kernel and network, and this machine's files.

    node      1 or 2: its address is 10.77.0.NODE, its RDMA device rxe0
    folder    of the run; short, since it holds Unix sockets
    wire      QEMU's description of the network card's other end
    bar       a file that backs a PCI device's memory (ivshmem, 1af4:1110), or None
    """

    def __init__(
        self,
        node: int,
        kernel: Kernel,
        initrd: Path,
        folder: Path,
        *,
        wire: str,
        memory: str = "1536M",
        bar: Path | None = None,
        program: str = "qemu-system-x86_64",
    ) -> None:
        self.node = node
        self.kernel = kernel
        self.shared = folder / f"node{node}"
        self.console_file = folder / f"console{node}"
        self.bar = bar
        self._qmp_path = folder / f"qmp{node}"
        self._count = 0
        self._heard = 0
        if self.shared.exists():  # of one that ran before under the same number
            shutil.rmtree(self.shared)
        for name in ("do", "did"):
            (self.shared / name).mkdir(parents=True)
        settings = {"NODE": str(node), "MODULES": str(kernel.modules)}
        lines = [f"{key}={shlex.quote(value)}\n" for key, value in settings.items()]
        (self.shared / "environment").write_text("".join(lines))
        self.console_file.write_bytes(b"")
        command = [
            program,
            *("-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", memory, "-M", "q35"),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *(
                "-chardev",
                f"file,id=console,path={self.console_file},append=on",
                "-serial",
                "chardev:console",
            ),
            *("-qmp", f"unix:{self._qmp_path},server=on,wait=off"),
            *("-kernel", str(kernel.image), "-initrd", str(initrd), "-append", APPEND),
            *("-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap"),
            *("-device", "virtio-9p-pci,fsdev=root,mount_tag=root"),
            *("-fsdev", f"local,id=lab,path={self.shared},security_model=none"),
            *("-device", "virtio-9p-pci,fsdev=lab,mount_tag=lab"),
            *("-netdev", wire, "-device", f"virtio-net-pci,netdev=wire,mac=52:54:00:00:00:0{node},romfile="),
            *("-device", "virtio-rng-pci"),
        ]
        if bar is not None:
            size = bar.stat().st_size
            command += [
                *("-object", f"memory-backend-file,id=bar,share=on,mem-path={bar},size={size}"),
                *("-device", "ivshmem-plain,memdev=bar"),
            ]
        self.began = time.monotonic()
        self._said = folder / f"qemu{node}"
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,  # a Ctrl-C is for us, who end it in order
                preexec_fn=_die_with_parent,
            )

    # -- its life ----------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether it waits for commands.  Raises `GuestDied`, or `GuestStuck` after `BOOT_SECONDS`."""
        if (self.shared / "up").exists():
            self.complaints()  # what the kernel says of its emulated machine at the start is nobody's fault
            return True
        self.check()
        if time.monotonic() > self.began + (limit := BOOT_SECONDS * self.kernel.patience):
            self.close()
            raise GuestStuck(f"node {self.node} was not up after {limit:.0f} s\n{self.tail()}")
        return False

    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process.poll() is None

    def check(self) -> None:
        """Raises `GuestDied` with the end of its console unless it lives."""
        if not self.alive():
            said = self._said.read_text(errors="replace").strip()
            raise GuestDied(f"node {self.node} ended\n{self.tail()}{said}")

    def close(self) -> None:
        """Ends the process and waits for it.  Safe to call twice."""
        if self.alive():
            self.process.kill()
        self.process.wait()
        self._qmp_path.unlink(missing_ok=True)

    # -- what runs there ---------------------------------------------------------------------------------

    def start(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> Running:
        """Gives it a command (a script for bash, or arguments); one at a time, in order."""
        self._count += 1
        text = command if isinstance(command, str) else "exec " + shlex.join(command)
        lines = [f"export {key}={shlex.quote(value)}" for key, value in (environment or {}).items()]
        if folder is not None:
            lines.append(f"cd {shlex.quote(str(folder))}")
        script = self.shared / "do" / str(self._count)
        script.write_text("\n".join([*lines, text, ""]))
        go = self.shared / "do" / f"{self._count}.new"
        go.write_text(f"{timeout:.0f}\n")
        go.rename(go.with_suffix(".go"))
        return Running(self, self._count, timeout, time.monotonic())

    def run(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> Done:
        """Runs a command there and waits for it.  Raises `GuestDied` or `GuestStuck`."""
        (done,) = wait([self.start(command, timeout=timeout, environment=environment, folder=folder)])
        return done

    # -- what the outside sees ---------------------------------------------------------------------------

    def console(self) -> str:
        """All that its kernel printed."""
        return self.console_file.read_text(errors="replace")

    def tail(self, lines: int = 40) -> str:
        """The last lines of it."""
        return "".join(f"  {line}\n" for line in self.console().splitlines()[-lines:])

    def complaints(self) -> list[str]:
        """Lines in which the kernel complains of itself, since this was asked before."""
        text = self.console()
        new, self._heard = text[self._heard :], len(text)
        return [line.strip() for line in new.splitlines() if COMPLAINT.search(line)]

    def link(self, up: bool) -> None:
        """Plugs the network's cable in or out."""
        self._qmp("set_link", name="wire", up=up)

    def _qmp(self, command: str, **arguments: object) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(str(self._qmp_path))
            with connection.makefile("rwb") as stream:
                stream.readline()  # its greeting
                for name, given in (("qmp_capabilities", {}), (command, arguments)):
                    stream.write(json.dumps({"execute": name, "arguments": given}).encode() + b"\n")
                    stream.flush()
                    while "event" in (answer := json.loads(stream.readline())):
                        pass
                    if "error" in answer:
                        raise LabError(f"QEMU refuses {name}: {answer['error'].get('desc')}")


def wait(
    running: Sequence[Running], on_line: Callable[[int, str], None] | None = None, pause: float = 0.05
) -> list[Done]:
    """Waits for commands of several guests; `on_line` is told (node, line) as lines come.

    Where one guest dies the others' commands are not waited for.
    """
    while True:
        done = [one.poll() for one in running]
        for one in running:
            for line in one.news().splitlines():
                if on_line is not None:
                    on_line(one.guest.node, line)
        finished = [one for one in done if one is not None]
        if len(finished) == len(running):
            return finished
        time.sleep(pause)
