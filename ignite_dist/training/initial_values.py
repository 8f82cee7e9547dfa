"""Where a model of ``auto_model`` gets its device and its initial values from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.random import fork_rng

from ignite_dist.collectives.buckets import broadcast_tensors
from ignite_dist.collectives.checks import check_dense, check_writable, is_sharded
from ignite_dist.collectives.coordination import Caller, exchange_outcomes
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.internals.call_sites import warn_user
from ignite_dist.training.comparisons import named_tensors
from ignite_dist.training.data_meshes import DataMesh
from ignite_dist.training.state_dicts import as_sharded

State = Mapping[str, Any]


def place(live: ComputationModel, model: Module) -> None:
    """Move ``model``, which has values, to this rank's device."""
    device = live.device()
    if any(value.device != device for value in _tensors(model)):
        _move(model, device)


def sent_of_frozen(model: Module) -> dict[str, Tensor]:
    """The tensors that :func:`equalise_frozen` fills, by name."""
    return {name: one for name, one in named_tensors(model) if not is_sharded(one) and _can_be_written(one)}


def equalise(live: ComputationModel, model: Module, data: DataMesh) -> None:
    """Fill the parameters and buffers with those of the first rank of the data group.

    Nothing is sent for a ``DTensor`` to ranks that hold another shard. Plain tensors become equal in the
    tensor groups, too.
    """
    tensors = _tensors(model)
    plain = [one for one in tensors if not is_sharded(one)]
    for group in data.tensor_groups:
        _broadcast(live, plain, group)
    with torch.no_grad():
        local = [one.to_local() if is_sharded(one) else one for one in tensors]  # type: ignore[attr-defined]
    _broadcast(live, local, data.group)


def equalise_frozen(live: ComputationModel, model: Module, group: Group) -> None:
    """Fill a model without trainable parameters with the values of the first rank of ``group``.

    Shards are left alone, because no mesh was named. So are sparse, quantized and expanded tensors, with a
    warning: no collective fills them.
    """
    sent = sent_of_frozen(model)
    if left := [name for name, one in named_tensors(model) if name not in sent and not is_sharded(one)]:
        warn_user(
            f"auto_model leaves {', '.join(left)} of this frozen model as they are on each rank: sparse, "
            "quantized and expanded tensors are not sent."
        )
    _broadcast(live, list(sent.values()), group)


def _can_be_written(tensor: Tensor) -> bool:
    try:
        check_dense("auto_model", tensor)
        check_writable("auto_model", tensor)
    except (TypeError, ValueError):
        return False
    return True


def _broadcast(live: ComputationModel, tensors: list[Tensor], group: Group) -> None:
    if len(group.ranks) > 1:
        broadcast_tensors(live, tensors, group.ranks[0], group)


# --- the meta device ---------------------------------------------------------------------------------


def is_on_meta(model: Module) -> bool:
    """True if some tensor of ``model`` has no values."""
    return any(one.is_meta for one in _tensors(model))


def bring_from_meta(live: ComputationModel, model: Module, data: DataMesh, state: State | None) -> bool:
    """Allocate a model on the meta device, if the first rank of the data group has values for it.

    Every rank of the group calls this.

    Returns:
        True if no rank has values. Then call :func:`initialise` after the model was sharded.

    Raises:
        ValueError: no rank has values, and a module cannot initialise itself; or only the first rank has
            none. Raised on every rank.
    """
    names = _names_on_meta(model)
    rows: list[Any] = exchange_outcomes(live, data.group, None, (len(names), names[:3]), Caller("auto_model"))
    counts = [count for count, _ in rows]
    if not counts[0]:
        if names:
            _move(model, live.device(), is_empty=True)
        return False
    if len(set(counts)) > 1:
        raise ValueError(
            f"The model of rank {data.group.ranks[0]} has tensors on the meta device: {rows[0][1]}, ... "
            "Models of other ranks have values, but only the values of the first rank count."
        )
    check_initialisable(model, state)
    return True


