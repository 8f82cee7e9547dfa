"""The whole state of a model and of an optimizer, however the ranks share it out; and the way back."""

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

__all__ = ["load_model_state", "load_optimizer_state", "model_state", "optimizer_state"]


def model_state(model: Module) -> dict[str, Any]:
    """The state of the module inside of its wrappers on rank 0, to save it; ``{}`` on the others.

    Every rank calls it: what FSDP2 has sharded is gathered. The keys are those of the module itself, so it is
    loaded on any number of ranks, with any backend and without one.

    Args:
        model: what :func:`auto_model` returned.

    Returns:
        On rank 0 a ``state_dict`` of copies on the CPU.
    """
    state: dict[str, Any] = _gathered(unwrap_model(model).state_dict())
    return state


def load_model_state(model: Module, state: Mapping[str, Any] | None) -> None:
    """Give the model of every rank the state that rank 0 has. Every rank calls it.

    Args:
        model: what :func:`auto_model` returned.
        state: on rank 0 what :func:`model_state` returned there, or a ``state_dict`` of the module itself. On
            the others anything; it is not looked at.

    Raises:
        RuntimeError: keys or shapes that are not the module's, on rank 0; nothing was changed.
        RankFailedError: that, or whatever loading it raises on rank 0, on the other ranks.
    """
    live, inner = current_model(), unwrap_model(model)
    world = live.groups.resolve(None)
    own = inner.state_dict()  # FSDP2 shards again here what it has gathered for a forward pass
    shards = any(map(is_sharded, own.values()))
    _on_rank_0(lambda: _check_state(inner, state) if shards else _load_whole(inner, state))
    if live.get_world_size() == 1:
        return
    named = [*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False)]
    extra = own.keys() - {name for name, _ in named}  # of get_extra_state()
    values = (state or {}) if live.get_rank() == 0 else {}
    if shards:
        _fill_shards(live, {name: one for name, one in own.items() if name not in extra}, values, world)
    else:
        broadcast_tensors(live, [*inner.parameters(), *inner.buffers()], 0, world)
    if extra:
        sent = {name: value for name, value in values.items() if name in extra}
        received = live.objects.broadcast(sent, 0, world)
        if shards or live.get_rank() != 0:
            inner.load_state_dict(received, strict=False)


def _fill_shards(
    live: ComputationModel, own: Mapping[str, Tensor], state: Mapping[str, Tensor], group: Group
) -> None:
    """Fill ``own``, of which each rank has a part, from the ``state`` of rank 0, one tensor at a time."""
    for name, tensor in own.items():
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
    wrong = [f"missing {name}" for name in own if name not in given]
    wrong += [f"unexpected {name}" for name in given if name not in own]
    wrong += [f"{name} is a shard, and not the whole" for name in own if is_sharded(given.get(name))]
    wrong += [
        f"{name} of shape {tuple(given[name].shape)} for {tuple(value.shape)}"
        for name, value in own.items()
        if isinstance(value, Tensor) and name in given and given[name].shape != value.shape
    ]
    if wrong:
        raise RuntimeError(f"The state is not that of {type(inner).__name__}: {'; '.join(wrong[:10])}.")


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The whole state of an optimizer on rank 0, to save it; ``{}`` on the others.

    Every rank calls it: what ZeRO or FSDP2 has sharded is gathered.

    Args:
        optimizer: what :func:`auto_optim` returned.

    Returns:
        On rank 0 a ``state_dict`` of copies on the CPU, as of the optimizer without any of them.
    """
    if hasattr(optimizer, "consolidate_state_dict"):  # ZeRO's, which has it on this rank alone
        current_model().groups.check_not_joining()
        optimizer.consolidate_state_dict(to=0)
        if current_model().get_rank() != 0:
            return {}
    state: dict[str, Any] = _gathered(optimizer.state_dict())
    return state


def _load(saved: bytes | memoryview) -> Any:
    return torch.load(io.BytesIO(saved), weights_only=False, mmap=False)


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any] | None) -> None:
    """Give the optimizer of every rank the state that rank 0 has. Every rank calls it.

    Args:
        optimizer: what :func:`auto_optim` returned.
        state: on rank 0 what :func:`optimizer_state` returned there, or another ``state_dict`` of such an
            optimizer. On the others anything; it is not looked at.

    Raises:
        ValueError: groups or parameters that are not the optimizer's, on every rank; nothing was changed.
    """
    live = current_model()
    saved: list[bytes] = []
    _on_rank_0(lambda: saved.append(safe_objects.save(state)))
    received = live.objects.broadcast_bytes(b"".join(saved), 0, live.groups.resolve(None))
    everyones: dict[str, Any] = safe_objects.load(received, 0) if safe_objects.is_safe() else _load(received)
    _check_optimizer_state(optimizer, everyones)
    for number, parameter in enumerate(parameters_of(optimizer)):
        own = everyones["state"].get(number, {})
        if is_sharded(parameter):
            own.update({name: _as_sharded(value, parameter) for name, value in own.items()})
    if hasattr(optimizer, "consolidate_state_dict"):  # ZeRO would keep what the state to load has not
        optimizer.optim.state.clear()  # type: ignore[attr-defined]
    optimizer.load_state_dict(everyones)


def _check_optimizer_state(optimizer: Optimizer, state: Any) -> None:
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        raise ValueError(
            f"The state of an optimizer is what optimizer_state() gave on rank 0, got {type(state)}."
        )
    own = [len(group["params"]) for group in optimizer.param_groups]
    given = [len(group["params"]) for group in state["param_groups"]]
    if own != given:
        raise ValueError(
            f"The state is not that of this optimizer: its parameter groups have {given} parameters, the "
            f"optimizer's {own}."
        )
    if strange := [key for key in state["state"] if isinstance(key, int) and not 0 <= key < sum(own)]:
        raise ValueError(f"The state has parameters that the optimizer has not: {strange}.")


# --- shared ------------------------------------------------------------------------------------------


def _gathered(state: Any) -> Any:
    """Copies of a tree's tensors, whole and on the CPU, on rank 0; ``{}`` elsewhere."""
    leaves, _ = pytree.flatten(state, is_local=True)
    whole = [leaf.full_tensor() if is_sharded(leaf) else leaf for leaf in leaves]
    if current_model().get_rank() != 0:
        return {}
    return pytree.rebuild(state, (_copy(leaf) for leaf in whole))


def _copy(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def _as_sharded(value: Any, parameter: Any) -> Any:
    """``value``, which every rank has, as the shards of ``parameter`` if it is of its shape."""
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
