"""The transport of gloo contexts: over shared memory in the groups whose ranks are on one machine."""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ignite_dist.comp_models.native import gloo
from ignite_dist.comp_models.native.one_machine import NativeOnOneMachine
from ignite_dist.comp_models.native.reducer_group import ReducerGroup
from ignite_dist.comp_models.shared_memory.collectives import SharedMemory
from ignite_dist.comp_models.transport import Group
from ignite_dist.comp_models.work import Steps, Work
from ignite_dist.internals import _torch
from ignite_dist.values.calls import Call, call_of, own_token


class GlooTransport(NativeOnOneMachine):
    """Carries the gradients of DDP over shared memory, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._models: weakref.WeakKeyDictionary[SharedMemory, _Models] = weakref.WeakKeyDictionary()

    def reduce_exactly(self, tensor: Tensor, op: str, group: Group) -> Work:
        work = super().reduce_exactly(tensor, op, group)
        # gloo needs several collectives for a large tensor, which start() cannot begin.
        return work if gloo.fits_one_round(tensor.nbytes, len(group.ranks)) else Steps(work.wait)

    def reducer_group(self, group: Group, wrapper: DistributedDataParallel) -> ReducerGroup | None:
        memory = None if self.shares_memory(group) is False else self.memory_of(group)
        if memory is None:
            return None
        models = self._models.setdefault(memory, _Models())
        return ReducerGroup(self.handle_of(group), _ReducerCollectives(self, group, models, wrapper))


class _Models:
    """The models whose gradients the ranks of a process group average.

    Attributes:
        numbers: of the models, the same on all ranks.
        left_passes: numbers of the backward passes in which this rank sends no more gradients. Threads may be
            in several passes.
    """

    def __init__(self) -> None:
        self.numbers = count(1)
        self.left_passes: set[int] = set()


class _ReducerCollectives:
    """See :class:`~ignite_dist.comp_models.native.reducer_group.ReducerCollectives`.

    Args:
        transport: of the context.
        group: the ranks.
        models: of the process group.
        wrapper: the next one of them.
    """

    def __init__(
        self, transport: GlooTransport, group: Group, models: _Models, wrapper: DistributedDataParallel
    ) -> None:
        self._transport, self._group, self._models = transport, group, models
        self._model, self._wrapper = f"model {next(models.numbers)}", weakref.ref(wrapper)
        self._token = own_token()  # of all broadcasts of a forward pass, which are one call

    def leave_pass(self, number: int) -> None:
        self._models.left_passes.add(number)

    def leave_forward_pass(self) -> None:
        self._token = own_token()

    def has_left(self, number: int) -> bool:
        return number >= 0 and number in self._models.left_passes

    def miss_pass(self) -> None:
        call = Call(f"the last backward pass of {self._model} failed")
        self._transport.count_interrupted(self._group.in_call(call))

    def sum_gradients(self, tensor: Tensor) -> Work | None:
        group = self._in_call("gradients", tensor)
        return None if group is None else self._transport.all_reduce(tensor, "SUM", group)

    def compare_sparse(self, tensor: Tensor) -> None:
        group = self._in_call("sparse gradients", tensor)
        if group is not None:
            self._transport.barrier(group).wait()

    def was_summed(self, tensor: Tensor) -> bool:
        memory = self._transport.memory_of(self._group)
        return memory is not None and memory.was_summed(tensor)

    def broadcast(self, tensor: Tensor, root: int) -> Work | None:
        group = self._in_call("DDP's broadcast", tensor, self._token)
        return None if group is None else self._transport.broadcast(tensor, self._group.ranks[root], group)

    def _in_call(self, name: str, tensor: Tensor, token: int = 0) -> Group | None:
        """The group in a call that the ranks compare; None if they share no memory any more."""
        if not self._transport.shares_memory(self._group):
            return None
        wrapper, model = self._wrapper(), self._model
        if wrapper is not None and _torch.is_in_join(wrapper):
            model = "a model"  # a rank without data sends zeros in another order than a backward pass
        return self._group.in_call(call_of(f"{name} of {model}", "", tensor), token)
