"""Programs of one's own in the stand-in for ttnn: descriptors as ttnn 0.81 takes them, run over its arrays of banks.

HAWK's kernel is run in two ways: `interpreted`, which reads the same arguments and table in the same order, and
`compiled`, the kernel itself, built by the host's compiler against `tests/kernels`.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests import fake_ttnn
from tests.fake_ttnn import FIRST, Mesh, Tensor

ROOT = Path(__file__).resolve().parents[1]
KERNEL = ROOT / "hawk" / "integrations" / "ttnn" / "move.cpp"
COMPILER = shutil.which("g++") or shutil.which("clang++")
MOST_ARGUMENTS = 341
L1_BYTES = 1461120

Run = Callable[[Mesh, int, list[int], list[int], int], None]
"""Mesh, chip, runtime arguments, arguments at compile time, bytes of the circular buffer."""


@dataclass(frozen=True)
class CoreCoord:
    x: int
    y: int


class CoreRange(SimpleNamespace):
    def __init__(self, start: CoreCoord, end: CoreCoord) -> None:
        super().__init__(start=start, end=end)


class CoreRangeSet(SimpleNamespace):
    def __init__(self, ranges: list[CoreRange]) -> None:
        super().__init__(cores=[(r.start.x, r.start.y) for r in ranges])
        assert all((r.start.x, r.start.y) == (r.end.x, r.end.y) for r in ranges)
        assert len(set(self.cores)) == len(self.cores), "a core twice"


class RuntimeArgs(dict[int, dict[int, list[int]]]):
    def __missing__(self, x: int) -> dict[int, list[int]]:
        self[x] = {}
        return self[x]


class KernelDescriptor(SimpleNamespace):
    SourceType = SimpleNamespace(SOURCE_CODE="text", FILE_PATH="path")


@dataclass
class MeshProgramDescriptor:
    programs: list[tuple[Any, Any]] = field(default_factory=list)

    def __setitem__(self, where: Any, program: Any) -> None:
        self.programs.append((where, program))


def interpreted(mesh: Mesh, chip: int, arguments: list[int], compile_time: list[int], room: int) -> None:
    """What the kernel does, by its arguments and its table."""
    bank, table, count = arguments
    piece, slots, align = compile_time
    assert room >= align + 2 * slots * (16 + piece + align)
    if not count:
        return
    assert table % 64 == 0
    moves = mesh.view(chip, bank, table, count * 16).view(np.uint32).reshape(-1, 4).tolist()
    for source, target, nbytes, _ in moves:
        assert 0 < nbytes <= piece
        mesh.view(chip, bank, target, nbytes)[:] = mesh.view(chip, bank, source, nbytes).copy()


@lru_cache(maxsize=8)
def library(compile_time: tuple[int, ...], text: str = "") -> Any:
    """The kernel for the host, with these arguments at compile time; or another text in its place."""
    with TemporaryDirectory(prefix="hawk-kernel-") as folder:
        source, made = Path(folder, "move.cpp"), Path(folder, "move.so")
        source.write_text(text or KERNEL.read_text())
        command = [str(COMPILER), "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        command += [
            f"-DCOMPILE_TIME_ARGS={','.join(map(str, compile_time))}",
            f"-I{ROOT / 'tests' / 'kernels'}",
        ]
        done = subprocess.run([*command, "-o", made, source], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        loaded = ctypes.CDLL(str(made))
    loaded.run.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
    loaded.run.argtypes += [ctypes.c_void_p, ctypes.c_uint32]
    return loaded


def compiled(
    mesh: Mesh, chip: int, arguments: list[int], compile_time: list[int], room: int, text: str = ""
) -> None:
    """The kernel itself."""
    words = np.asarray(arguments, np.uint32)
    memory = mesh.memory[chip]
    assert memory.flags.c_contiguous
    wrong = library(tuple(compile_time), text).run(
        memory.ctypes.data, mesh.banks, mesh.bank_bytes, FIRST, words.ctypes.data, room
    )
    assert wrong == 0, f"the kernel did what a chip leaves undefined: {wrong}"


class Programs:
    """What a library can do besides: `generic_op` and all that goes with it.

    run       how a kernel is run on one core
    seen      programs that were launched
    failing   raised instead of running one
    """

    def __init__(self, run: Run = interpreted) -> None:
        self.run = run
        self.seen: list[Any] = []
        self.failing: Exception | None = None

    def generic_op(self, tensors: list[Tensor], program: MeshProgramDescriptor) -> Tensor:
        """On the queue, like everything else."""
        if self.failing is not None:
            raise self.failing
        assert len(tensors) >= 2
        self.seen.append(program)
        mesh = tensors[0].device()
        for (start, end), one in program.programs:
            assert start == end
            assert not one.semaphores
            (buffer,), (kernel,) = one.cbs, one.kernels
            (shape,) = buffer.format_descriptors
            assert shape.page_size == buffer.total_size <= L1_BYTES
            assert kernel.source_type == "text"
            assert kernel.kernel_source == KERNEL.read_text()
            arguments = [((x, y), a) for x, line in kernel.runtime_args.items() for y, a in line.items()]
            cores = kernel.core_ranges.cores
            assert sorted(core for core, _ in arguments) == sorted(cores) == sorted(buffer.core_ranges.cores)
            assert all(0 <= x < mesh.grid.x and 0 <= y < mesh.grid.y for x, y in cores)
            assert all(len(a) <= MOST_ARGUMENTS and all(0 <= n < 1 << 32 for n in a) for _, a in arguments)
            for _, a in arguments:
                mesh.queue.append(
                    lambda a=list(a), k=kernel, chip=start[1], room=buffer.total_size: self.run(
                        mesh, chip, a, k.compile_time_args, room
                    )
                )
        return tensors[-1]

    def install(self, monkeypatch: Any) -> ModuleType:
        """`import ttnn` gives a library with this until the test ends."""
        made = fake_ttnn.install(monkeypatch)
        parts: dict[str, Any] = {
            "CoreCoord": CoreCoord,
            "CoreRange": CoreRange,
            "CoreRangeSet": CoreRangeSet,
            "RuntimeArgs": RuntimeArgs,
            "KernelDescriptor": KernelDescriptor,
            "CBDescriptor": SimpleNamespace,
            "CBFormatDescriptor": SimpleNamespace,
            "DataMovementConfigDescriptor": SimpleNamespace,
            "DataMovementProcessor": SimpleNamespace(RISCV_0=0, RISCV_1=1),
            "NOC": SimpleNamespace(NOC_0=0, NOC_1=1, RISCV_0_default=0, RISCV_1_default=1),
            "MeshCoordinateRange": lambda start, end: (start, end),
            "MeshProgramDescriptor": MeshProgramDescriptor,
            "ProgramDescriptor": SimpleNamespace,
            "from_device": fake_ttnn.from_device,
            "generic_op": self.generic_op,
            "replicate_tensor_to_mesh_mapper": lambda mesh: (len(mesh.memory), None),
        }
        for name, value in parts.items():
            setattr(made, name, value)
        return made
