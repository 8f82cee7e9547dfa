"""Gradients averaged by our own collectives: where no wrapper does it, and where it has to be exact."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from ignite_dist.averaged import mark_averaged, parameters_of, take_mark
from ignite_dist.collectives import all_reduce
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.context import current_model
from ignite_dist.control import exchange_outcomes
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.tensors import average_tensors

__all__ = ["agree_on_gradients", "average_gradients", "average_in_step", "average_now"]


def agree_on_gradients(
    live: ComputationModel, parameters: Sequence[Parameter], group: Group
) -> list[Parameter]:
    """Those of ``parameters`` that have a gradient on any rank of ``group``, all of which call it.

    Raises:
        RankFailedError: another rank has failed instead, see :func:`~ignite_dist.control.exchange_outcomes`.
        CollectiveMismatchError: the ranks have different numbers of parameters.
    """
    own = bytes(parameter.grad is not None for parameter in parameters)
    everyones: list[bytes] = exchange_outcomes(live, group, None, own)
    if len({len(one) for one in everyones}) > 1:
        raise CollectiveMismatchError(
            f"The ranks average the gradients of {[len(one) for one in everyones]} parameters: their models "
            "differ, or what is frozen in them."
        )
    used = map(any, zip(*everyones, strict=True))
    return [parameter for parameter, is_used in zip(parameters, used, strict=True) if is_used]


def average_gradients(live: ComputationModel, parameters: Iterable[Parameter], group: Group) -> None:
    """Average the gradients of ``parameters`` over the ranks of ``group``, all of which call it.

    A rank without one that others have takes part with zeros. As few collectives as
    :func:`~ignite_dist.tensors.average_tensors` makes.
    """
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    average_tensors(live, gradients, group)


# --- in the step, where neither a model's wrapper nor an optimizer of the backend's averages --------------


def average_in_step(optimizer: Optimizer) -> None:
    """Make ``optimizer`` average its gradients before each step, once however often this is called."""
    if _average_first not in optimizer._optimizer_step_pre_hooks.values():
        optimizer.register_step_pre_hook(_average_first)


def average_now(live: ComputationModel, optimizer: Optimizer) -> None:
    """Average the gradients now, whoever does it in this context; the next step does not again."""
    if not take_mark(optimizer):
        if live.averages_gradients:
            live.reduce_gradients(optimizer)
        else:
            _average(live, optimizer)
    mark_averaged(optimizer)


def _average_first(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Step hook: average the gradients first; with a closure, each time that it has computed them."""
    own, *positional = args
    closure = positional[0] if positional else kwargs.get("closure")
    if closure is None:
        if not take_mark(optimizer):
            _average(current_model(), optimizer)
        return None

    def averaging_closure() -> Any:
        loss = closure()
        _average(current_model(), optimizer)
        if loss is None:
            return None
        return all_reduce(loss, "AVERAGE", inplace=False)  # optimizers branch on it, all ranks alike

    others = {name: value for name, value in kwargs.items() if name != "closure"}
    return (own, averaging_closure, *positional[1:]), others


def _average(live: ComputationModel, optimizer: Optimizer) -> None:
    world = live.world()
    if len(world.ranks) == 1:  # the context has ended
        return
    trained = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
    # To know which gradients other ranks have would be to wait for the device in each step.
    used = trained if live.computes_lazily() else agree_on_gradients(live, trained, world)
    average_gradients(live, used, world)
