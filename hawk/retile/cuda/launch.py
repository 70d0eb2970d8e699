"""Generated kernels on a GPU: compiled once for each set of programs, launched on a stream.

CuPy compiles and launches.  It is imported when a `CudaRetiler` is made, not before.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.errors import InvalidArgument, MissingDependency
from hawk.extras import install
from hawk.memory.cuda_driver import load
from hawk.retile.cuda.bases import Span
from hawk.retile.cuda.lanes import Calls, Table
from hawk.retile.cuda.recipes import Recipes
from hawk.retile.cuda.shelf import Shelf
from hawk.retile.cuda.spec import THREADS
from hawk.retile.cuda.through import stages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hawk.retile.cpu import Step
    from hawk.retile.cuda.bound import Bound
    from hawk.retile.cuda.lanes import Device
    from hawk.retile.cuda.through import Between
    from hawk.retile.rows import RowsStep

OPTIONS = ("-std=c++17",)

PLAIN_SHARED = 48 << 10
"""Shared memory that a kernel may use without having asked for more."""


def span(array: Any) -> Span:
    """The memory of anything with `__cuda_array_interface__`: torch tensors, CuPy arrays, contiguous ones.

    Raises `InvalidArgument` for what has no such interface or is not contiguous.
    """
    found = getattr(array, "__cuda_array_interface__", None)
    if found is None:
        raise InvalidArgument(
            "not memory of a GPU",
            field="array",
            got=type(array).__name__,
            expected="something with __cuda_array_interface__",
        )
    width, nbytes, stride = np.dtype(found["typestr"]).itemsize, 1, 1
    strides = found.get("strides")
    for n, step in zip(
        reversed(found["shape"]), reversed(strides or (None,) * len(found["shape"])), strict=True
    ):
        if step is not None and n > 1 and step != stride * width:
            raise InvalidArgument(
                "the array has gaps", field="array", got=f"strides {strides}", expected="contiguous memory"
            )
        stride *= n
        nbytes *= n
    return Span(int(found["data"][0]), nbytes * width)


class CudaRetiler:
    """Retiles on one GPU.  Kernels are kept for as long as it lives.

    cupy    what stands in CuPy's place, for whoever compiles otherwise

    Raises
    ------
    MissingDependency
        no driver, CuPy is not installed, or it finds no GPU
    InvalidArgument
        no such device
    """

    def __init__(self, device: int = 0, cupy: Any = None) -> None:
        try:
            self._cupy: Any = import_module("cupy") if cupy is None else cupy
            count = self._cupy.cuda.runtime.getDeviceCount()
        except ImportError as error:
            load()  # without a driver CuPy would be of no use: that is said first
            raise MissingDependency(
                "retiling on a GPU needs CuPy",
                field="device",
                got=f"cuda:{device}",
                hint=f"{install('cuda')}, or the CuPy that fits the machine's CUDA",
            ) from error
        except Exception as error:
            raise MissingDependency(
                "CuPy finds no GPU", field="device", got=f"cuda:{device}", reason=error
            ) from error
        if not 0 <= device < count:
            raise InvalidArgument(
                "no such device", field="device", got=f"cuda:{device}", expected=f"cuda:0..cuda:{count - 1}"
            )
        self.device = device
        self._kernels: dict[tuple[object, ...], Any] = {}
        self._shelf: Shelf[Any] = Shelf()
        self._recipes = Recipes()
        self._tables: dict[tuple[int, int], Table] = {}

    def prepare(
        self, steps: Iterable[Step | RowsStep], regions: Sequence[Span], arena: Span, stream: Any = None
    ) -> PreparedRetile:
        """Everything that can be done before the source is complete: plan, compile, bring tables to the GPU.

        regions, arena    as for `cpu.Retiler.run_steps`, in memory that the device reaches
        stream            on which the tables are brought there, as for `PreparedRetile.launch`

        Raises `InvalidArgument` as `tables.bind` does.
        """
        rows: list[Any] = []

        def room(nbytes: int) -> Span:
            rows.append(self._cupy.empty(nbytes, np.uint8))
            return span(rows[0])

        with _on(self._cupy, self.device, stream):
            found = [stage.bound for stage in stages(steps, regions, arena, room, self._shelf)]
            launches = [(self._kernel(one), one) for one in found]
            return PreparedRetile(self._cupy, self.device, launches, rows)

    def calls(
        self,
        steps: Iterable[Step | RowsStep],
        regions: Sequence[Span],
        arena: Span,
        stream: int,
        driver: Device,
    ) -> Calls:
        """`prepare` for one launch on a stream of the caller's, as calls of the driver that it makes itself.

        Tables stay on the GPU, one for each stream: what is asked for next on a stream may be asked for when this has
        been done, or given up, and not before.  The device has to be current.

        Raises `InvalidArgument` as `tables.bind` does.
        """
        rows: list[Any] = []

        def room(nbytes: int) -> Span:
            with _on(self._cupy, self.device, stream):
                rows.append(self._cupy.empty(nbytes, np.uint8))
            return span(rows[0])

        found = Calls(rows)
        for number, stage in enumerate(stages(steps, regions, arena, room, self._shelf, self._recipes)):
            table = self._tables.setdefault((stream, number), Table())
            table.put(stage.bound, self._kernel, found, stream, driver)
        return found

    def close(self, driver: Device) -> None:
        """Gives the tables of streams back; the device has to be current."""
        tables, self._tables = list(self._tables.values()), {}
        for table in tables:
            table.close(driver)

    def _kernel(self, bound: Bound | Between) -> Any:
        if bound.key not in self._kernels:
            with self._cupy.cuda.Device(self.device):
                module = self._cupy.RawModule(code=bound.text(), options=OPTIONS)
                kernel = module.get_function("retile")
                if bound.shared_bytes > PLAIN_SHARED:
                    kernel.max_dynamic_shared_size_bytes = bound.shared_bytes
            self._kernels[bound.key] = kernel
        return self._kernels[bound.key]


class PreparedRetile:
    """Launches of some steps over memory that must not move; as many as wanted, also into a CUDA graph."""

    def __init__(
        self, cupy: Any, device: int, launches: list[tuple[Any, Bound | Between]], held: object = None
    ) -> None:
        self._cupy, self._device, self._held = cupy, device, held
        self._launches = []
        for kernel, bound in launches:
            table = cupy.asarray(bound.table)
            fields = [("table", np.uint64), ("parts", np.uint32, bound.parts.shape)]
            arguments = np.zeros((), fields)
            arguments["table"], arguments["parts"] = table.data.ptr, bound.parts
            shared = bound.shared_bytes
            self._launches.append((kernel, (bound.blocks,), (arguments,), shared, table))

    @property
    def kernels(self) -> int:
        """Kernels that a launch starts."""
        return len(self._launches)

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables on the GPU."""
        return sum(table.nbytes for *_, table in self._launches)

    def launch(self, stream: Any = None) -> None:
        """Start the kernels on `stream` (CuPy's, or the number of one), else on CuPy's current one; does not wait."""
        with _on(self._cupy, self._device, stream):
            for kernel, blocks, arguments, shared, _ in self._launches:
                kernel(blocks, (THREADS,), arguments, shared_mem=shared)


@contextmanager
def _on(cupy: Any, device: int, stream: Any) -> Iterator[None]:
    """Within the block CuPy works on that device and stream."""
    if isinstance(stream, int):
        stream = _external(cupy, device, stream)
    with cupy.cuda.Device(device), nullcontext() if stream is None else stream:
        yield


_lock = threading.Lock()


@lru_cache(maxsize=256)
def _external(cupy: Any, device: int, number: int) -> Any:
    """The stream of that number, for CuPy."""
    # The newer way, Stream.from_external, makes an object that destroys the stream when it goes (CuPy 14).
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return cupy.cuda.ExternalStream(number, device)
