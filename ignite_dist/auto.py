"""Adapt a model and an optimizer to the live context. Data loaders are in ``data``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ignite_dist.collectives.buckets import broadcast_tensors
from ignite_dist.collectives.checks import is_sharded
from ignite_dist.collectives.coordination import Caller
from ignite_dist.collectives.interrupts import one_call
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.training import check_no_scheduler
from ignite_dist.context.live import current_model
from ignite_dist.data.loaders import auto_dataloader
from ignite_dist.data.model_buffers import group_of_parameters, remember_model
from ignite_dist.data.samplers import DistributedProxySampler
from ignite_dist.internals import _torch
from ignite_dist.internals.arguments import check_module, kind_of
from ignite_dist.internals.call_sites import warn_user
from ignite_dist.training.comparisons import (
    check_same_model,
    check_same_optimizer,
    leaf_modules,
    named_tensors,
)
from ignite_dist.training.data_meshes import DataMesh, check_shardable, find_data_mesh
from ignite_dist.training.gradient_averaging import (
    agree_on_gradients,
    average_gradients,
    average_in_step,
    average_losses,
)
from ignite_dist.training.gradient_sync import fsdp_modules
from ignite_dist.training.initial_values import (
    State,
    bring_from_meta,
    check_initialisable,
    equalise,
    equalise_frozen,
    initialise,
    is_on_meta,
    place,
    sent_of_frozen,
)
from ignite_dist.training.state_dicts import load_model_state
from ignite_dist.training.unaveraged_parameters import watch_first_step, watch_frozen
from ignite_dist.training.wrapped_models import unwrap_model
from ignite_dist.values import meshes
from ignite_dist.values.gradients import parameters_of

# Scripts written for pytorch-ignite import auto_dataloader and DistributedProxySampler from here.
__all__ = ["DistributedProxySampler", "auto_dataloader", "auto_model", "auto_optim"]

_WRAPPERS = (DistributedDataParallel, torch.nn.DataParallel)
_COMM_HOOKS = ("fp16", "bf16", "powersgd")


@one_call
def auto_model(
    model: Module,
    sync_bn: bool = False,
    wrapper: Callable[..., Module] | None = None,
    comm_hook: Any = None,
    *,
    buffer_hook: Any = None,
    strategy: str = "ddp",
    wrap: Sequence[type[Module]] = (),
    mesh: DeviceMesh | None = None,
    state: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Module:
    """``model`` on :func:`device`, wrapped for the live context. Every rank that has the model calls this.

    torch.distributed with more than one rank: ``DistributedDataParallel``, or sharding in place with
    ``strategy="fsdp"``. Several GPUs without a context: ``DataParallel``. With Horovod and XLA the optimizer
    averages gradients (:func:`auto_optim`), so the module itself is returned. On XLA the module gets new
    parameters, so make the optimizer afterwards. All ranks take the parameters and buffers of rank 0 (of the
    first rank of ``process_group`` or ``mesh``). So does a module without trainable parameters, a teacher for
    example, which gets no wrapper.

    Unfreeze parameters before this call: ``DistributedDataParallel`` does not average gradients of parameters
    that are frozen now. A backward pass that computes such a gradient raises ``RuntimeError``.

    A step may have any number of backward passes, the same on every rank. A pass that only some ranks make
    belongs in :func:`no_sync`.

    See the guide ``docs/training.md``.

    Args:
        model: any module. If it is on the meta device, the ``reset_parameters()`` of its modules initialise
            it, one module at a time. The values are those of one process with rank 0's seed.
        sync_bn: replace BatchNorm by torch's SyncBatchNorm, under Horovod by Horovod's. Both need GPUs. On
            the CPU and with XLA this option only warns.
        wrapper: a class to use instead of ``DistributedDataParallel``, with the same arguments.
        comm_hook: how ``DistributedDataParallel`` sends gradients: torch's hooks ``"fp16"``, ``"bf16"`` (NCCL
            only) or ``"powersgd"``; a ``torch.distributed.BuiltinCommHookType``; or a pair ``(state, hook)``
            for ``register_comm_hook``. Ignored without such a wrapper. Without a hook, gradients go over
            shared memory on the CPUs of one machine.
        buffer_hook: ``(state, hook)`` for the buffers, optionally with its position in the forward pass.
        strategy: ``"ddp"``, or ``"fsdp"`` for torch's FSDP2: parameters, gradients and optimizer state are
            sharded, so make the optimizer afterwards.
        wrap: with ``"fsdp"``, the classes of modules that are gathered one at a time: the layers of a
            transformer. By default the whole model is gathered at once, which modules that share a
            weight need.
        mesh: the ranks that train the model: a ``DeviceMesh`` such as ``idist.mesh(dp=2, tp=2)``; in a block
            ``with mesh:`` the current mesh by default, else all ranks. Gradients are averaged over the data
            dimensions, see :func:`mesh`; those of an unnamed mesh are all dimensions. A model that
            ``parallelize_module`` has made tensor parallel (with ``DTensor`` parameters over the other
            dimensions) keeps its shards: they become equal over the data dimensions only. Its plain
            parameters become equal on all ranks. With ``"fsdp"`` two data dimensions mean replicas of
            shards (HSDP): ``mesh(dp_replicate=2, dp_shard=4)``. With ``"ddp"`` the gradients of a
            tensor-parallel model are averaged at the end of each backward pass, and there is no wrapper:
            ``DistributedDataParallel`` knows no ``DTensor``.
        state: a whole ``state_dict`` on rank 0, and ``{}`` (not None, with which a rank would not take part)
            on all other ranks: :func:`load_model_state` of the result. The model may then be on the meta
            device.
        kwargs: keywords of the wrapper: ``static_graph``, ``bucket_cap_mb``, ...; with ``"fsdp"`` those of
            ``torch.distributed.fsdp.fully_shard``: ``mp_policy``, ``reshard_after_forward``, ...
            Without a wrapper all keywords except ``broadcast_buffers`` are ignored, so scripts can keep them;
            where ``"fsdp"`` has nothing to shard with (one rank without torch.distributed) they warn.
            ``broadcast_buffers=False`` keeps each rank's own buffers, with ``"fsdp"`` too.
            ``find_unused_parameters`` is False by default, as in torch. With True each backward pass first
            walks the autograd graph and exchanges a bitmap. Set True if any pass of any rank does not use
            every parameter; otherwise that pass or the next pass raises.

    Returns:
        The wrapped module, or ``model`` itself.

    Raises:
        CollectiveMismatchError: the models of the ranks differ in the names, order, shapes or dtypes of
            parameters and buffers, in the classes of the innermost modules, in what is frozen (with Horovod
            and XLA each rank may freeze other parameters), or in settings such as ``strategy``; or some ranks
            make another call. Raised on every rank. With a ``wrapper`` of your own the models are compared
            if ``process_group`` or ``mesh`` names the ranks.
        TypeError: ``model`` is not a module.
        ValueError: ``model`` is wrapped already, an unknown ``strategy`` or ``comm_hook``, ``"fsdp"`` or
            ``mesh`` with Horovod or XLA, ``"fsdp"`` after ``auto_optim`` of the model's parameters, DDP
            options with ``"fsdp"`` or a tensor-parallel model, or parameters that are sharded over data
            dimensions or an unknown mesh; raised before any communication. Or ``comm_hook="bf16"`` without
            NCCL; or no rank has values for tensors on the meta device, and their module has no
            ``reset_parameters``; raised on every rank.
    """
    check_module("auto_model", model)
    if any(isinstance(module, _WRAPPERS) for module in model.modules()):
        raise ValueError("auto_model got a model that is wrapped already, in DistributedDataParallel.")
    live = current_model()
    live.groups.check_not_joining()
    given = {"wrapper": wrapper, "comm_hook": comm_hook, "buffer_hook": buffer_hook}
    options = {name: value for name, value in given.items() if value is not None}
    _check_strategy(strategy, sync_bn, wrap, comm_hook, options)
    if live.get_world_size() > 1:
        _warn_of_max_norm(model)
        if strategy == "fsdp":
            _check_not_in_optimizer(live, model)
    data = _find_ranks(live, model, strategy, mesh, kwargs)
    if data.tensor_groups:
        _check_no_options("a tensor-parallel model", sync_bn, options)
    settings = {"sync_bn": sync_bn, "wrap": [one.__name__ for one in wrap], "state": state is not None}
    settings.update(comm_hook=_name_of(comm_hook), buffer_hook=_name_of(buffer_hook))
    _check_same(live, model, strategy, data, wrapper, settings, **kwargs)
    if strategy == "fsdp":
        return _sharded(live, model, wrap, data, state, **kwargs)
    if data.tensor_groups:
        return _replicated(live, model, data, state, **kwargs)
    if is_on_meta(model):
        check_initialisable(model, state)
        initialise(live, model, (), state)  # the wrapper makes the values equal
    place(live, model)
    if data.is_explicit and len(data.group.ranks) < live.get_world_size():
        kwargs["process_group"] = data.group.handle
    with _torch.left_out_of_ddp(model, _unsent_buffers(model)):
        wrapped = live.training.wrap_model(model, sync_bn=sync_bn, **options, **kwargs)
    _adapted(live, model, wrapped, **kwargs)
    return _with_state(wrapped, state)


def _unsent_buffers(model: Module) -> dict[str, Tensor]:
    """The buffers, by name, whose dtypes ``DistributedDataParallel`` cannot broadcast."""
    ignored = _torch.ignored_by_ddp(model)
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name not in ignored
        and (
            buffer.dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64)
            or (buffer.is_floating_point() and buffer.itemsize == 1)  # float8
        )
    }


def _warn_of_max_norm(model: Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and isinstance(module, (Embedding, EmbeddingBag)):
            warn_user(
                f"{type(module).__name__}(max_norm=) {name!r} changes its weight in each forward pass, in "
                "the rows of this rank's batch only. The weights of the ranks will differ: omit max_norm, "
                "and renormalise the weight after optimizer.step()."
            )


def _check_not_in_optimizer(live: ComputationModel, model: Module) -> None:
    own = {*map(id, model.parameters())}
    if any(
        id(one) in own for optimizer in live.training.optimizers.values() for one in parameters_of(optimizer)
    ):
        raise ValueError(
            "auto_optim has the parameters of this model, and auto_model(strategy='fsdp') replaces them: the "
            "optimizer would train nothing. Call auto_model first, then make the optimizer."
        )


def _adapted(
    live: ComputationModel,
    model: Module,
    wrapped: Module,
    broadcast_buffers: bool = True,
    process_group: Any = None,
    **_: Any,
) -> None:
    """Make the values of a model equal on all ranks if its wrapper has not, and remember the model."""
    if live.get_world_size() == 1:
        return
    inner = unwrap_model(wrapped)
    is_trained = _is_trained(model)
    if is_trained:
        group = live.training.gradient_group(wrapped, ())
        if wrapped is model:  # a wrapper has broadcast the parameters
            equalise(live, model, DataMesh(None, group))
        elif broadcast_buffers and (unsent := _unsent_buffers(model)) and len(group.ranks) > 1:
            broadcast_tensors(live, list(unsent.values()), group.ranks[0], group)
        is_of_user = wrapped is not model and not isinstance(wrapped, DistributedDataParallel)
        shared = [] if is_of_user else _shared_parameters(inner)  # only that wrapper knows its own
        remember_model(live, inner, group, broadcast_buffers, shared)
        live.training.average_further_passes(wrapped, _average_over(live, group))
    else:
        equalise_frozen(live, model, live.groups.resolve(process_group))
    is_averaged_later = is_trained and not isinstance(wrapped, DistributedDataParallel)
    watch_frozen(live, inner, wrapped, is_averaged_later)


def _average_over(live: ComputationModel, group: Group) -> Callable[[list[Parameter]], None]:
    """A function that averages gradients over ``group``, and does nothing after the end of the context."""
    context = weakref.ref(live)  # the model may live longer

    def average(parameters: list[Parameter]) -> None:
        live = context()
        if live is None or not live.is_current():
            return
        with torch.no_grad():  # backward(create_graph=True) leaves it on
            average_gradients(live, agree_on_gradients(live, parameters, group), group)

    return average


def _find_ranks(
    live: ComputationModel, model: Module, strategy: str, mesh: Any, kwargs: Mapping[str, Any]
) -> DataMesh:
    names_no_mesh = mesh is None and meshes.current() is None
    is_left_alone = strategy != "fsdp" and not _is_trained(model) and names_no_mesh
    if live.get_world_size() == 1 or (is_left_alone and any(map(is_sharded, model.parameters()))):
        return DataMesh(None, live.groups.world, is_explicit=False)
    if mesh is None and kwargs.get("process_group") is not None:
        return DataMesh(None, live.groups.world, is_explicit=False)
    if kwargs.get("process_group") is not None:
        raise ValueError("process_group= and mesh= both name the ranks of the model: pass only one of them.")
    if strategy == "fsdp":
        live.training.check_sharding()
    data = find_data_mesh(live, model, mesh)
    if strategy == "fsdp":
        check_shardable(data)
    return data


# Ranks with different values of these keywords make different collectives. Other keywords, for example
# ``device_ids`` and ``output_device``, are not compared: their values differ by rank.
_SAME_KEYWORDS = (
    "bucket_cap_mb",
    "find_unused_parameters",
    "init_sync",
    "reshard_after_forward",
    "static_graph",
)


def _name_of(hook: Any) -> str | None:
    """``hook`` as the ranks compare it."""
    return hook if hook is None or isinstance(hook, str) else getattr(hook, "name", "own")


def _check_same(
    live: ComputationModel,
    model: Module,
    strategy: str,
    data: DataMesh,
    wrapper: Any,
    settings: Mapping[str, Any],
    process_group: Any = None,
    device_mesh: Any = None,
    **kwargs: Any,
) -> None:
    """Compare the settings of the ranks, and the tensors that they will take from one rank."""
    if live.get_world_size() == 1:
        return
    given = {"strategy": strategy, **settings, **{name: kwargs.get(name) for name in _SAME_KEYWORDS}}
    what = ", ".join(f"{name}={value!r}" for name, value in given.items() if value not in (None, False, []))
    caller, named = Caller("auto_model", what), named_tensors(model)
    check = partial(check_same_model, live, modules=leaf_modules(model))
    if strategy == "fsdp" or data.tensor_groups:
        plain = [(name, one) for name, one in named if not is_sharded(one)]
        compared = [(data.group, named), *((group, plain) for group in data.tensor_groups)]
        check(compared, caller, frozen_counts=True)
        return
    members = process_group if device_mesh is None else device_mesh
    if not _is_trained(model):
        group = data.group if data.is_explicit else live.groups.resolve(process_group)
        check([(group, [*sent_of_frozen(model).items()])], caller, frozen_counts=True)
    elif not live.training.averages_in_backward:
        check([(data.group, named)], caller)
    # A wrapper of the user chooses its ranks itself, unless they are named. Then nothing is compared.
    elif wrapper is None or data.is_explicit or members is not None:
        group = data.group if data.is_explicit or members is None else live.groups.resolve(members)
        ignored = {*_torch.ignored_by_ddp(model)}
        if not kwargs.get("broadcast_buffers", True):
            ignored.update(name for name, _ in model.named_buffers())
        sent = [row for row in named if row[0] not in ignored]
        check([(group, sent)], caller, frozen_counts=True)


def _shared_parameters(model: Module) -> list[Parameter]:
    """The parameters without those that DDP or FSDP2 must ignore, which each rank trains for itself."""
    ignored = _torch.ignored_by_ddp(model)
    found = [one for name, one in model.named_parameters() if name not in ignored]
    return [one for one in found if is_sharded(one)] if fsdp_modules(model) else found


def _is_trained(model: Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _with_values(live: ComputationModel, model: Module, data: DataMesh, state: State | None) -> bool:
    """Give every rank of the data group the values of its first rank; False if that rank has none."""
    if bring_from_meta(live, model, data, state):
        return False
    place(live, model)
    equalise(live, model, data)
    return True


def _with_state(model: Module, state: State | None) -> Module:
    if state is not None:
        load_model_state(model, state)
    return model


def _sharded(
    live: ComputationModel,
    model: Module,
    wrap: Sequence[type[Module]],
    data: DataMesh,
    state: State | None,
    broadcast_buffers: bool = True,
    **kwargs: Any,
) -> Module:
    has_values = _with_values(live, model, data, state)
    if not (data.is_explicit and data.mesh is None):
        live.training.shard_model(model, wrap, **({"mesh": data.mesh} if data.mesh else {}), **kwargs)
    return _ready(live, model, data, state, has_values, broadcast_buffers, is_averaged_later=True)


def _replicated(
    live: ComputationModel,
    model: Module,
    data: DataMesh,
    state: State | None,
    broadcast_buffers: bool = True,
    find_unused_parameters: bool = False,
    **_: Any,
) -> Module:
    """A model whose parameters are ``DTensor``s, and are equal on the ranks of the data group."""
    has_values = _with_values(live, model, data, state)
    ready = _ready(live, model, data, state, has_values, broadcast_buffers, is_averaged_later=False)

    def average(parameters: list[Parameter], group: Group) -> None:
        used = agree_on_gradients(live, parameters, group) if find_unused_parameters else parameters
        average_gradients(live, used, group)

    if _is_trained(model):
        live.training.replicate_model(ready, data.group, average)
    return ready


def _ready(
    live: ComputationModel,
    model: Module,
    data: DataMesh,
    state: State | None,
    has_values: bool,
    broadcast_buffers: bool,
    is_averaged_later: bool,
) -> Module:
    """The model with its values, remembered with the ranks that train it."""
    if not has_values:
        initialise(live, model, (*data.tensor_groups, data.group), state)
    if live.get_world_size() > 1:
        inner = unwrap_model(model)
        remember_model(live, inner, data.group, broadcast_buffers, _shared_parameters(inner))
        watch_frozen(live, inner, model, is_averaged_later)
    return _with_state(model, state)


def _check_strategy(
    strategy: str, sync_bn: bool, wrap: Sequence[type[Module]], comm_hook: Any, options: dict[str, Any]
) -> None:
    if strategy not in ("ddp", "fsdp"):
        raise ValueError(f"strategy must be 'ddp' or 'fsdp', got {strategy!r}.")
    if strategy == "ddp" and wrap:
        raise ValueError("wrap= needs strategy='fsdp', but the strategy is 'ddp'.")
    if strategy == "fsdp":
        _check_no_options("strategy='fsdp'", sync_bn, options)
    if isinstance(comm_hook, str) and comm_hook not in _COMM_HOOKS:
        raise ValueError(f"comm_hook must be one of {_COMM_HOOKS}, or (state, hook); got {comm_hook!r}.")


def _check_no_options(what: str, sync_bn: bool, options: dict[str, Any]) -> None:
    if sync_bn or options:
        names = ", ".join([*["sync_bn"] * sync_bn, *options])
        raise ValueError(f"{names}: only DistributedDataParallel supports this, and not {what}.")


@one_call
def auto_optim(optimizer: Optimizer, zero: bool = False, **kwargs: Any) -> Optimizer:
    """``optimizer``, adapted to the live context. It is a new object only under Horovod or with ``zero``.

    Every rank that trains the model calls this, and all in the same order if there are several optimizers.

    If the model's wrapper averages gradients, the optimizer does not: put each trained module through
    :func:`auto_model`, also a learned temperature or the proxies of a metric loss. The first step warns of
    gradients that nothing averages. With XLA, and with a backend without a wrapper, gradients are
    averaged before the step. Under Horovod the result works like ``hvd.DistributedOptimizer``, takes the
    state of rank 0, and gradients are averages when ``backward`` returns.

    On every backend the loss of a closure is averaged over the ranks after each call of the closure, so
    ``torch.optim.LBFGS`` takes the same step on all ranks. ``step`` returns the mean loss.

    See the guide ``docs/training.md``.

    Args:
        optimizer: any torch optimizer.
        zero: shard the optimizer state over all ranks with torch's ``ZeroRedundancyOptimizer``: each rank
            updates some of the parameters and broadcasts them. For a model in ``DistributedDataParallel``
            without ``process_group``. Ignored in a world of one; not supported by Horovod and XLA. Make a
            scheduler after this call, of the result.
        kwargs: under Horovod the keywords of ``hvd.DistributedOptimizer``: ``named_parameters``,
            ``compression``, ``backward_passes_per_step``, ...

    Returns:
        The optimizer to use from now on, for schedulers too.

    Raises:
        CollectiveMismatchError: the optimizers of the ranks that train a model of :func:`auto_model` differ
            in their class, in the number, order or shapes of this model's parameters, in having a state, or
            in settings such as ``lr`` (under Horovod all ranks take the state and the settings of rank 0);
            or some ranks make another call, or pass another ``zero``. Raised on every rank of a group that
            differs. With DDP and FSDP2, parameters of no such model may be each rank's own. If only values
            of parameters differ, because some ranks have loaded weights since, the first rank warns.
        TypeError: ``optimizer`` is not an optimizer.
        ValueError: ``zero`` is True, and the backend does not support it, or only some ranks train the model.
            ``zero`` or ``strategy="fsdp"`` is used with an optimizer whose step needs all parameters
            together (one that requires a closure: LBFGS). Or ``zero`` is True, and a scheduler was made for
            ``optimizer`` before (with one process too). Raised before anything is changed.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"auto_optim takes a torch optimizer, got {kind_of(optimizer)}.")
    live = current_model()
    live.groups.check_not_joining()
    check_same_optimizer(live, optimizer, "zero=True" if zero else "", kwargs.get("process_set"))
    if zero and live.get_world_size() > 1:
        _check_zero(live, optimizer)
        optimizer = live.training.shard_optimizer(optimizer)
    elif zero:  # a script that trains on one process trains on several
        check_no_scheduler(optimizer)
    wrapped = live.training.wrap_optimizer(optimizer, **kwargs)
    live.training.optimizers[id(wrapped)] = wrapped
    if not live.training.averages_gradients and live.get_world_size() > 1:
        average_in_step(wrapped)
    elif live.training.averages_in_backward and live.get_world_size() > 1:
        average_losses(wrapped)
        watch_first_step(wrapped)
    return wrapped


def _check_zero(live: ComputationModel, optimizer: Optimizer) -> None:
    group = group_of_parameters(live, parameters_of(optimizer))
    if len(group.ranks) < live.get_world_size():
        raise ValueError(
            f"zero=True shards over all ranks, but only ranks {list(group.ranks)} train the model, because "
            "of process_group= or mesh=. Do not pass zero=True."
        )
