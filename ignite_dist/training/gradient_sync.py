"""When gradients are synchronised: accumulation, strategies, clipping.

Backends average at different times: ``DistributedDataParallel`` and Horovod in the backward pass (Horovod
at the end of :func:`grad_sync`, or in the step, if a rank has made none), the hook of ``auto_optim`` in the
step. The functions here mean the same everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ignite_dist.collectives.checks import is_sharded
from ignite_dist.comp_models import ComputationModel
from ignite_dist.comp_models.base import NO_OPTIMIZER
from ignite_dist.context.live import current_model
from ignite_dist.coordination import exchange_outcomes
from ignite_dist.gradients import mark_averaged, parameters_of, scale_gradients
from ignite_dist.training.gradient_averaging import agree_on_gradients, average_gradients, average_now

__all__ = ["DDPSyncStrategy", "Microbatch", "accumulate", "clip_grad_norm", "grad_sync", "no_sync"]


class DDPSyncStrategy(Enum):
    """When the gradients of several microbatches are averaged over the ranks.

    Attributes:
        SINGLE_AUTO_SYNC: once, in the last microbatch's backward pass (XLA: in the step). The
            fastest. A rank may leave that backward pass out, or parameters in it, with
            ``DistributedDataParallel`` too: at the end of the block it then takes part with what it has
            accumulated. Without ``find_unused_parameters=True`` a parameter that no rank has used in the
            whole step then has a gradient of zeros, not None.
        MULTI_AUTO_SYNC: in each microbatch's backward pass: with ``find_unused_parameters=True`` the
            single-process gradients, whatever each microbatch uses, at the price of an all-reduce for each.
            Horovod: once, in the last backward pass; XLA: once, in the step. Both are as right there.
        FORCED_SYNC: once, after the last microbatch's block: the ranks agree on which parameters have a
            gradient on any of them, and average these in buckets. The single-process gradients, whatever each
            microbatch uses on each rank, without ``find_unused_parameters``; but nothing overlaps with the
            backward pass. Sparse gradients (of an embedding) stay sparse. If a block raises on one rank, the
            others raise ``RankFailedError``, and no gradient is touched.
    """

    SINGLE_AUTO_SYNC = "single_auto_sync"
    MULTI_AUTO_SYNC = "multi_auto_sync"
    FORCED_SYNC = "forced_sync"

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise ValueError(f"strategy is one of {', '.join(map(str, cls))}, or its value; got {value!r}.")


@contextmanager
def no_sync(model: Module) -> Iterator[None]:
    """Context manager: gradients of the block's backward passes accumulate as each rank's own.

    What is averaged afterwards is the sum. Forward and backward pass both belong into the block. Where
    gradients are averaged in the step, or not at all, it changes nothing.

    Args:
        model: what :func:`auto_model` returned, or what contains it. With Horovod its parameters are those of
            an optimizer of :func:`auto_optim`.

    Raises:
        ValueError: with Horovod, if no such optimizer has any of them.

    Example::

        with idist.no_sync(model):
            model(first).sum().backward()
        model(second).sum().backward()  # averages the gradients of both
    """
    live = current_model()
    with live.training.accumulate(model, _optimizers(live, model, None)):
        yield


@contextmanager
def grad_sync(
    model: Module,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    is_final_microbatch: bool = True,
    strategy: DDPSyncStrategy = DDPSyncStrategy.SINGLE_AUTO_SYNC,
) -> Iterator[None]:
    """Context manager around a microbatch's forward and backward pass.

    After the block of the final microbatch the gradients are the means over the ranks of their sums over the
    microbatches (XLA, and optimizers that Horovod itself has made: in the step). Every rank enters that
    block; a rank may skip what is in it, the backward pass or the forward pass too, and then takes part with
    what it has accumulated. Otherwise it makes as many passes there as the other ranks. Under
    ``torch.no_grad()`` nothing is averaged. With FSDP2 no rank can skip a pass, because the others wait for
    its shards; if all skip the last one, its sums stay until the next backward pass.

    Args:
        model: what :func:`auto_model` returned, or what contains it.
        optimizers: those of its parameters; None finds what :func:`auto_optim` returned for them.
        is_final_microbatch: whether a step comes next. The same on every rank.
        strategy: see :class:`DDPSyncStrategy`.

    Raises:
        RankFailedError: FORCED_SYNC, and the block of another rank has raised.
        RuntimeError: not with FORCED_SYNC: a parameter was frozen after ``DistributedDataParallel`` was made,
            which waits for its gradient; or ``model`` contains several, and this rank has used none of them.
        ValueError: as :func:`no_sync`.
    """
    live = current_model()
    strategy = DDPSyncStrategy(strategy)
    found = _optimizers(live, model, optimizers)
    if strategy is DDPSyncStrategy.FORCED_SYNC:
        _check_whole(model, "FORCED_SYNC")
        with _forced(live, model, found, is_final_microbatch):
            yield
    elif is_final_microbatch or (
        strategy is DDPSyncStrategy.MULTI_AUTO_SYNC and live.training.averages_in_backward
    ):
        with live.training.average_in_block(model, found):
            yield
    else:
        with live.training.accumulate(model, found):
            yield


@contextmanager
def _forced(
    live: ComputationModel, model: Module, optimizers: Sequence[Optimizer], is_final: bool
) -> Iterator[None]:
    live.groups.check_not_joining()
    live.training.check_forced(model, optimizers)
    group = live.training.gradient_group(model, optimizers)
    if len(group.ranks) == 1:
        yield
        return
    try:
        with live.training.accumulate(model, optimizers):
            yield
    except BaseException as error:
        exchange_outcomes(live, group, error)  # which the others meet in their final microbatch
        raise
    if is_final:
        parameters = dict.fromkeys(model.parameters())
        if (
            not live.training.averages_in_backward
        ):  # the step will not average what else these optimizers have either
            parameters.update(dict.fromkeys(parameters_of(*optimizers)))
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        average_gradients(live, agree_on_gradients(live, trained, group), group)
        live.training.mark_averaged(model)
        for optimizer in optimizers:
            if not live.training.averages_in_backward and id(optimizer) in live.training.optimizers:
                mark_averaged(optimizer)


class Microbatch:
    """Context manager around the forward and backward pass of one microbatch of :func:`accumulate`.

    Attributes:
        is_final: whether a step comes next.
        number: its position in the step, from 0 on.
        was_entered: whether its block has begun.
    """

    def __init__(
        self, number: int, is_final: bool, context: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.number = number
        self.is_final = is_final
        self.was_entered = False
        self._context = context
        self._entered: AbstractContextManager[None] | None = None

    def __enter__(self) -> Microbatch:
        self.was_entered = True
        self._entered = self._context()
        self._entered.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        assert self._entered is not None
        return self._entered.__exit__(*error)


def accumulate(
    loader: Iterable[Any],
    model: Module,
    steps: int,
    weight: Callable[[Any], float] | None = None,
    strategy: DDPSyncStrategy = DDPSyncStrategy.SINGLE_AUTO_SYNC,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> Iterator[tuple[Any, Microbatch]]:
    """Batches, and around each what makes one step of several of them.

    When the step comes, the gradient is that of the mean of the losses of all its microbatches on all ranks.
    The last step of a pass may have fewer than ``steps``, and each rank makes as many steps as the others.
    Where their numbers of microbatches in a step differ say ``weight=lambda batch: 1`` to have them counted;
    with MULTI_AUTO_SYNC, and for a model with buffers, they are equal. A step begins with gradients of None
    or zero: what is there is taken for a part of the sum. A rank may skip what is in the block of a
    microbatch, which then counts with a gradient of zero; it enters the block of the last one. Gradients that
    ``torch.autograd.grad`` returns in a block are left alone. What ``loader`` or ``weight`` raises is that
    rank's alone.

    Args:
        loader: whose batches are the microbatches; it is one batch ahead.
        model: what :func:`auto_model` returned, or what contains it; not with ``strategy="fsdp"``. All ranks
            are those of its ``process_group``, if it has one.
        steps: microbatches per step.
        weight: of a batch, in whatever counts: how many samples, or tokens, its loss is the mean of. Then the
            gradient is that of the mean over all of these, whatever the sizes of the microbatches on each
            rank. One number per step is exchanged for it. Until then gradients are sums by weight: in float16
            large counts overflow.
        strategy: see :class:`DDPSyncStrategy`.
        optimizers: as in :func:`grad_sync`.

    Yields:
        ``(batch, microbatch)``, see :class:`Microbatch`.

    Raises:
        ValueError: ``steps`` is not a positive int, a weight is negative, or those of all ranks are zero.
        RuntimeError: the block of a step's last microbatch was not entered; or it is called inside of
            :func:`join`, where ranks make different numbers of steps.

    Example::

        for (x, y), sync in idist.accumulate(loader, model, steps=4, weight=lambda batch: len(batch[0])):
            with sync:
                loss(model(x), y).backward()
            if sync.is_final:
                optimizer.step()
                optimizer.zero_grad()
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is a positive int, got {steps!r}.")
    _check_whole(model, "accumulate")
    current_model().groups.check_not_joining()
    synced = partial(grad_sync, model, optimizers, strategy=DDPSyncStrategy(strategy))
    return _accumulate(loader, model, steps, weight, synced, optimizers)


