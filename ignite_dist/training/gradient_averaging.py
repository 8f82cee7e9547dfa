"""Average gradients by collectives of this package, without DDP or a Horovod optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ignite_dist.collectives.all_gather import all_gather_tensors_with_shapes
from ignite_dist.collectives.all_reduce import all_reduce
from ignite_dist.collectives.buckets import average_tensors
from ignite_dist.collectives.checks import is_sharded
from ignite_dist.collectives.coordination import exchange_outcomes
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.context.live import current_model
from ignite_dist.data.model_buffers import group_of_parameters
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.internals import _torch
from ignite_dist.values import pytree
from ignite_dist.values.gradients import empty_gradient, mark_averaged, parameters_of, take_mark

_NONE, _DENSE = 0, 1  # kinds of gradients; a sparse gradient has the kind _DENSE + sparse_dim()


def agree_on_gradients(
    live: ComputationModel, parameters: Sequence[Parameter], group: Group
) -> list[Parameter]:
    """The parameters that have a gradient on any rank of ``group``. All ranks of ``group`` call this.

    On return each of these parameters has a gradient on every rank: a rank without a gradient gets zeros. The
    gradient is sparse if no rank has a dense one.

    Raises:
        RankFailedError: another rank raised; see ``exchange_outcomes``.
        CollectiveMismatchError: the ranks have different numbers of parameters.
    """
    kinds = bytes(_kind(parameter.grad) for parameter in parameters)
    kinds_by_rank: list[bytes] = exchange_outcomes(live, group, None, kinds)
    counts = [len(sent) for sent in kinds_by_rank]
    if len(set(counts)) > 1:
        raise CollectiveMismatchError(
            f"The ranks average different numbers of gradients (by rank: {counts}). Their models or their "
            "frozen parameters differ."
        )
    used = []
    for parameter, *rank_kinds in zip(parameters, *kinds_by_rank, strict=True):
        found = set(rank_kinds) - {_NONE}
        if found:
            _make_gradient(parameter, found.pop() if len(found) == 1 else _DENSE)
            used.append(parameter)
    return used


def _kind(gradient: Tensor | None) -> int:
    if gradient is None:
        return _NONE
    return _DENSE + (gradient.sparse_dim() if gradient.layout is torch.sparse_coo else 0)


def _make_gradient(parameter: Parameter, kind: int) -> None:
    """Make ``parameter.grad`` a gradient of ``kind`` with the same values, or zeros without a gradient."""
    if parameter.grad is None and kind != _DENSE:
        parameter.grad = empty_gradient(parameter, kind - _DENSE)
    elif parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif kind == _DENSE and parameter.grad.layout is not torch.strided:
        parameter.grad = parameter.grad.to_dense()


def average_gradients(live: ComputationModel, parameters: Iterable[Parameter], group: Group) -> None:
    """Average the gradients of ``parameters`` over the ranks of ``group``. All ranks of ``group`` call this.

    A gradient of None counts as zeros. Dense gradients are averaged in buckets; each sparse gradient costs
    two more collectives.
    """
    dense, sparse = [], []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.layout is torch.sparse_coo:
            sparse.append(parameter)
        else:
            dense.append(local_gradient(parameter))
    average_tensors(live, dense, group)
    if sparse:
        _average_sparse(live, sparse, group)


def local_gradient(parameter: Parameter) -> Tensor:
    """The dense gradient of ``parameter``, or of this rank's shard, for changes in place.

    The gradient of a ``DTensor`` may be whole, or a summand on each rank. It is then placed like the
    parameter, as on ranks without a gradient. Every rank of the mesh calls this.
    """
    gradient: Any = parameter.grad
    if not is_sharded(gradient):
        return gradient  # type: ignore[no-any-return]
    placements: Any = parameter.placements  # type: ignore[attr-defined]
    with torch.no_grad():
        if gradient.placements != placements:
            gradient = parameter.grad = gradient.redistribute(placements=placements)
        local: Any = gradient.to_local()
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


def _average_sparse(live: ComputationModel, parameters: Sequence[Parameter], group: Group) -> None:
    """Average gradients that are sparse on every rank. The entries are gathered; results stay sparse."""
    handle = group.handle
    own_gradients = [parameter.grad.coalesce() for parameter in parameters if parameter.grad is not None]
    counts = live.objects.gather([len(gradient.values()) for gradient in own_gradients], group)
    by_parameter = zip(parameters, own_gradients, zip(*counts, strict=True), strict=True)
    for parameter, gradient, lengths in by_parameter:
        positions, values = gradient.indices().t().contiguous(), gradient.values().contiguous()
        all_positions, all_values = (
            torch.cat(all_gather_tensors_with_shapes(part, [(n, *part.shape[1:]) for n in lengths], handle))
            for part in (positions, values)
        )
        if values.dtype in (torch.float16, torch.bfloat16):
            all_values = all_values.float()  # one rounding, after the sum
        total = torch.sparse_coo_tensor(
            all_positions.t(), all_values, gradient.shape, check_invariants=False
        ).coalesce()
        mean = (total.values() / len(group.ranks)).to(values.dtype)
        parameter.grad = torch.sparse_coo_tensor(
            total.indices(), mean, gradient.shape, check_invariants=False, is_coalesced=True
        )


# --- averages in the step, if neither a wrapper nor the backend's optimizer averages gradients ---------


def average_in_step(optimizer: Optimizer) -> None:
    """Make ``optimizer`` average its gradients before each step. Further calls change nothing."""
    if _average_before_step not in _torch.step_hooks(optimizer)[0].values():
        optimizer.register_step_pre_hook(_average_before_step)


def average_now(live: ComputationModel, optimizer: Optimizer) -> None:
    """Average the gradients now. The next step does not average them again."""
    if not take_mark(optimizer):
        if live.training.averages_gradients:
            live.training.reduce_gradients(optimizer)
        else:
            _average(live, optimizer)
    mark_averaged(optimizer)


def _average_before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Step hook: average the gradients before the step, or after each call of the closure."""
    closure = _closure_of(args, kwargs)
    if closure is None:
        if not take_mark(optimizer):
            _average(current_model(), optimizer)
        return None

    def averaging_closure() -> Any:
        loss = closure()
        live = current_model()
        _average(live, optimizer)
        return _mean_loss(loss, live.groups.world)

    return _with_closure(averaging_closure, args, kwargs)


