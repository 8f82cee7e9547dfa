"""The process group in which ``DistributedDataParallel`` averages gradients over shared memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future

from ignite_dist.comp_models.work import Work
from ignite_dist.internals import _torch
from ignite_dist.internals._python import enters_try_before_signals


class ReducerGroup(ProcessGroup):
    """Adds gradients, and broadcasts, over shared memory. All other collectives go through ``handle``.

    DDP's reducer calls these methods from C++: :meth:`allreduce` in the backward pass, :meth:`broadcast` in
    the forward pass. The reducer divides by the number of ranks itself, as in ``uneven_inputs()``.

    An error in the backward pass is raised at its end, because the reducer could not be used again otherwise.
    All buckets of a pass are one call of the group. So a rank that leaves the pass early makes its next call
    with the others, which get a ``CollectiveMismatchError`` in the pass.

    Args:
        handle: the process group with the same ranks.
        in_memory: the same over shared memory.
        is_joining: True in ``uneven_inputs()``. Ranks without a backward pass then send each bucket alone.
    """

    def __init__(
        self, handle: ProcessGroup, in_memory: ReducerCollectives, is_joining: Callable[[], bool]
    ) -> None:
        super().__init__(handle.rank(), handle.size())  # type: ignore[call-arg]
        self._handle = handle
        self._in_memory = in_memory
        self._is_joining = is_joining
        self._pass = -1  # the number of the backward pass
        self._token = 0  # of the pass, see Group
        self._is_waiting = False  # a bucket has been sent, or the memory counts it
        self._has_left = False  # the rest of the pass is not sent

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the wrapped model has another reducer, which uses its process group

    def getBackendName(self) -> str:  # noqa: D102
        return self._handle.name()

    @enters_try_before_signals
    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]  # noqa: D102
        try:
            return self._allreduce(tensors, options)
        except BaseException as error:
            # After an interrupt the other ranks go on in the pass, unless this rank has not sent the bucket.
            self._has_left = self._has_left or not self._is_waiting or isinstance(error, RuntimeError)
            _raise_after_pass(error)
        return _Completed(tensors)

    def _allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        self._is_waiting = False
        number = _torch.number_of_backward_pass()
        if number < 0 or number != self._pass:
            self._pass, self._has_left = number, False
            self._token = 0 if number < 0 or self._is_joining() else next(_tokens)
        if self._has_left:
            return _Completed(tensors)
        if _is_of_gradients(tensors, options):
            work = self._in_memory.sum_gradients(tensors[0], self._token)
            if work is not None:
                self._is_waiting = True
                work.wait()
                return _Completed(tensors)
        return self._handle.allreduce(tensors, options)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]  # noqa: D102
        work = self._in_memory.broadcast(tensors[0], options.rootRank)
        if work is None:
            return self._handle.broadcast(tensors, options)
        work.wait()
        return _Completed(tensors)


class ReducerCollectives(Protocol):
    """Collectives over shared memory. They return None if the ranks share none any more."""

    def sum_gradients(self, tensor: Tensor, token: int) -> Work | None:
        """Add ``tensor`` over all ranks, in place, when the result is waited for."""

    def broadcast(self, tensor: Tensor, root: int) -> Work | None:
        """Fill ``tensor`` with that of the group's rank ``root``, when the result is waited for."""


_tokens = count(-1, -1)  # those of other calls are positive


def _is_of_gradients(tensors: list[Tensor], options: Any) -> bool:
    """True for a dense bucket. In ``uneven_inputs()`` torch sends ints, without the reducer on some ranks."""
    if len(tensors) > 1 or options.reduceOp != dist.ReduceOp.SUM:
        return False
    tensor = tensors[0]
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return is_number and tensor.layout == torch.strided


def _raise_after_pass(error: BaseException) -> None:
    """Raise ``error`` at the end of the backward pass, or now outside of a pass."""

    def raise_now() -> None:
        raise error

    try:
        # The first callback may run before the reducer's own, the second runs after it.
        _torch.run_after_backward(lambda: _torch.run_after_backward(raise_now))
    except RuntimeError:  # there is no backward pass
        raise error from None


class _Completed(dist.Work):
    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._future: Future[list[Tensor]] = Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        return self._future