def _accumulate(
    loader: Iterable[Any],
    model: Module,
    steps: int,
    weight: Callable[[Any], float] | None,
    synced: Callable[..., AbstractContextManager[None]],
    optimizers: Optimizer | Sequence[Optimizer] | None,
) -> Iterator[tuple[Any, Microbatch]]:
    batches, end = iter(loader), object()
    ahead = next(batches, end)
    weights: list[float] = []
    while ahead is not end:
        batch, ahead = ahead, next(batches, end)
        weights.append(1.0 if weight is None else _checked(weight(batch)))
        is_final = len(weights) == steps or ahead is end

        mean = None if weight is None else partial(_mean_over_ranks, model, optimizers)
        weighed = partial(_weighed, model, tuple(weights), is_final, mean, synced)
        microbatch = Microbatch(len(weights) - 1, is_final, weighed)
        yield batch, microbatch
        if is_final:
            if not microbatch.was_entered:
                raise RuntimeError(
                    "The block of a step's last microbatch was left out: the gradients are neither averaged "
                    "nor a mean. Enter `with sync:` for each microbatch, and skip what is in it."
                )
            weights = []


@contextmanager
def _weighed(
    model: Module,
    weights: Sequence[float],
    is_final: bool,
    mean: Callable[[float], float] | None,
    synced: Callable[..., AbstractContextManager[None]],
) -> Iterator[None]:
    """The block of the microbatch that has the last of ``weights``, those of its step until now.

    Gradients are summed by their weights until the last microbatch knows them all and makes the sum a mean.
    That is linear, so it does not matter whether the ranks are averaged before or after.
    """
    current_model().groups.check_not_joining()  # where is_final differs between ranks
    factor = weights[-1]
    if is_final:
        total = sum(weights) if mean is None else mean(sum(weights))
        factor /= total
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(total)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with scale_gradients(trained, factor), synced(is_final_microbatch=is_final):
        yield