def _average(live: ComputationModel, optimizer: Optimizer) -> None:
    world = live.groups.world
    if len(world.ranks) == 1:  # the context of auto_optim() has ended
        return
    trained = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
    # On a lazy backend, comparing gradients across ranks would wait for the device in each step.
    used = trained if live.training.computes_lazily else agree_on_gradients(live, trained, world)
    average_gradients(live, used, world)


# --- the loss that a closure returns -----------------------------------------------------------------


def average_losses(optimizer: Optimizer) -> None:
    """Give ``optimizer`` the mean over all ranks of the loss that its closure returns.

    Use this where the backward pass averages the gradients. An optimizer whose step depends on the loss (a
    line search) then takes the same step on all ranks.
    """
    if _average_loss not in _torch.step_hooks(optimizer)[0].values():
        optimizer.register_step_pre_hook(_average_loss)


def _average_loss(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    closure = _closure_of(args, kwargs)
    # In uneven_inputs() the ranks make different numbers of steps.
    if closure is None or current_model().groups.is_joining:
        return None

    def averaging_closure() -> Any:
        return _mean_loss(closure(), group_of_parameters(current_model(), parameters_of(optimizer)))

    return _with_closure(averaging_closure, args, kwargs)


def _closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer


def _with_closure(
    closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step with their closure replaced by ``closure``."""
    others = {name: value for name, value in kwargs.items() if name != "closure"}
    return (args[0], closure, *args[2:]), others


def _mean_loss(loss: Any, group: Group) -> Any:
    """``loss``, a number or a tensor of one element, averaged over the ranks of ``group``.

    If ``loss`` is a container, each float and each 0-d float tensor in it is averaged. Other values (the
    model's output) may have a different shape on each rank and stay unchanged.
    """
    if len(group.ranks) == 1:
        return loss
    if isinstance(loss, Tensor) and loss.numel() > 1:
        return loss
    if isinstance(loss, (Tensor, Number)):
        return all_reduce(loss, "AVERAGE", group.handle, inplace=False)
    values, _ = pytree.flatten(loss)
    losses = [value for value in values if _is_loss(value)]
    means = iter(all_reduce(losses, "AVERAGE", group.handle) if losses else [])
    return pytree.rebuild(loss, iter([next(means) if _is_loss(value) else value for value in values]))


def _is_loss(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.is_floating_point()
    return isinstance(value, float)
