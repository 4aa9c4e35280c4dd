"""Counts, while it is entered, how often the host asks for values and how much memory tensors take at most."""

from __future__ import annotations

import warnings
import weakref
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = (Tensor.tolist, Tensor.numpy)
ASKING_OPERATIONS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"}


class TensorMeter:
    """Host reads and living tensors, seen operation by operation: on a CPU, where neither can be asked for.

    Counts Python's reads of values (tolist, item, bool) and operations whose result's size depends on values. Scratch
    memory inside an operation is not seen.
    """

    def __init__(self) -> None:
        self.reads = self.peak_bytes = self._living = 0
        self._known: dict[int, int] = {}
        self._entered = ExitStack()

    def __enter__(self) -> TensorMeter:
        self._entered.enter_context(_Functions(self))
        self._entered.enter_context(_Operations(self))
        return self

    def __exit__(self, *failure: object) -> None:
        self._entered.close()

    def see(self, tensor: Tensor) -> None:
        """Counts a tensor's storage as long as it lives."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self._living += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self._living)
            weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self._living -= self._known.pop(key)


class _Functions(TorchFunctionMode):
    def __init__(self, meter: TensorMeter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.meter.reads += function in READS
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, meter: TensorMeter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.meter.reads += operation.overloadpacket.__name__ in ASKING_OPERATIONS
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.meter.see(result)
        elif isinstance(result, tuple | list):
            for tensor in result:
                if isinstance(tensor, Tensor):
                    self.meter.see(tensor)
        return result


class CudaMeter:
    """Host reads as CUDA's own check for blocking calls reports them, and the allocator's peak."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0
        self._caught = warnings.catch_warnings(record=True)

    @property
    def reads(self) -> int:
        return sum("synchronizing" in str(entry.message) for entry in self._warnings)

    def __enter__(self) -> CudaMeter:
        self._warnings = self._caught.__enter__()
        warnings.simplefilter("always")
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = torch.cuda.memory_allocated(self.device)
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._before
        self._caught.__exit__(kind, error, trace)