def _checked(weight: Any) -> float:
    value = float(weight)
    if not 0 <= value < inf:
        raise ValueError(f"The weight of a batch is a number from 0 on, got {weight!r}.")
    return value


def _mean_over_ranks(
    model: Module, optimizers: Optimizer | Sequence[Optimizer] | None, weight: float
) -> float:
    live = current_model()
    group = live.training.gradient_group(model, _optimizers(live, model, optimizers))
    # Not all_reduce: a rank whose block has raised answers here too, with FORCED_SYNC.
    everyones: list[float] = exchange_outcomes(live, group, None, weight)
    if not any(everyones):
        raise ValueError("The weights of all microbatches of this step, on all ranks, are zero.")
    return sum(everyones) / len(everyones)


# --- clipping ----------------------------------------------------------------------------------------


def clip_grad_norm(
    model: Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients, the means over all ranks, so that their global norm is ``max_norm`` at most.

    It is called between the last backward pass and the step. Where they are not averages yet (XLA;
    Horovod, if this rank has made no backward pass) they are averaged now, and the step does not again, so
    every rank calls it.

    Args:
        model: what :func:`auto_model` returned, or what contains it.
        max_norm: of the gradients of all parameters together.
        norm_type: the p of the p-norm; ``inf`` for the largest element.
        error_if_nonfinite: raise where the norm is NaN or infinite.

    Returns:
        The norm before, a 0-d tensor, the same on every rank.

    Raises:
        ValueError: with Horovod or XLA, if no optimizer of :func:`auto_optim` has the model's parameters.
        RuntimeError: ``error_if_nonfinite``.
    """
    live = current_model()
    optimizers = _optimizers(live, model, None)
    in_step = not live.training.averages_in_backward and live.get_world_size() > 1
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if in_step and trained and not optimizers:
        raise ValueError(NO_OPTIMIZER)
    if in_step:
        for optimizer in optimizers:
            average_now(live, optimizer)
        owned = set(parameters_of(*optimizers))
        others = [parameter for parameter in trained if parameter not in owned]  # which no step will average
        if others:
            group = live.training.gradient_group(model, optimizers)
            average_gradients(live, agree_on_gradients(live, others, group), group)
    total = torch.nn.utils.clip_grad_norm_(
        model.parameters(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
    )
    for optimizer in optimizers if in_step else ():
        mark_averaged(optimizer)
    return total.full_tensor() if is_sharded(total) else total  # type: ignore[attr-defined]


# --- shared ------------------------------------------------------------------------------------------


def _optimizers(
    live: ComputationModel, model: Module, given: Optimizer | Sequence[Optimizer] | None
) -> list[Optimizer]:
    """The optimizers of the parameters of ``model``, in the order in which they were adapted."""
    if given is not None:
        return [given] if isinstance(given, Optimizer) else list(given)
    if live.training.averages_in_backward:  # nobody will ask
        return []
    own = set(model.parameters())
    # Not values(): another replica of this process may add one meanwhile.
    adapted = [reference() for reference in live.training.optimizers.valuerefs()]
    return [one for one in adapted if one is not None and not own.isdisjoint(parameters_of(one))]


def _check_whole(model: Module, function: str) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    # After a forward pass without a backward pass FSDP2 leaves the outermost module's parameters whole.
    is_fsdp = fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())
    if is_fsdp or any(map(is_sharded, model.parameters())):
        raise ValueError(
            f"{function} is not for a model whose parameters are sharded, as by FSDP2: no rank ever has "
            "whole gradients. Use no_sync(model) around all microbatches but the last."
        )
