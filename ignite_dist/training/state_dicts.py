"""Save and load the whole state of a model or an optimizer, sharded or not."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ignite_dist.collectives.buckets import broadcast_tensors
from ignite_dist.collectives.checks import is_sharded
from ignite_dist.collectives.coordination import Caller, exchange_outcomes, same_outcome
from ignite_dist.collectives.interrupts import one_call
from ignite_dist.collectives.primitives import broadcast_tensor
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.context.live import current_model
from ignite_dist.training.comparisons import check_same_state
from ignite_dist.training.unwrapped_states import (
    as_unwrapped_state,
    load_unwrapped_state,
    names_of_extra_state,
    unwrapped_state,
)
from ignite_dist.training.wrapped_models import unwrap_model
from ignite_dist.values import pytree, safe_objects
from ignite_dist.values.gradients import parameters_of
from ignite_dist.values.serialization import Payload


@one_call
def model_state(model: Module) -> dict[str, Any]:
    """The state of the unwrapped model on rank 0, for saving; ``{}`` on the other ranks.

    Every rank calls this, because the shards of FSDP2 are gathered. The keys are those of the unwrapped
    module, without wrappers of its submodules, ``torch.compile``'s too. So the state can be loaded on any
    number of ranks, with any backend or none.

    Args:
        model: the result of :func:`auto_model`, or a container of such models.

    Returns:
        A ``state_dict`` of copies on the CPU on rank 0.
    """
    state: dict[str, Any] = _gathered(unwrapped_state(model))
    return state


@one_call
def load_model_state(model: Module, state: Mapping[str, Any] | None) -> None:
    """Load rank 0's ``state`` into the model of every rank. Every rank calls this.

    Args:
        model: the result of :func:`auto_model`, or a container of such models.
        state: on rank 0 the result of :func:`model_state`, or a ``state_dict`` of the model or of its module,
            also with other ``DistributedDataParallel``, ``DataParallel`` and ``torch.compile`` wrappers (from
            a file of another script). It is not changed. Ignored on the other ranks.

    Raises:
        RuntimeError: keys or shapes differ from the module's; raised on rank 0. Nothing was changed.
        RankFailedError: rank 0 raised this or any other error; raised on the other ranks.
        CollectiveMismatchError: the models of the ranks differ in the names, order, shapes or dtypes of their
            parameters and buffers; raised on every rank. Nothing was changed.
    """
    check_same_state(current_model(), model, "load_model_state")
    fill_model(model, state)


def fill_model(model: Module, state: Mapping[str, Any] | None) -> None:
    """Do what :func:`load_model_state` does, without the comparison of the models. Every rank calls this."""
    live = current_model()
    is_whole = not has_shards(model)

    def load() -> dict[str, Any]:
        fitting = fitting_state(model, state)
        if is_whole:
            load_unwrapped_state(model, fitting)
        return fitting

    loaded: dict[str, Any] = _on_rank_0("load_model_state", load) or {}
    if not is_whole:
        fill_sharded_model(model, loaded)
    elif live.get_world_size() > 1:
        world = live.groups.resolve(None)
        broadcast_tensors(live, [*model.parameters(), *model.buffers()], 0, world)
        _share_extra_state(live, model, loaded, is_loaded=live.get_rank() == 0)


def fill_sharded_model(model: Module, state: Mapping[str, Any], are_filled: Collection[str] = ()) -> None:
    """Load rank 0's ``state``, which fits, into a model with shards. Every rank calls this.

    Args:
        model: the model.
        state: on rank 0 the whole tensors, with the names of :func:`model_state`; empty on the other ranks.
        are_filled: the names of tensors that have their values already.
    """
    live = current_model()
    own_state = unwrapped_state(model)  # FSDP2 also reshards parameters that a forward pass has gathered
    skipped = {*names_of_extra_state(model), *are_filled}
    tensors = {name: value for name, value in own_state.items() if name not in skipped}
    _fill_shards(live, tensors, state, live.groups.resolve(None))
    _share_extra_state(live, model, state, is_loaded=False)


def _share_extra_state(
    live: ComputationModel, model: Module, state: Mapping[str, Any], is_loaded: bool
) -> None:
    extra = names_of_extra_state(model)
    if not extra:
        return
    sent = {name: value for name, value in state.items() if name in extra}
    received = live.objects.broadcast(sent, 0, live.groups.resolve(None))
    if not is_loaded:
        load_unwrapped_state(model, received, strict=False)


def _fill_shards(
    live: ComputationModel, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], group: Group
) -> None:
    """Fill the possibly sharded ``tensors`` from the ``state`` of rank 0, one tensor at a time."""
    for name, tensor in tensors.items():
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if state:
            whole.copy_(state[name])
        broadcast_tensor(live, whole, 0, group).wait()
        tensor.copy_(as_sharded(whole, tensor) if is_sharded(tensor) else whole)


def fitting_state(model: Module, state: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of ``state`` with the names of :func:`model_state`. Never communicates.

    Raises:
        RuntimeError: keys or shapes differ.
    """
    own = unwrapped_state(model)
    given = as_unwrapped_state(model, state or {})
    faults = [f"missing {name}" for name in own if name not in given]
    faults += [f"unexpected {name}" for name in given if name not in own]
    faults += [f"{name} is a shard, not the whole tensor" for name in own if is_sharded(given.get(name))]
    faults += [
        f"{name} of shape {tuple(given[name].shape)} for {tuple(value.shape)}"
        for name, value in own.items()
        if isinstance(value, Tensor) and name in given and given[name].shape != value.shape
    ]
    if faults:
        kind = type(unwrap_model(model)).__name__
        raise RuntimeError(f"The state does not fit a {kind}: {'; '.join(faults[:10])}.")
    return given


