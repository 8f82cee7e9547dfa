"""The process group in which ``DistributedDataParallel`` averages gradients over shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from ignite_dist.comp_models.work import Work
from ignite_dist.internals import _torch


class ReducerGroup(ProcessGroup):
    """Adds gradients over shared memory. All other collectives go through ``handle``.

    DDP's reducer calls these methods from C++, in the backward pass. The reducer divides by the number of
    ranks itself, as in ``uneven_inputs()``.

    Args:
        handle: the process group with the same ranks.
        sum_in_memory: adds a tensor over all ranks, in place, when the result is waited for. Returns None if
            the ranks share no memory any more.
    """

    def __init__(self, handle: ProcessGroup, sum_in_memory: Callable[[Tensor], Work | None]) -> None:
        super().__init__(handle.rank(), handle.size())  # type: ignore[call-arg]
        self._handle = handle
        self._sum_in_memory = sum_in_memory

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the wrapped model has another reducer, which uses its process group

    def getBackendName(self) -> str:  # noqa: D102
        return self._handle.name()

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]  # noqa: D102
        work = self._sum_in_memory(tensors[0]) if _is_of_gradients(tensors, options) else None
        if work is None:
            return self._handle.allreduce(tensors, options)
        try:
            work.wait()
        except KeyboardInterrupt as interrupt:
            _raise_after_pass(interrupt)
        return _Completed(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]  # noqa: D102
        return self._handle.broadcast(tensors, options)


def _is_of_gradients(tensors: list[Tensor], options: Any) -> bool:
    """True for a dense bucket. In ``uneven_inputs()`` torch sends ints, without the reducer on some ranks."""
    if len(tensors) > 1 or options.reduceOp != dist.ReduceOp.SUM:
        return False
    tensor = tensors[0]
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return is_number and tensor.layout == torch.strided


def _raise_after_pass(interrupt: KeyboardInterrupt) -> None:
    """Raise ``interrupt`` at the end of the backward pass. Before, DDP's reducer could not be used again."""

    def raise_now() -> None:
        raise interrupt

    try:
        # The first callback may run before the reducer's own, the second runs after it.
        _torch.run_after_backward(lambda: _torch.run_after_backward(raise_now))
    except RuntimeError:  # there is no backward pass
        raise interrupt from None


class _Completed(dist.Work):
    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._future: Future[list[Tensor]] = Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        return self._future
