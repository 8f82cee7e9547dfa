"""Gradients accumulated over several microbatches, weighted by samples or tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from math import inf
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from ignite_dist.collectives.checks import is_sharded
from ignite_dist.collectives.coordination import Caller, check_same, exchange_outcomes
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.context.live import current_model
from ignite_dist.data.model_buffers import group_of_parameters
from ignite_dist.data.passes import LookAhead
from ignite_dist.internals.call_sites import reported_as, warn_user
from ignite_dist.training.comparisons import trained_together
from ignite_dist.training.gradient_sync import (
    DDPSyncStrategy,
    check_not_sharded,
    fsdp_modules,
    grad_sync,
    optimizers_of,
)
from ignite_dist.training.outside_passes import ForwardPasses
from ignite_dist.training.wrapped_models import unwrap_model
from ignite_dist.values.gradients import scale_gradients


class Microbatch:
    """Context manager around the forward and backward pass of one microbatch of :func:`accumulate_gradients`.

    Attributes:
        is_final: True if a step comes next.
        number: position in the step, from 0.
        was_entered: True if the block has been entered.
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
        if self.was_entered:
            raise RuntimeError(
                "The block of this microbatch was entered before: gradients would be weighted and averaged "
                "twice. Make the forward and the backward pass in one block."
            )
        self.was_entered = True
        self._entered = self._context()
        self._entered.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        assert self._entered is not None
        return self._entered.__exit__(*error)


