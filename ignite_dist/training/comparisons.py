"""What the ranks compare before they train together: a model in ``auto_model``, then its optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from numbers import Number
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ignite_dist.collectives.checks import is_sharded
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.coordination import Caller, check_same
from ignite_dist.gradients import parameters_of
from ignite_dist.training.exact_passes import find_group
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


def check_same_optimizer(live: ComputationModel, optimizer: Optimizer, zero: bool) -> None:
    """Raise on every rank that trains a model of ``auto_model`` if their optimizers differ. Each calls this.

    Raises:
        CollectiveMismatchError: classes, numbers, order or shapes of parameters, settings or ``zero`` differ,
            or a rank has made another call.
    """
    shares = live.training.shares_optimizers
    group = live.groups.world if shares else find_group(live, parameters_of(optimizer))
    if group is not None and len(group.ranks) > 1:
        texts = [*_described_optimizer(optimizer, without_settings=shares)]
        check_same(
            live, group, texts, Caller("auto_optim", "zero=True" * zero), "the same optimizer on every rank"
        )


def _described_optimizer(optimizer: Optimizer, without_settings: bool) -> Iterator[str]:
    kind = type(optimizer).__name__
    yield kind
    if not without_settings:
        yield f"{kind} with{'' if optimizer.state else 'out'} a state"
    for number, group in enumerate(optimizer.param_groups):
        name = f"group {number}"
        yield f"{name}: {len(group['params'])} parameters"
        for position, parameter in enumerate(group["params"]):
            yield f"{name}, parameter {position}: shape {tuple(parameter.shape)}"
        if not without_settings:
            texts = sorted(
                (str(key), _described_setting(one)) for key, one in group.items() if key != "params"
            )
            yield from (f"{name}: {key}={text}" for key, text in texts if text)


def _described_setting(value: Any) -> str:
    """Empty for other objects than numbers and strings: their texts may have addresses."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()
    parts = value if isinstance(value, (tuple, list)) else [value]
    return repr(value) if all(isinstance(one, (Number, str, type(None))) for one in parts) else ""
