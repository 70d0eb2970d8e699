"""`scripts/vm-lab`."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from venv_setup import SetupError, ensure, fail, say

from vmlab.errors import LabError
from vmlab.guest import wait
from vmlab.kernel import CHOICE, DEFAULT, cache_folder
from vmlab.lab import Lab
from vmlab.suites import ROOT, load_suites, together

BEGAN = time.monotonic()

ABOUT = f"""\
Virtual machines with RDMA and kernel modules, on a machine that has neither.

A stock Debian kernel runs in one or two QEMU guests without hardware help (TCG), so this works where there is no
KVM. Guests see the files of this machine, read-only, with a layer in memory above them: the checkout and its .venv
are there under their own paths. Each has a network card (10.77.0.1 and 10.77.0.2), an RDMA device rxe0 on it
(Soft-RoCE) and, the first one, a PCI device with 16 MiB of memory (ivshmem).

commands
  prepare              installs Debian packages that are missing (as root; else it names them), fetches the kernel,
                       makes the initrd; says what there is
  list                 the suites: tests/lab/suites.toml
  run [SUITE ...]      runs suites (all, if none is named), prints what they print (guest, seconds so far, line), and
                       fails when one fails; what follows -- goes to pytest
  exec -- COMMAND ...  runs a command in a guest (in two with --guests 2) as it would run in a suite

variables
  {CHOICE}      a kernel package ({DEFAULT} if unset; linux-image-6.12-amd64 is another), or the folder of an
                       unpacked one, such as a kernel with lockdep or KASAN; it needs virtio, 9p, overlay and rdma_rxe
  HAWK_LAB_CACHE       where kernels, initrds and built modules are kept ({{cache}} now); delete it to begin anew

A guest boots in 20 to 40 seconds. Nothing is left behind but the cache (after kill -9: a folder that the next
run removes); --keep leaves the run's logs and consoles and says where. docs/lab.md tells how to add a suite.
"""


def _seconds(text: str) -> float:
    value = float(text)
    if not 1 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: seconds, from 1 on")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/vm-lab",
        description=ABOUT.format(cache=cache_folder()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="scripts/vm-lab [OPTIONS] prepare | list | run [SUITE ...] [-- PYTEST ARGUMENTS] | exec -- COMMAND ...",
    )
    parser.add_argument("--kernel", metavar="CHOICE", help=f"instead of {CHOICE}")
    parser.add_argument("--guests", type=int, choices=(1, 2), help="for exec (1)")
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="for exec, in seconds (300)")
    parser.add_argument(
        "--build", action="append", default=[], metavar="FOLDER", help="for exec: build a module first"
    )
    parser.add_argument("--keep", action="store_true", help="leave the logs of the run")
    parser.add_argument("command", choices=("prepare", "list", "run", "exec"), help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help=argparse.SUPPRESS)
    return parser


def _refuse_what_would_be_ignored(asked: argparse.Namespace, rest: list[str]) -> None:
    """Ends with what was given and means nothing to this command, by name."""
    of_exec = {"--guests": asked.guests, "--timeout": asked.timeout, "--build": asked.build or None}
    given = [name for name, value in of_exec.items() if value is not None]
    if asked.command != "exec" and given:
        fail(f"{asked.command} does not take {', '.join(given)}; exec does")
    if asked.command in ("list", "prepare"):
        if asked.names or rest:
            fail(f"{asked.command} takes nothing after it: {' '.join([*asked.names, *rest])}")
        if asked.keep:
            fail(f"{asked.command} does not take --keep; it leaves no run")


def _run_again_in_venv(arguments: list[str]) -> None:
    """Suites run with what `.venv` has: goes on there, unless this is it or has the tests' tools itself.

    As this process, not as its child: who ends it ends the run, which tidies up then.
    """
    with contextlib.suppress(ImportError):
        import pytest  # noqa: F401

        return
    python = str(ensure("test"))
    sys.stdout.flush()
    os.execv(python, [python, str(Path(__file__).parent), *arguments])


def _show(node: int, line: str) -> None:
    print(f"{node} {time.monotonic() - BEGAN:5.0f} | {line}", flush=True)


def main(arguments: list[str]) -> int:
    """Does what was asked; 0 if all went well."""
    given, rest = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        given, rest = arguments[:at], arguments[at + 1 :]
    asked = _parser().parse_args(given)
    _refuse_what_would_be_ignored(asked, rest)
    suites = load_suites()
    if asked.command == "list":
        for suite in suites.values():
            by_hand = " (by hand only)" if suite.by_hand else ""
            print(
                f"{suite.name:<12} {suite.guests} guest{'s' * (suite.guests > 1):<1}  {suite.about}{by_hand}"
            )
        return 0
    if asked.command == "prepare":
        with Lab(choice=asked.kernel, say=say) as lab:
            kernel = lab.prepare()
            print(f"Linux {kernel.version}, {kernel.root}")
        return 0
    unknown = [name for name in asked.names if name not in suites]
    if asked.command == "run" and unknown:
        fail(f"no such suite: {', '.join(unknown)}; there are {', '.join(suites)}")
    if asked.command == "exec" and (not rest or asked.names):
        fail("exec runs what follows --")
    _run_again_in_venv(arguments)
    with Lab(choice=asked.kernel, say=say, on_line=_show, keep=asked.keep) as lab:
        if asked.command == "exec":
            return _exec(lab, rest, asked.guests or 1, asked.timeout or 300.0, asked.build)
        chosen = [suites[name] for name in asked.names] or [
            suite for suite in suites.values() if not suite.by_hand
        ]
        plan = together(chosen)
        lab.guests(max(sum(suite.guests for suite in suites) for suites in plan))
        results = []
        for suites_now in plan:
            for result in lab.run_together(suites_now, rest):
                results.append(result)
                if not result.ok:
                    print("\n".join([*result.failures, *result.complaints]), flush=True)
        for result in results:
            print(result.line())
        return 0 if all(result.ok for result in results) else 1


def _exec(lab: Lab, command: list[str], count: int, timeout: float, builds: list[str]) -> int:
    built = {f"HAWK_LAB_BUILD_{Path(name).name.upper()}": str(lab.built(name)) for name in builds}
    running = [
        guest.start(command, timeout=timeout, environment=lab.environment(guest.node) | built, folder=ROOT)
        for guest in lab.guests(count)
    ]
    return max(done.status for done in wait(running, lab.on_line))


def _terminated(number: int, frame: object) -> None:
    del frame
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGHUP, _terminated)
    try:
        code = main(sys.argv[1:])
    except (SetupError, LabError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted")
    raise SystemExit(code)
