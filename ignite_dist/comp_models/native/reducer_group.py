"""The process group in which ``DistributedDataParallel`` averages gradients over shared memory."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ignite_dist.comp_models.work import Work
from ignite_dist.internals import _torch

_GROUP = "_ignite_dist_reducer_group"  # attribute of a DistributedDataParallel


class ReducerGroup(ProcessGroup):
    """Adds gradients, and broadcasts, over shared memory. All other collectives go through ``handle``.

    DDP's reducer calls these methods from C++: :meth:`allreduce` in the backward pass, :meth:`broadcast` in
    the forward pass. The reducer divides by the number of ranks itself, as in ``uneven_inputs()``.

    An error in :meth:`allreduce` is raised at the end of the backward pass, because the reducer could not be
    used again otherwise. After an error of the collective this rank sends these ranks no more buckets of the
    pass, also of other models: they have left the pass, or leave it when they get this rank's next call.

    Args:
        handle: the process group with the same ranks.
        in_memory: the collectives of these ranks over shared memory.
    """

    def __init__(self, handle: ProcessGroup, in_memory: ReducerCollectives) -> None:
        super().__init__(handle.rank(), handle.size())  # type: ignore[call-arg]
        self._handle = handle
        self._in_memory = in_memory

    def carry_gradients_of(self, wrapper: DistributedDataParallel) -> None:
        """Let ``wrapper``, whose process group has the same ranks, average its gradients in this group."""
        vars(wrapper)[_GROUP] = self  # the reducer does not keep the Python object alive
        _torch.reduce_gradients_in(wrapper, self)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the wrapped model has another reducer, which uses its process group

    def getBackendName(self) -> str:  # noqa: D102
        return self._handle.name()

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]  # noqa: D102
        work = None
        try:
            if self._in_memory.has_left(_torch.number_of_backward_pass()):
                return _Completed(tensors)
            if _is_of_gradients(tensors, options):
                work = self._in_memory.sum_gradients(tensors[0])
            elif tensors[0].layout == torch.sparse_coo:
                self._in_memory.compare_sparse(tensors[0])
            if work is None:
                return self._handle.allreduce(tensors, options)
            work.wait()
        except BaseException as error:
            if isinstance(error, RuntimeError) or not (work and self._in_memory.was_summed(tensors[0])):
                self._in_memory.leave_pass(_torch.number_of_backward_pass())
            _raise_after_pass(error)
        return _Completed(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]  # noqa: D102
        work = self._in_memory.broadcast(tensors[0], options.rootRank)
        if work is None:
            return self._handle.broadcast(tensors, options)
        try:
            work.wait()
        except BaseException:
            self._in_memory.leave_forward_pass()
            raise
        return _Completed(tensors)


def miss_pass(wrapper: DistributedDataParallel) -> None:
    """Let the other ranks raise in the pass of ``wrapper`` that this rank cannot make. Does not wait.

    Does nothing if the ranks share no memory: the others wait for their timeout.
    """
    group = vars(wrapper).get(_GROUP)
    if isinstance(group, ReducerGroup):
        group._in_memory.miss_pass()


class ReducerCollectives(Protocol):
    """Collectives over shared memory. They return None if the ranks share none any more.

    The ranks compare which model a collective is for, except in ``uneven_inputs()``.
    """

    def leave_pass(self, number: int) -> None:
        """Note that this rank sends no more gradients in the backward pass ``number``; -1 is no pass."""

    def leave_forward_pass(self) -> None:
        """Note that the next broadcast of this rank is in another forward pass."""

    def has_left(self, number: int) -> bool:
        """True if this rank has left the pass, for whichever model of the process group."""

    def miss_pass(self) -> None:
        """Tell the other ranks, in place of the next collective, that this rank cannot make the pass."""

    def sum_gradients(self, tensor: Tensor) -> Work | None:
        """Add ``tensor`` over all ranks, in place, when the result is waited for."""

    def compare_sparse(self, tensor: Tensor) -> None:
        """Raise unless all ranks come to the sparse gradients ``tensor``, which are added elsewhere."""

    def was_summed(self, tensor: Tensor) -> bool:
        """True if the other ranks get the sum of ``tensor``, whose :meth:`sum_gradients` was interrupted."""

    def broadcast(self, tensor: Tensor, root: int) -> Work | None:
        """Fill ``tensor`` with that of the group's rank ``root``, when the result is waited for."""


def _is_of_gradients(tensors: list[Tensor], options: Any) -> bool:
    """True for a dense bucket. In ``uneven_inputs()`` torch sends ints, without the reducer on some ranks."""
    if len(tensors) > 1 or options.reduceOp != dist.ReduceOp.SUM:
        return False
    tensor = tensors[0]
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return is_number and tensor.layout == torch.strided


def _raise_after_pass(error: BaseException) -> None:
    """Raise ``error`` at the end of the backward pass, or now outside of a pass."""
    errors = [error]
    del error  # no cycle of the error, its traceback and these frames

    def raise_now() -> None:
        raise errors.pop() from None

    try:
        # The first callback may run before the reducer's own, the second runs after it.
        _torch.run_after_backward(lambda: _torch.run_after_backward(raise_now))
    except RuntimeError:  # there is no backward pass
        raise_now()


class _Completed(dist.Work):
    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._future: Future[list[Tensor]] = Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        return self._future
