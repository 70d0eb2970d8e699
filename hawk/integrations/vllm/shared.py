"""Makes vLLM allocate its cache on the CPU in memory that an agent in another process can map."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from hawk.memory.shared import alloc

_LEAST = 1 << 20
"""Smaller tensors are none of the cache's."""


class SharedAllocation:
    """While it is entered, `torch.zeros` of a mebibyte or more on the CPU is shared memory."""

    def __init__(self) -> None:
        self._mode: Any = None

    def __enter__(self) -> Self:
        import torch
        from torch.overrides import TorchFunctionMode

        class Mode(TorchFunctionMode):  # type: ignore[misc]  # torch is not there when types are checked
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                if func is torch.zeros and len(args) == 1 and isinstance(args[0], int):
                    dtype = kwargs.get("dtype") or torch.get_default_dtype()
                    nbytes = args[0] * dtype.itemsize
                    if torch.device(kwargs.get("device") or "cpu").type == "cpu" and nbytes >= _LEAST:
                        return torch.from_numpy(alloc(nbytes, name="hawk-cache").array).view(dtype)
                return func(*args, **kwargs)

        self._mode = Mode()
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, value, trace)
