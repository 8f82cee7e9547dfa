"""The process group in which ``DistributedDataParallel`` averages gradients over shared memory."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ignite_dist.comp_models.transport import Group
from ignite_dist.comp_models.work import Work
from ignite_dist.internals import _torch
from ignite_dist.values.gradients import raise_after_backward

_GROUP = "_ignite_dist_reducer_group"  # attribute of a DistributedDataParallel: its ReducerGroup


class ReducerGroup(ProcessGroup):
    """Adds gradients, and broadcasts, over shared memory. All other collectives go through ``handle``.

    DDP's reducer calls these methods from C++: :meth:`allreduce` in the backward pass, :meth:`broadcast` in
    the forward pass. The reducer divides by the number of ranks itself, as in ``uneven_inputs()``.

    An error in :meth:`allreduce` is raised at the end of the backward pass, because the reducer could not be
    used again otherwise. After an error of the collective this rank sends no more buckets of the pass: the
    other ranks have left the pass, or leave it when they get this rank's next call.

    Args:
        handle: the process group with the same ranks.
        in_memory: the collectives of these ranks over shared memory.
    """

    def __init__(self, handle: ProcessGroup, in_memory: ReducerCollectives) -> None:
        super().__init__(handle.rank(), handle.size())  # type: ignore[call-arg]
        self._handle = handle
        self._in_memory = in_memory
        self._left_pass = -1  # number of the pass in which this rank sends nothing more

    def carry_gradients_of(self, wrapper: DistributedDataParallel) -> None:
        """Let ``wrapper``, whose process group has the same ranks, average its gradients in this group."""
        vars(wrapper)[_GROUP] = self  # the reducer does not keep the Python object alive
        self._make_buckets(wrapper)

    def _make_buckets(self, wrapper: DistributedDataParallel) -> None:
        """Begin with new buckets, in the order of the parameters.

        torch makes them in the order of the first gradients, on which the ranks have to agree, to overlap
        their collectives with the backward pass. Over shared memory nothing overlaps. So a rank may make its
        buckets without the others, also after a pass that has failed.
        """
        _torch.make_buckets(wrapper, _Alone(self.rank(), self.size()))  # type: ignore[call-arg]
        _torch.reduce_gradients_in(wrapper, self)

    def leave_failed_pass(self, wrapper: DistributedDataParallel) -> None:
        """Make ``wrapper`` usable again after a backward pass of this rank has failed.

        The other ranks get an error in place of the rest of the pass.
        """
        self._in_memory.leave_pass(None)
        self._make_buckets(wrapper)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the wrapped model has another reducer, which uses its process group

    def getBackendName(self) -> str:  # noqa: D102
        return self._handle.name()

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]  # noqa: D102
        call = None
        try:
            if _torch.number_of_backward_pass() == self._left_pass >= 0:
                return _Completed(tensors)
            if not _is_of_gradients(tensors, options):
                return self._handle.allreduce(tensors, options)
            call = self._in_memory.new_sum(tensors[0])
            work = self._in_memory.add(tensors[0], call)
            if work is None:
                return self._handle.allreduce(tensors, options)
            work.wait()
            return _Completed(tensors)
        except BaseException as error:
            number = _torch.number_of_backward_pass()
            was_sent = call is not None and self._in_memory.was_sent(tensors[0], call)
            if number != self._left_pass and not (was_sent and not isinstance(error, RuntimeError)):
                self._left_pass = number
                self._in_memory.leave_pass(call)
            raise_after_backward(error)
        return _Completed(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]  # noqa: D102
        work = self._in_memory.broadcast(tensors[0], options.rootRank)
        if work is None:
            return self._handle.broadcast(tensors, options)
        work.wait()
        return _Completed(tensors)


class ReducerCollectives(Protocol):
    """Collectives over shared memory. They return None if the ranks share none any more."""

    def new_sum(self, tensor: Tensor) -> Group:
        """The group, in a new call that adds ``tensor``."""

    def add(self, tensor: Tensor, call: Group) -> Work | None:
        """Add ``tensor`` over all ranks, in place, when the result is waited for."""

    def was_sent(self, tensor: Tensor, call: Group) -> bool:
        """True if the other ranks get all of ``tensor`` in the latest call, which was interrupted."""

    def leave_pass(self, call: Group | None) -> None:
        """Tell the other ranks that this rank has left a backward pass, in ``call`` or between calls.

        Does not wait. They know it already if the call has begun.
        """

    def broadcast(self, tensor: Tensor, root: int) -> Work | None:
        """Fill ``tensor`` with that of the group's rank ``root``, when the result is waited for."""


def leave_failed_pass(wrapper: DistributedDataParallel) -> None:
    """See :meth:`ReducerGroup.leave_failed_pass`. Other wrappers stay as torch leaves them."""
    group = vars(wrapper).get(_GROUP)
    if isinstance(group, ReducerGroup):
        group.leave_failed_pass(wrapper)


def _is_of_gradients(tensors: list[Tensor], options: Any) -> bool:
    """True for a dense bucket. In ``uneven_inputs()`` torch sends ints, without the reducer on some ranks."""
    if len(tensors) > 1 or options.reduceOp != dist.ReduceOp.SUM:
        return False
    tensor = tensors[0]
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return is_number and tensor.layout == torch.strided


class _Alone(ProcessGroup):
    """The group in which a reducer makes its buckets, which are the same on every rank."""

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]
        return _Completed(tensors)


class _Completed(dist.Work):
    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._future: Future[list[Tensor]] = Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        return self._future
