"""The computing that a transfer runs beside: the layers of a model of 8 billion weights, on a GPU, by torch.

Sizes are those of Llama 3.1 8B: 4096 wide, 14336 inside, 32 heads over 8 of keys and values, 128 elements each.  The
numbers are random and the cache is not written: what is measured is how long it takes.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.errors import MissingDependency
from hawk.jobs.chunks import cut, tapered
from hawk.memory.cuda import Pinned, device
from hawk.memory.cuda_held import Held
from hawk.plan.repeat import SourcePlans, TargetPlans
from hawk.plan.types import Placement, Selection
from hawk.retile.cuda.bases import Span
from hawk.retile.cuda.launch import CudaRetiler

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from hawk.cache import KVCache
    from hawk.demo.scenario import Scenario

WIDTH, INSIDE, HEADS, KV_HEADS, DIM = 4096, 14336, 32, 8, 128

_SETS = 2
"""Layers whose weights there are; more than the second-level cache holds, so that two do for all."""


class Prefill:
    """`layers` layers for `tokens` tokens.

    stream     where it computes, of a higher priority than retiling has
    events     one for each layer, recorded behind it in every run; other processes can open them
    ended      when the last run was seen to have come to its end, by `time.perf_counter`

    Raises `MissingDependency` without torch or a GPU.
    """

    def __init__(self, gpu: int, tokens: int, layers: int) -> None:
        try:
            self._torch: Any = import_module("torch")
        except ImportError as error:
            raise MissingDependency("a prefill is computed by torch", field="torch", got=error) from error
        torch = self._torch
        if not torch.cuda.is_available():
            raise MissingDependency("torch finds no GPU", field="device", got=f"cuda:{gpu}")
        self.layers, self._tokens = layers, tokens
        self._device = torch.device("cuda", gpu)
        torch.cuda.set_device(self._device)
        shapes = (
            (WIDTH, (HEADS + 2 * KV_HEADS) * DIM),
            (HEADS * DIM, WIDTH),
            (WIDTH, 2 * INSIDE),
            (INSIDE, WIDTH),
        )
        self._weights = [[self._numbers(*shape) * 0.02 for shape in shapes] for _ in range(_SETS)]
        self._input, self._norm = self._numbers(tokens, WIDTH), self._numbers(WIDTH)
        self.stream = torch.cuda.Stream(priority=-1)
        self.events = [torch.cuda.Event(interprocess=True) for _ in range(layers)]
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._graphs = self._captured()
        self.ended = 0.0

    def _numbers(self, *shape: int) -> Any:
        return self._torch.randn(*shape, device=self._device, dtype=self._torch.bfloat16)

    def _captured(self) -> list[Any]:
        torch = self._torch
        with torch.no_grad(), torch.cuda.stream(self.stream):
            for number in range(3):  # libraries make their handles and choose their kernels
                self._layer(number)
            self.stream.synchronize()
            found = []
            for number in range(_SETS):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=self.stream):
                    self._layer(number)
                found.append(graph)
        torch.cuda.synchronize()
        return found

    def _layer(self, number: int) -> Any:
        function, tokens = self._torch.nn.functional, self._tokens
        into, out, up, down = self._weights[number % _SETS]
        hidden = function.rms_norm(self._input, (WIDTH,), self._norm)
        parts = (hidden @ into).split((HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), 1)
        q, k, v = (part.reshape(1, tokens, -1, DIM).transpose(1, 2) for part in parts)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        seen = function.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = seen.transpose(1, 2).reshape(tokens, -1) @ out + self._input
        gate, value = (function.rms_norm(hidden, (WIDTH,), self._norm) @ up).chunk(2, 1)
        return (function.silu(gate) * value) @ down + hidden

    def launch(self, *, graph: bool, told: Callable[[int], None] | None = None) -> float:
        """Puts a run onto the stream from this thread, and returns how many seconds that took.

        graph    a layer is one launch of a CUDA graph, else a dozen and more of kernels
        told     called with the number of layers whose work and events are on the stream
        """
        torch, began = self._torch, time.perf_counter()
        torch.cuda.set_device(self._device)
        with torch.no_grad(), torch.cuda.stream(self.stream):
            self._begin.record()
            for number in range(self.layers):
                if graph:
                    self._graphs[number % _SETS].replay()
                else:
                    self._layer(number)
                self.events[number].record()
                if told is not None:
                    told(number + 1)
            self._end.record()
        return time.perf_counter() - began

    def wait(self) -> float:
        """Waits until the run that was launched is over; its seconds on the GPU."""
        self._end.synchronize()
        self.ended = time.perf_counter()
        return float(self._begin.elapsed_time(self._end)) * 1e-3

    def settle(self) -> float:
        """Waits for everything on the GPU; seconds since the prefill's end."""
        self._torch.cuda.synchronize()
        return time.perf_counter() - self.ended


class Chunks:
    """The chunks of a request without jobs: kernels prepared, two rooms on the GPU, locked memory of the host."""

    def __init__(
        self, cupy: Any, gpu: int, scene: Scenario, most: int, there: KVCache, prefill: Prefill
    ) -> None:
        self._device, self._prefill = device(gpu), prefill
        source, target = scene.source.compile(), scene.target.compile()
        chosen = Selection(layer=0, layers=source.shape.layers, token=0, tokens=scene.tokens)
        cuts = tapered(cut(target, chosen, most, "chunk"))
        numbers = np.arange(source.buffer_count, dtype=np.int32).reshape(-1, 1)
        placement = Placement(numbers, np.zeros(numbers.shape, np.int64))
        into = TargetPlans(target, scene.target_blocks(), chosen)
        out = SourcePlans(source, scene.source_blocks(), placement, target, scene.target_blocks())
        planned = [into.plan(one) for one in cuts]
        self._nbytes = [one.nbytes for one in planned]
        self._last = [one.layer + one.layers for one in cuts]
        self._rooms = [cupy.zeros(max(self._nbytes), cupy.uint8) for _ in range(2)]
        self._host = np.ones(max(self._nbytes), np.uint8)
        self._pinned = Pinned(self._device, self._host.ctypes.data, self._host.nbytes)
        kernels, spans = CudaRetiler(gpu), [Span(b.address, b.nbytes) for b in there.gpu_buffers]
        self._prepared = [
            kernels.prepare(out.plan(one), spans, Span(self._rooms[i % 2].data.ptr, one.nbytes), 0)
            for i, one in enumerate(planned)
        ]
        cupy.cuda.Device(gpu).synchronize()
        self._held = Held(self._device)
        self.streams: list[int] = []

    def __enter__(self) -> Chunks:
        with self._device.current():
            try:
                self.streams = [self._held.stream(low=True) for _ in self._rooms]
            except BaseException:
                self._held.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pinned.close()
        self._held.close()

    def put(self, layers: int, kernels: bool, copies: bool) -> None:
        """Puts the chunks that end with this layer behind its event, each onto the stream of its room."""
        event = int(self._prefill.events[layers - 1].cuda_event)
        with self._device.current() as driver:
            for number, last in enumerate(self._last):
                if last != layers:
                    continue
                stream = self.streams[number % 2]
                driver.wait(stream, event)
                if kernels:
                    self._prepared[number].launch(stream)
                if copies:
                    room = self._rooms[number % 2].data.ptr
                    driver.to_host(self._host.ctypes.data, room, self._nbytes[number], stream)
