"""What this machine can measure, one benchmark after the other, and what it cannot, with the reason.

Each benchmark's object goes into a file of its own as soon as it is there, as `hawk bench ... --json` writes it, so
that the folder can be read as figures measured elsewhere on another machine, and a run that ends early has lost little.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hawk.bench import between, fragmentation, retile, transfer
from hawk.bench.samples import stamped
from hawk.errors import HawkError, InternalError, InvalidArgument
from hawk.evaluate.output import whole
from hawk.evaluate.records import Absent, Origin
from hawk.evaluate.sources import Source, read
from hawk.memory.cuda_driver import CudaFault, load
from hawk.transports import registry
from hawk.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MB = 1_000_000
SIZES = tuple(n * MB for n in (10, 20, 40, 80, 160, 320, 640, 1280))
QUICK_SIZES = (10 * MB, 40 * MB)
TRANSFER_SIZES = tuple(n * MB for n in (10, 80, 320, 1280))
RUNS, QUICK_RUNS = 5, 3

PAIRS = ("nhd > tiles", "nhd > tiles:bfp8_b", "tiles > nhd")
"""Conversions that the report shows: what HAWK does on the prefill side, to bf16 and to block floats, and back."""

_SPARE = 2 << 30
_COPIES = 8
"""Times the largest request that its pools, arenas, landing place and checks take, beside the sources themselves."""


@dataclass(frozen=True)
class Step:
    """One benchmark: its module of `hawk.bench`, what it asks, and what runs it."""

    benchmark: str
    about: str
    run: Callable[[], Any]


@dataclass
class Machine:
    """What was found here.

    devices    two GPUs, one twice, or memory of the host in their place, as `hawk bench transfer --devices` takes them
    """

    devices: str
    absent: list[Absent]

    @property
    def gpu(self) -> bool:
        """Whether there is one that HAWK can use."""
        return self.devices != between.HOST


def look() -> Machine:
    """What there is; starts nothing."""
    absent: list[Absent] = []
    count, why = _gpus()
    if count and importlib.util.find_spec("cupy") is None:
        count, why = 0, "the kernels are compiled by CuPy, which is not installed (the extra cuda)"
    if not count:
        absent.append(Absent("transfers from and between GPUs, and retiling on one", why))
    elif count == 1:
        absent.append(Absent("a link between two GPUs", "there is one GPU; requests go from it to itself"))
    absent.append(
        Absent(
            "an NPU's own memory as the target",
            "the target here is the same layout in emulated channels; HAWK has not been run on a card yet",
        )
    )
    verbs = registry.survey()["verbs"]
    if not verbs.ok:
        absent.append(Absent("RDMA between two hosts", verbs.reason))
    else:
        absent.append(
            Absent("RDMA between two hosts", "this command runs on one host; see `hawk bench verbs`")
        )
    absent.append(
        Absent("the paper's serving runs", "they take its devices and its model; their place is simulated")
    )
    devices = between.HOST if not count else f"cuda:0,cuda:{min(1, count - 1)}"
    return Machine(devices, absent)


def chosen(devices: str) -> str:
    """`devices` as given; raises `InvalidArgument` for what is no pair, or a GPU that is not there."""
    highest = max(between.numbers(devices))
    if devices != between.HOST:
        count, why = _gpus()
        if highest >= count:
            there = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0,cuda:0, for there is one GPU"
            raise InvalidArgument(
                "no such GPU" if count else f"no GPU can be used here: {why}",
                field="devices",
                got=devices,
                expected=there if count else between.HOST,
            )
    return devices


def _gpus() -> tuple[int, str]:
    try:
        count = load().device_count()
    except (HawkError, CudaFault) as error:
        return 0, " ".join(str(error).split())
    return count, "" if count else "the driver finds none"


def fitting(sizes: Sequence[int], available: int) -> tuple[list[int], list[Absent]]:
    """Of the sizes those that memory suffices for, and the others with the reason; all sources are there at once."""
    fit: list[int] = []
    left: list[Absent] = []
    for size in sorted(sizes):
        need = sum(fit) + (1 + _COPIES) * size + _SPARE
        if need <= available:
            fit.append(size)
        else:
            left.append(
                Absent(
                    f"requests of {size / 1e6:.0f} MB",
                    f"they need about {approximate_size(need)} of memory, {approximate_size(available)} are available",
                )
            )
    return fit, left


def left_out(source: Source) -> list[Absent]:
    """Sizes that a benchmark itself had too little memory for."""
    found = getattr(source.data, "left_out", [])
    return [Absent(f"{source.benchmark}, {one.asked / 1e6:.0f} MB", one.reason) for one in found]


def steps(machine: Machine, sizes: Sequence[int], *, quick: bool, seed: int) -> list[Step]:
    """What is measured, in order."""
    runs = QUICK_RUNS if quick else RUNS
    found = []
    if sizes:
        found.append(
            Step(
                "between",
                "the four configurations, by size",
                lambda: between.run(machine.devices, sizes, runs).to_dict(),
            )
        )
    found += [
        Step(
            "transfer",
            "whole jobs over tcp and shm",
            lambda: transfer.run(
                sizes=TRANSFER_SIZES[:1] if quick else TRANSFER_SIZES, runs=1 if quick else RUNS
            ).to_dict(),
        ),
        Step("retile", "conversion between layouts, on one core", lambda: _retile(quick)),
        Step(
            "fragmentation",
            "receive buffers in one channel or in all",
            lambda: fragmentation.run(seed=seed).to_dict(),
        ),
    ]
    if machine.gpu:
        found.append(Step("gpu", "whole jobs from a GPU", lambda: _gpu(quick)))
        found.append(Step("retile_cuda", "conversion between layouts, on a GPU", lambda: _retile_cuda(quick)))
    return found


def _retile(quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in PAIRS:
        one = retile.run(pair=pair, quick=quick).to_dict()
        # A pattern is found in longer names, too.
        rows = [row for row in one["rows"] if row["pair"] == pair]  # type: ignore[attr-defined]
        found = one | {"rows": [*found.get("rows", []), *rows]}
    return found


def _gpu(quick: bool) -> dict[str, Any]:
    from hawk.bench import gpu

    return gpu.run(quick=quick).to_dict()


def _retile_cuda(quick: bool) -> dict[str, Any]:
    from hawk.bench import retile_cuda

    return retile_cuda.run("cuda:0", quick=quick).to_dict()


def measure(
    planned: Sequence[Step], folder: Path, told: Callable[[str], None] = lambda _: None
) -> Iterator[Source | Absent]:
    """Runs each step, writes its file into `folder`, and yields what the file says, read as any other would be.

    A benchmark that cannot run here is yielded as absent, with its error.  Raises what is a fault of HAWK's own,
    such as `InternalError` for a wrong byte, and `OSError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for step in planned:
        told(step.about)
        try:
            figures = step.run()
        except InternalError:
            raise
        except HawkError as error:
            yield Absent(step.about, " ".join(str(error).split()))
            continue
        path = folder / f"{step.benchmark}.json"
        whole(path, json.dumps(stamped(step.benchmark, figures), indent=2) + "\n")
        yield read(path, Origin.HERE, f"{folder.name}/{path.name}")