def check_initialisable(model: Module, state: State | None) -> None:
    """Raise ``ValueError`` if a tensor on the meta device would get no values from :func:`initialise`."""
    names = _without_initialisation(model, state)
    if names:
        raise ValueError(
            f"The model has tensors on the meta device that nothing gives values to: {names[:3]}, ... Their "
            "module needs a method reset_parameters(). Or pass a whole state (auto_model(state=...)), or "
            "allocate the model (model.to_empty(device=...)) and set its values. With several ranks only the "
            "first rank needs values, with strategy='fsdp' or a mesh."
        )


def _without_initialisation(model: Module, state: State | None) -> list[str]:
    """The names of tensors on the meta device that are in no ``state`` and no initialised module."""
    saved = set() if state is None else set(model.state_dict())
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, tensor in _own_tensors(module)
        if tensor.is_meta and not hasattr(module, "reset_parameters")
        if (f"{prefix}.{name}" if prefix else name) not in saved
    ]


def initialise(live: ComputationModel, model: Module, groups: Sequence[Group], state: State | None) -> None:
    """Allocate this rank's shards of a model on the meta device, and give them values.

    Each module is initialised by its ``reset_parameters()`` on whole tensors, one module at a time, of which
    this rank keeps its shards. So the values do not depend on the number of ranks. With ``state`` only the
    modules with tensors that are not in it are initialised. Every rank of ``groups`` calls this: the first
    rank of each has the seed.
    """
    seed = int(torch.randint(2**62, (), device="cpu"))
    for group in groups:
        if len(group.ranks) > 1:
            seed = exchange_outcomes(live, group, None, seed, Caller("auto_model"))[0]
    left = set(_names_on_meta(model)) - (set() if state is None else set(model.state_dict()))
    device = live.device()
    if device.type == "xla":  # whose random state cannot be restored; place() moves the model there
        device = torch.device("cpu")
    _move(model, device, is_empty=True)
    kinds = {"device_type": device.type} if device.type in ("cuda", "xpu") else {}
    with fork_rng([device] if kinds else [], **kinds), torch.no_grad():
        live.training.seed(seed)
        for prefix, module in model.named_modules():
            names = {f"{prefix}.{name}" if prefix else name for name, _ in _own_tensors(module)}
            if not left.isdisjoint(names):
                _reset(module)


def _reset(module: Module) -> None:
    """Call ``reset_parameters()`` while the sharded parameters of ``module`` are whole."""
    shards = {name: one for name, one in _own_tensors(module) if is_sharded(one)}
    whole: dict[str, Tensor] = {}
    for name, shard in shards.items():
        values = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
        is_parameter = isinstance(shard, Parameter)
        whole[name] = Parameter(values, shard.requires_grad) if is_parameter else values
    try:
        for name, values in whole.items():
            setattr(module, name, values)
        module.reset_parameters()  # type: ignore[operator]
    finally:
        for name, shard in shards.items():
            setattr(module, name, shard)
    for name, shard in shards.items():
        shard.copy_(as_sharded(whole[name].detach(), shard))


# --- shared ------------------------------------------------------------------------------------------


def _tensors(model: Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _own_tensors(module: Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of ``module`` without those of its children."""
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _names_on_meta(model: Module) -> list[str]:
    return [name for name, tensor in named_tensors(model) if tensor.is_meta]


def _move(model: Module, device: torch.device, is_empty: bool = False) -> None:
    """Move ``model`` to ``device``, or only allocate it there, and keep tied parameters tied.

    An XLA device makes a new parameter for each use of a tied one.
    """
    places: dict[Parameter, list[tuple[Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, name))
    if is_empty:
        model.to_empty(device=device)
    else:
        model.to(device)
    for (module, name), *others in places.values():
        for other_module, other_name in others:
            setattr(other_module, other_name, getattr(module, name))
