"""Averages the gradients of parameters that an optimizer has, and no model of ``auto_model``.

The proxies of a metric loss or a learned temperature, for example: no wrapper averages their gradients. They
are averaged at the end of each backward pass that reaches them, like those of the models.
"""

from __future__ import annotations

import gc
import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ignite_dist.collectives.checks import is_sharded
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.context.live import current_model
from ignite_dist.coordination import exchange_outcomes
from ignite_dist.gradients import AfterBackward, parameters_of
from ignite_dist.training.exact_passes import group_of_parameters, ids_of_parameters
from ignite_dist.training.gradient_averaging import agree_on_gradients, average_gradients

_by_optimizer: weakref.WeakKeyDictionary[Optimizer, _Loose] = weakref.WeakKeyDictionary()


def average_loose(live: ComputationModel, optimizer: Optimizer) -> None:
    """Average gradients of ``optimizer`` that nothing else averages, after each backward pass from now on.

    The first time, the ranks compare the values of these parameters. All ranks make the same passes.
    """
    known = ids_of_parameters(live)
    for other in _by_optimizer.values():
        known.update(map(id, other.parameters(live)))
    loose = [
        parameter
        for parameter in parameters_of(optimizer)
        if parameter.requires_grad and id(parameter) not in known and not is_sharded(parameter)
    ]
    if loose:
        _by_optimizer[optimizer] = _Loose(live, optimizer, loose)


class _Loose:
    """The parameters of an optimizer that no model has.

    Attributes:
        is_local: True while backward passes average nothing.
    """

    def __init__(self, live: ComputationModel, optimizer: Optimizer, parameters: list[Parameter]) -> None:
        self.is_local = False
        self._live, self._optimizer = weakref.ref(live), weakref.ref(optimizer)
        ids = set(map(id, parameters))
        # Their numbers in the optimizer: a list of them would keep itself alive through their hooks.
        self._numbers = [n for n, one in enumerate(parameters_of(optimizer)) if id(one) in ids]
        self._is_checked = False
        AfterBackward(parameters, self._after_backward)

    def parameters(self, live: ComputationModel) -> list[Parameter]:
        """The parameters; none if ``live`` is another context."""
        optimizer = self._optimizer()
        if optimizer is None or live is not self._live():
            return []
        everything = list(parameters_of(optimizer))
        return [everything[number] for number in self._numbers]

    def average(self) -> None:
        """Average their gradients now. Every rank that trains the model calls this."""
        live, optimizer = current_model(), self._optimizer()
        parameters = self.parameters(live)
        if optimizer is None or not parameters:
            return
        group = group_of_parameters(live, parameters_of(optimizer))
        if not self._is_checked:
            self._is_checked = True
            known = ids_of_parameters(live) | _ids_in_wrappers()  # a model may have been adapted since
            pairs = zip(self._numbers, parameters, strict=True)
            self._numbers = [number for number, parameter in pairs if id(parameter) not in known]
            parameters = self.parameters(live)
            if parameters:
                _check_equal(live, parameters, group)
        if parameters:
            with torch.no_grad():  # backward(create_graph=True) leaves it on
                average_gradients(live, agree_on_gradients(live, parameters, group), group)

    def _after_backward(self) -> None:
        if not self.is_local:
            self.average()


@contextmanager
def local_in_block(optimizers: Sequence[Optimizer]) -> Iterator[list[_Loose]]:
    """Backward passes in the block average nothing. Yields the parameters that they averaged before."""
    found = [_by_optimizer.get(optimizer) for optimizer in optimizers]
    loose = [one for one in found if one is not None and not one.is_local]
    for one in loose:
        one.is_local = True
    try:
        yield loose
    finally:
        for one in loose:
            one.is_local = False


@contextmanager
def average_after_block(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Gradients are averaged once, after the block, also if this rank has made no backward pass."""
    with local_in_block(optimizers) as loose:
        yield
    if torch.is_grad_enabled():
        for one in loose:
            one.average()


def _ids_in_wrappers() -> set[int]:
    """The ids of the parameters in wrappers that scripts have made without ``auto_model``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds: tuple[type[Module], ...] = (DistributedDataParallel,)
    if fsdp is not None:
        kinds += (fsdp.FullyShardedDataParallel,)
    wrappers = [one for one in gc.get_objects() if issubclass(type(one), kinds)]
    return {id(parameter) for wrapper in wrappers for parameter in wrapper.parameters()}


def _check_equal(live: ComputationModel, parameters: list[Parameter], group: Group) -> None:
    own = [_described(parameter) for parameter in parameters]
    rows = exchange_outcomes(live, group, None, own)
    if any(row != rows[0] for row in rows):
        by_rank = zip(group.ranks, rows, strict=True)
        shapes = "; ".join(f"rank {rank} {[shape for shape, *_ in row]}" for rank, row in by_rank)
        raise ValueError(
            "The optimizer of auto_optim has parameters that no model of auto_model has, and their values or "
            f"shapes differ between ranks (shapes: {shapes}), so the mean of their gradients means nothing. "
            "Pass their module to auto_model too, which makes the values equal. Parameters that belong to "
            "one rank only need an optimizer of their own, without auto_optim."
        )


def _described(parameter: Parameter) -> tuple[list[int], str, int]:
    values: Any = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return list(parameter.shape), str(parameter.dtype), zlib.crc32(values)
