"""Averages the gradients of a model whose parameters are sharded over other ranks than its replicas.

``DistributedDataParallel`` keeps gradients in buckets of plain memory, which a ``DTensor`` does not have.
So gradients of a tensor-parallel model are averaged at the end of each backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import Module, Parameter

from ignite_dist.comp_models.transport import Group
from ignite_dist.values.gradients import AfterBackward

_REPLICA = "_ignite_dist_replica"  # attribute of the module: its _Replica

Average = Callable[[list[Parameter], Group], None]


class _Replica:
    """One of the replicas of a model, which have equal parameters.

    Attributes:
        group: the ranks with a replica of this rank's shards.
        is_local: True while backward passes average nothing.
    """

    def __init__(self, module: Module, group: Group, average: Average) -> None:
        self.group = group
        self.is_local = False
        self._module = weakref.ref(module)
        self._average = average
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.passes = AfterBackward(trained, self._after_backward)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the module is not a replica

    def average(self) -> None:
        """Average the gradients of all parameters. Every rank of the group calls this."""
        module = self._module()
        if module is not None:
            self._average([one for one in module.parameters() if one.requires_grad], self.group)

    def _after_backward(self) -> None:
        if not self.is_local:
            self.average()


def replicate(module: Module, group: Group, average: Average) -> None:
    """Average the gradients of ``module`` over ``group`` in each backward pass from now on."""
    former = vars(module).pop(_REPLICA, None)
    if former is not None:
        former.passes.remove()
    if len(group.ranks) > 1:
        setattr(module, _REPLICA, _Replica(module, group, average))


def groups_of(model: Module) -> list[Group]:
    """The groups of all replicas in ``model``."""
    return [replica.group for replica in _replicas_in(model)]


def _replicas_in(model: Module) -> list[_Replica]:
    found = [vars(module).get(_REPLICA) for module in model.modules()]
    return [replica for replica in found if replica is not None]


@contextmanager
def local_in_block(model: Module) -> Iterator[list[_Replica]]:
    """Backward passes in the block average nothing. Yields the replicas that averaged before the block."""
    replicas = [replica for replica in _replicas_in(model) if not replica.is_local]
    with ExitStack() as stack:
        for replica in replicas:
            replica.is_local = True
            stack.callback(setattr, replica, "is_local", False)
        yield replicas


@contextmanager
def average_after_block(model: Module) -> Iterator[None]:
    """Gradients are averaged once, after the block, also if this rank has made no backward pass."""
    with local_in_block(model) as replicas:
        yield
    if torch.is_grad_enabled():
        for replica in replicas:
            replica.average()
