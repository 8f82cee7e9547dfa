"""Save and load the whole state of a model or an optimizer, sharded or not."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ignite_dist.collectives.buckets import broadcast_tensors
from ignite_dist.collectives.checks import is_sharded
from ignite_dist.collectives.tensors import broadcast_tensor
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.context.live import current_model
from ignite_dist.coordination import exchange_outcomes
from ignite_dist.gradients import parameters_of
from ignite_dist.training.wrapped_models import unwrap_model
from ignite_dist.values import pytree, safe_objects


def model_state(model: Module) -> dict[str, Any]:
    """The state of the unwrapped model on rank 0, for saving; ``{}`` on the other ranks.

    Every rank calls this, because the shards of FSDP2 are gathered. The keys are those of the unwrapped
    module. So the state can be loaded on any number of ranks, with any backend or none.

    Args:
        model: the result of :func:`auto_model`.

    Returns:
        A ``state_dict`` of copies on the CPU on rank 0.
    """
    state: dict[str, Any] = _gathered(unwrap_model(model).state_dict())
    return state


def load_model_state(model: Module, state: Mapping[str, Any] | None) -> None:
    """Load rank 0's ``state`` into the model of every rank. Every rank calls this.

    Args:
        model: the result of :func:`auto_model`.
        state: on rank 0 the result of :func:`model_state`, or a ``state_dict`` of the unwrapped module.
            Ignored on the other ranks.

    Raises:
        RuntimeError: keys or shapes differ from the module's; raised on rank 0. Nothing was changed.
        RankFailedError: rank 0 raised this or any other error; raised on the other ranks.
    """
    live, inner = current_model(), unwrap_model(model)
    world = live.groups.resolve(None)
    own_state = inner.state_dict()  # FSDP2 also reshards parameters that a forward pass has gathered
    has_shards = any(map(is_sharded, own_state.values()))
    _on_rank_0(lambda: _check_state(inner, state) if has_shards else _load_whole(inner, state))
    if live.get_world_size() == 1:
        return
    named = [*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False)]
    extra = own_state.keys() - {name for name, _ in named}  # from get_extra_state()
    values = (state or {}) if live.get_rank() == 0 else {}
    if has_shards:
        tensors = {name: value for name, value in own_state.items() if name not in extra}
        _fill_shards(live, tensors, values, world)
    else:
        broadcast_tensors(live, [*inner.parameters(), *inner.buffers()], 0, world)
    if extra:
        sent = {name: value for name, value in values.items() if name in extra}
        received = live.objects.broadcast(sent, 0, world)
        if has_shards or live.get_rank() != 0:
            inner.load_state_dict(received, strict=False)


def _fill_shards(
    live: ComputationModel, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], group: Group
) -> None:
    """Fill the possibly sharded ``tensors`` from the ``state`` of rank 0, one tensor at a time."""
    for name, tensor in tensors.items():
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if state:
            whole.copy_(state[name])
        broadcast_tensor(live, whole, 0, group).wait()
        tensor.copy_(_as_sharded(whole, tensor) if is_sharded(tensor) else whole)


def _load_whole(inner: Module, state: Mapping[str, Any] | None) -> None:
    _check_state(inner, state)
    inner.load_state_dict(state or {})


def _check_state(inner: Module, state: Mapping[str, Any] | None) -> None:
    own = inner.state_dict()
    given = {} if state is None else state
    faults = [f"missing {name}" for name in own if name not in given]
    faults += [f"unexpected {name}" for name in given if name not in own]
    faults += [f"{name} is a shard, not the whole tensor" for name in own if is_sharded(given.get(name))]
    faults += [
        f"{name} of shape {tuple(given[name].shape)} for {tuple(value.shape)}"
        for name, value in own.items()
        if isinstance(value, Tensor) and name in given and given[name].shape != value.shape
    ]
    if faults:
        raise RuntimeError(f"The state does not fit a {type(inner).__name__}: {'; '.join(faults[:10])}.")


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The whole state of an optimizer on rank 0, for saving; ``{}`` on the other ranks.

    Every rank calls this, because the shards of ZeRO or FSDP2 are gathered.

    Args:
        optimizer: the result of :func:`auto_optim`.

    Returns:
        On rank 0, the ``state_dict`` of an unsharded optimizer, with copies on the CPU.
    """
    if hasattr(optimizer, "consolidate_state_dict"):  # ZeRO; only rank 0 receives the state
        current_model().groups.check_not_joining()
        optimizer.consolidate_state_dict(to=0)
        if current_model().get_rank() != 0:
            return {}
    state: dict[str, Any] = _gathered(optimizer.state_dict())
    return state


def _load(saved: bytes | memoryview) -> Any:
    return torch.load(io.BytesIO(saved), weights_only=False, mmap=False)


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
    saved: list[bytes] = []
    _on_rank_0(lambda: saved.append(safe_objects.save(state)))
    received = live.objects.broadcast_bytes(b"".join(saved), 0, live.groups.resolve(None))
    rank_0_state: Any = safe_objects.load(received, 0) if safe_objects.is_safe() else _load(received)
    _check_optimizer_state(optimizer, rank_0_state)
    for number, parameter in enumerate(parameters_of(optimizer)):
        values = rank_0_state["state"].get(number, {})
        if is_sharded(parameter):
            values.update({name: _as_sharded(value, parameter) for name, value in values.items()})
    if hasattr(optimizer, "consolidate_state_dict"):  # ZeRO keeps entries that the new state does not have
        optimizer.optim.state.clear()  # type: ignore[attr-defined]
    optimizer.load_state_dict(rank_0_state)


def _check_optimizer_state(optimizer: Optimizer, state: Any) -> None:
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


def _gathered(state: Any) -> Any:
    """Copies of a tree's tensors, gathered on the CPU, on rank 0; ``{}`` on the other ranks."""
    leaves, _ = pytree.flatten(state, is_local=True)
    whole = [leaf.full_tensor() if is_sharded(leaf) else leaf for leaf in leaves]
    if current_model().get_rank() != 0:
        return {}
    return pytree.rebuild(state, (_copy(leaf) for leaf in whole))


def _copy(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def _as_sharded(value: Any, parameter: Any) -> Any:
    """``value``, equal on every rank, sharded like ``parameter`` if both have the same shape."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(parameter.device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _on_rank_0(check: Any) -> None:
    live = current_model()
    error: BaseException | None = None
    if live.get_rank() == 0:
        try:
            check()
        except Exception as caught:
            error = caught
    exchange_outcomes(live, live.groups.resolve(None), error)
    if error is not None:
        raise error