def accumulate_gradients(
    loader: Iterable[Any],
    model: Module,
    steps: int,
    weight: Callable[[Any], float] | None = None,
    strategy: DDPSyncStrategy = DDPSyncStrategy.SINGLE_AUTO_SYNC,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
) -> Iterator[tuple[Any, Microbatch]]:
    """Pair each batch with a context manager that accumulates gradients over ``steps`` microbatches.

    At the step, the gradient is the gradient of the mean loss over all microbatches of all ranks. The last
    step of a pass may have fewer than ``steps`` microbatches. Every rank makes the same number of steps.
    Gradients must be None or zero when a step begins, because existing values count as part of the sum; the
    first block of a pass warns of such values (not with one process per replica of XLA). A rank may skip the
    passes in a block; the microbatch then counts with a zero gradient. Every rank enters the block of the
    last microbatch. Results of ``torch.autograd.grad`` in a block stay unchanged. Forward and backward pass
    belong inside of the block.

    Args:
        loader: an iterable of batches, one per microbatch. One batch is fetched ahead. An error of it, or of
            ``weight``, is raised on its own rank only.
        model: the result of :func:`auto_model`, or a module that contains it. If it has a ``process_group``
            or a mesh, "all ranks" means the ranks of this group, or along the data dimensions. With
            ``strategy="fsdp"`` every microbatch averages its gradients, no rank can skip a pass, and
            FORCED_SYNC is refused.
        steps: microbatches per step. If the number of microbatches in a step differs between ranks, pass
            ``weight=lambda batch: 1``. With MULTI_AUTO_SYNC, and for a model with buffers, the numbers must
            be equal.
        weight: returns the number of samples or tokens over which a batch's loss is the mean. The gradient
            is then the gradient of the mean over all samples or tokens, for any sizes of microbatches. The
            ranks exchange one number per step. Until the step, gradients are weighted sums, so large weights
            overflow in float16.
        strategy: see :class:`DDPSyncStrategy`.
        optimizers: as in :func:`grad_sync`.

    Yields:
        ``(batch, microbatch)``, see :class:`Microbatch`.

    Raises:
        CollectiveMismatchError: the ranks pass another ``strategy``, without weights another ``steps``, or
            only some pass ``weight``; raised at the first batch, on every rank of a group that trains
            (a part of) the model.
        ValueError: ``steps`` is not a positive int, a weight is negative, or the weights of all ranks are 0.
        RuntimeError: the block of a step's last microbatch was not entered; or called inside of
            :func:`uneven_inputs`, where ranks make different numbers of steps. A backward pass raises it if
            its forward pass was in a block and the block has ended (not if a compiled function contains the
            forward pass).

    Example::

        microbatches = idist.accumulate_gradients(loader, model, steps=4, weight=lambda batch: len(batch[0]))
        for (x, y), sync in microbatches:
            with sync:
                criterion(model(x), y).backward()
            if sync.is_final:
                optimizer.step()
                optimizer.zero_grad()
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a positive int, got {steps!r}.")
    strategy = DDPSyncStrategy(strategy)
    if strategy is DDPSyncStrategy.FORCED_SYNC:
        check_not_sharded(model, "FORCED_SYNC")
    elif fsdp_modules(model):  # gradients that are not averaged are in no parameter's grad
        strategy = DDPSyncStrategy.MULTI_AUTO_SYNC
    current_model().groups.check_not_joining()
    make_sync = partial(grad_sync, model, optimizers, strategy=strategy)
    # With weights, a rank may have more microbatches in a step than another.
    texts = [f"strategy={strategy.name}", f"steps={steps}, no weight" if weight is None else "a weight"]
    check = partial(_check_same, model, optimizers, texts)
    return _accumulate(loader, model, steps, weight, make_sync, optimizers, check)


@reported_as("accumulate_gradients")
def _accumulate(
    loader: Iterable[Any],
    model: Module,
    steps: int,
    weight: Callable[[Any], float] | None,
    make_sync: Callable[..., AbstractContextManager[None]],
    optimizers: Optimizer | Sequence[Optimizer] | None,
    check: Callable[[], None],
) -> Iterator[tuple[Any, Microbatch]]:
    check()
    batches, end, ahead = iter(loader), object(), LookAhead()
    next_batch = ahead.next(batches, end)
    weights: list[float] = []
    passes = ForwardPasses(model)
    is_first = not current_model().training.computes_lazily
    while next_batch is not end:
        batch, next_batch = next_batch, ahead.next(batches, end)
        weights.append(1.0 if weight is None else _checked_weight(weight(batch)))
        is_final = len(weights) == steps or next_batch is end

        mean = None if weight is None else partial(_mean_over_ranks, model, optimizers)
        context = partial(_weighted_microbatch, model, passes, tuple(weights), is_final, mean, make_sync)
        if is_first:
            is_first, context = False, partial(_warns_of_left_gradients, model, context)
        microbatch = Microbatch(len(weights) - 1, is_final, context)
        ahead.note_microbatch("" if is_final else f"microbatch {len(weights)} of {steps}")
        yield batch, microbatch
        if is_final:
            if not microbatch.was_entered:
                raise RuntimeError(
                    "The block of a step's last microbatch was not entered, so the gradients are neither "
                    "averaged nor a mean. Enter `with sync:` for each microbatch. Skip only its contents."
                )
            weights = []
    ahead.end()


@contextmanager
def _weighted_microbatch(
    model: Module,
    passes: ForwardPasses,
    weights: Sequence[float],
    is_final: bool,
    mean: Callable[[float], float] | None,
    make_sync: Callable[..., AbstractContextManager[None]],
) -> Iterator[None]:
    """The block of one microbatch, whose weight is ``weights[-1]``; the others are of earlier microbatches.

    Gradients are summed by weight until the last microbatch, which divides the sum by the total weight. The
    division is linear, so the average over the ranks may come before or after the division.
    """
    live = current_model()
    live.groups.check_not_joining()  # in uneven_inputs() is_final differs between ranks
    if mean is not None:  # a rank that skips a pass comes to this exchange before other ranks do
        live.training.prepare_pass(model)
    factor = weights[-1]
    if is_final:
        total = sum(weights) if mean is None else mean(sum(weights))
        factor /= total
        for module in fsdp_modules(model):
            module.reshard()  # the gradients are those of the shards
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(total)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    scaled = _scale_unsharded(model, factor) if fsdp_modules(model) else scale_gradients(trained, factor)
    with scaled, make_sync(is_final_microbatch=is_final), passes.noted():
        yield


@contextmanager
def _scale_unsharded(model: Module, factor: float) -> Iterator[None]:
    """Like :func:`scale_gradients`, for parameters that are whole only in the forward and backward pass."""
    scaled: dict[int, Parameter] = {}
    with ExitStack() as stack:

        def scale(module: Module, _: Any) -> None:
            own = {id(one): one for one in module.parameters(recurse=False) if one.requires_grad}
            new = [one for key, one in own.items() if key not in scaled]
            scaled.update(own)
            stack.enter_context(scale_gradients(new, factor))

        for module in model.modules():
            if factor != 1.0 and next(module.parameters(recurse=False), None) is not None:
                stack.callback(module.register_forward_pre_hook(scale).remove)
        yield


def _checked_weight(weight: Any) -> float:
    value = float(weight)
    if not 0 <= value < inf:
        raise ValueError(f"The weight of a batch must be a finite number >= 0, got {weight!r}.")
    return value


def _check_same(
    model: Module, optimizers: Optimizer | Sequence[Optimizer] | None, texts: Sequence[str]
) -> None:
    """Compare ``texts`` between the ranks that train ``model``, or a part of it, together."""
    live = current_model()
    compared = [(group, texts) for group, _ in trained_together(live, model, optimizers)]
    check_same(live, compared, Caller("accumulate_gradients"), "the same arguments on every rank")


@contextmanager
def _warns_of_left_gradients(
    model: Module, block: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """``block``, and a warning if gradients from before it are still there at its end.

    At its end, because a script may call ``zero_grad`` as late as before ``backward``.
    """
    left = _left_gradient(model)
    with block():
        yield
        if left is not None and left[1].grad is left[2]:
            warn_user(
                "The first step of accumulate_gradients counts gradients from before, for example of "
                f"{left[0]!r}. Was an earlier loop left in the middle of a step? Call model.zero_grad() "
                "first."
            )


def _left_gradient(model: Module) -> tuple[str, Parameter, Tensor] | None:
    """A parameter with its name and its gradient, which is neither None nor zero."""
    for name, one in unwrap_model(model).named_parameters():
        if one.grad is not None and bool(_own_values(one.grad).any()):
            return name, one, one.grad
    return None


def _own_values(gradient: Tensor) -> Tensor:
    if is_sharded(gradient):
        return gradient.to_local()  # type: ignore[attr-defined, no-any-return]
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _group_of(
    live: ComputationModel, model: Module, optimizers: Optimizer | Sequence[Optimizer] | None
) -> Group:
    """The ranks over which the gradients are averaged."""
    if fsdp_modules(model):
        return group_of_parameters(live, model.parameters())
    return live.training.gradient_group(model, optimizers_of(live, model, optimizers))


def _mean_over_ranks(
    model: Module, optimizers: Optimizer | Sequence[Optimizer] | None, weight: float
) -> float:
    live = current_model()
    group = _group_of(live, model, optimizers)
    # Not all_reduce: with FORCED_SYNC a rank whose block raised calls exchange_outcomes too.
    weight_by_rank: list[float] = exchange_outcomes(live, group, None, weight)
    if not any(weight_by_rank):
        raise ValueError("The weights of all microbatches of this step are zero on all ranks.")
    return sum(weight_by_rank) / len(weight_by_rank)
