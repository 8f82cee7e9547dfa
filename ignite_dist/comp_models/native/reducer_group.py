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


class ReducerGroup(ProcessGroup):
    """Adds dense tensors over shared memory. All other collectives go through ``handle``.

    DDP's reducer calls these methods from C++, in the backward pass. The reducer divides by the number of
    ranks itself, so ``join()``, and communication hooks of the user, work as without this group.

    Args:
        handle: the process group with the same ranks.
        all_reduce: begins to add a tensor of each rank in place, over shared memory.
    """

    def __init__(self, handle: ProcessGroup, all_reduce: Callable[[Tensor], Work]) -> None:
        super().__init__(handle.rank(), handle.size())  # type: ignore[call-arg]
        self._handle = handle
        self._all_reduce = all_reduce

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the wrapped model has another reducer, which uses its process group

    def getBackendName(self) -> str:  # noqa: D102
        return self._handle.name()

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]  # noqa: D102
        is_sum = options.reduceOp == dist.ReduceOp.SUM
        if not is_sum or len(tensors) > 1 or tensors[0].layout != torch.strided:
            return self._handle.allreduce(tensors, options)
        self._all_reduce(tensors[0]).wait()
        return _Completed(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]  # noqa: D102
        return self._handle.broadcast(tensors, options)


class _Completed(dist.Work):
    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._future: Future[list[Tensor]] = Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        return self._future