@one_call
def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The whole state of an optimizer on rank 0, for saving; ``{}`` on the other ranks.

    Every rank calls this, because the shards of ZeRO or FSDP2 are gathered.

    Args:
        optimizer: the result of :func:`auto_optim`.

    Returns:
        On rank 0, the ``state_dict`` of an unsharded optimizer, with copies on the CPU.
    """
    state: dict[str, Any] = _gathered(consolidated_state(optimizer))
    return state


def consolidated_state(optimizer: Optimizer) -> dict[str, Any]:
    """The ``state_dict`` of ``optimizer`` itself, with shards of FSDP2. Every rank calls this.

    The shards of ZeRO are gathered: the state is whole on rank 0, and ``{}`` on the other ranks.
    """
    if hasattr(optimizer, "consolidate_state_dict"):
        current_model().groups.check_not_joining()
        optimizer.consolidate_state_dict(to=0)
        if current_model().get_rank() != 0:
            return {}
    return optimizer.state_dict()


def _load(saved: Payload) -> Any:
    return torch.load(io.BytesIO(saved), map_location="cpu", weights_only=False, mmap=False)


@one_call
def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any] | None) -> None:
    """Load rank 0's ``state`` into the optimizer of every rank. Every rank calls this.

    Args:
        optimizer: the result of :func:`auto_optim`.
        state: on rank 0 the result of :func:`optimizer_state`, or another ``state_dict`` of such an
            optimizer. Ignored on the other ranks.

    Raises:
        ValueError: groups or parameters do not fit the optimizer; raised on every rank. Nothing was changed.
    """
    live = current_model()
    saved: bytes = _on_rank_0("load_optimizer_state", lambda: safe_objects.save(state)) or b""
    received = live.objects.broadcast_bytes(saved, 0, live.groups.resolve(None))
    rank_0_state: Any = safe_objects.load(received, 0) if safe_objects.is_safe() else _load(received)
    same_outcome(live, lambda: check_optimizer_state(optimizer, rank_0_state), "load_optimizer_state")
    for number, parameter in enumerate(parameters_of(optimizer)):
        values = rank_0_state["state"].get(number, {})
        if is_sharded(parameter):
            values.update({name: as_sharded(value, parameter) for name, value in values.items()})
    if hasattr(optimizer, "consolidate_state_dict"):  # ZeRO keeps entries that the new state does not have
        optimizer.optim.state.clear()  # type: ignore[attr-defined]
    optimizer.load_state_dict(rank_0_state)


def check_optimizer_state(optimizer: Optimizer, state: Any) -> None:
    """Raise if ``state`` does not fit ``optimizer``. Never communicates.

    Raises:
        ValueError: groups or parameters differ.
    """
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        raise ValueError(f"state must be the result of optimizer_state() on rank 0, got {type(state)}.")
    own = [len(group["params"]) for group in optimizer.param_groups]
    given = [len(group["params"]) for group in state["param_groups"]]
    if own != given:
        raise ValueError(
            f"The state does not fit this optimizer: its parameter groups have {given} parameters, and "
            f"the groups of the optimizer have {own}."
        )
    if unknown := [key for key in state["state"] if isinstance(key, int) and not 0 <= key < sum(own)]:
        raise ValueError(f"The state has parameters that the optimizer does not have: {unknown}.")


# --- shared ------------------------------------------------------------------------------------------


def has_shards(part: Module | Optimizer | None) -> bool:
    """True if the model or the optimizer has parameters or buffers that are shards."""
    if part is None:
        return False
    values = unwrapped_state(part).values() if isinstance(part, Module) else parameters_of(part)
    return any(map(is_sharded, values))


def _gathered(state: Any) -> Any:
    """Copies of a tree's tensors, gathered on the CPU, on rank 0; ``{}`` on the other ranks."""
    leaves, _ = pytree.flatten(state, is_local=True)
    whole = [leaf.full_tensor() if is_sharded(leaf) else leaf for leaf in leaves]
    if current_model().get_rank() != 0:
        return {}
    return pytree.rebuild(state, (_copy(leaf) for leaf in whole))


def _copy(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def as_sharded(value: Any, parameter: Any) -> Any:
    """``value``, equal on every rank, sharded like ``parameter`` if both have the same shape.

    A value that is sharded already, or is no tensor, is unchanged.
    """
    if not isinstance(value, Tensor) or is_sharded(value) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _on_rank_0(caller: str, function: Callable[[], Any]) -> Any:
    """What ``function`` returns on rank 0, and None on the other ranks. All ranks raise if it raises."""
    live = current_model()
    result, errors = None, []
    if live.get_rank() == 0:
        try:
            result = function()
        except Exception as caught:
            errors.append(caught)
    exchange_outcomes(live, live.groups.resolve(None), next(iter(errors), None), caller=Caller(caller))
    if errors:
        raise errors.pop()  # a variable would keep the error, in a cycle with its traceback and this frame
    return result
