"""What the ranks compare before they train together: a model in ``auto_model``, then its optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from numbers import Real
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ignite_dist.collectives.checks import is_sharded
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.coordination import Caller, check_same
from ignite_dist.gradients import parameters_of
from ignite_dist.training.exact_passes import parameters_by_group
from ignite_dist.values.layouts import describe_layout, layout_of


def named_tensors(model: Module) -> list[tuple[str, Tensor]]:
    """Names and tensors: first the parameters, then the buffers."""
    return [*model.named_parameters(), *model.named_buffers()]


def check_same_model(
    live: ComputationModel, named: Iterable[tuple[str, Tensor]], group: Group, what: str, frozen_counts: bool
) -> None:
    """Raise on every rank of ``group`` if their tensors differ in more than values. Each of them calls this.

    Args:
        live: the context.
        named: parameters and buffers with their names.
        group: the ranks that compare them.
        what: arguments of ``auto_model`` that are equal on all ranks.
        frozen_counts: True compares which parameters are frozen, too.

    Raises:
        CollectiveMismatchError: names, order, kinds, shapes, dtypes or ``what`` differ, or a rank has made
            another call.
    """
    if len(group.ranks) > 1:  # describing a large model takes time
        texts = [_described_tensor(name, one, frozen_counts) for name, one in named]
        needed = f"the same model on every rank, because all take the values of rank {group.ranks[0]}"
        check_same(live, group, texts, Caller("auto_model", what), needed)


def _described_tensor(name: str, tensor: Tensor, frozen_counts: bool) -> str:
    kind = "parameter" if isinstance(tensor, Parameter) else "buffer"
    name = name.replace("_orig_mod.", "")  # a prefix of torch.compile
    layout = f"{tensor.dtype} of unknown shape" if is_lazy(tensor) else describe_layout(layout_of(tensor))
    words = [f"{kind} {name!r}", layout]
    if is_sharded(tensor):
        words.append(f"DTensor {tensor.placements}")  # type: ignore[attr-defined]
    if frozen_counts and kind == "parameter" and not tensor.requires_grad:
        words.append("frozen")
    return ", ".join(words)


def check_same_optimizer(live: ComputationModel, optimizer: Optimizer, arguments: str, **kwargs: Any) -> None:
    """Raise on every rank that trains a model of ``auto_model`` if their optimizers differ. Each calls this.

    Only what the ranks train together is compared. ``kwargs`` are those of ``hvd.DistributedOptimizer``.

    Raises:
        CollectiveMismatchError: classes, numbers, order or shapes of parameters, settings or ``arguments``
            differ, or a rank has made another call.
    """
    own = {id(one) for one in parameters_of(optimizer)}
    shares = live.training.shares_optimizers
    compared: list[tuple[Group, set[int]]] = []
    if not shares:
        compared = [(group, own & set(map(id, shared))) for group, shared in parameters_by_group(live)]
    elif kwargs.get("process_set") is None:
        compared = [(live.groups.world, own)]
    for group, ids in compared:
        if ids and len(group.ranks) > 1:
            texts = [*_described_optimizer(optimizer, ids, without_settings=shares)]
            caller = Caller("auto_optim", arguments)
            check_same(live, group, texts, caller, "the same optimizer on every rank that trains the model")


def _described_optimizer(optimizer: Optimizer, ids: set[int], without_settings: bool) -> Iterator[str]:
    """``ids``: of the parameters that are compared."""
    kind = type(optimizer).__name__
    yield kind
    if not without_settings:
        yield f"{kind} with{'' if getattr(optimizer, 'state', None) else 'out'} a state"
    number = 0
    for group in optimizer.param_groups:
        shapes = [tuple(one.shape) for one in group["params"] if id(one) in ids]
        if not shapes:
            continue
        name = f"group {number}"
        number += 1
        yield f"{name}: {len(shapes)} parameters"
        yield from (f"{name}, parameter {position}: shape {shape}" for position, shape in enumerate(shapes))
        if not without_settings:
            given = {str(key): one for key, one in group.items() if key not in _NOT_COMPARED}
            texts = {key: _described_setting(one) for key, one in sorted(given.items())}
            yield from (f"{name}: {key}={text}" for key, text in texts.items() if text)


# The parameters, their names, and how a rank's device computes the step.
_NOT_COMPARED = ("params", "param_names", "foreach", "fused", "capturable")


def _described_setting(value: Any) -> str:
    """Equal for equal numbers of any type. Empty for an object, whose text may have an address."""
    if isinstance(value, (tuple, list)):
        parts = [_described_setting(one) for one in value]
        return f"({', '.join(parts)})" if all(parts) else ""
    if (
        isinstance(value, Tensor)
        and not is_sharded(value)
        and value.numel() == 1
        and value.device.type == "cpu"
    ):
        value = value.item()
    if isinstance(value, (bool, str, type(None))):
        return repr(value)
    return f"{float(value):.7g}" if isinstance(value, Real) else ""  # the digits of a float32
