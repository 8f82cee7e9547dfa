"""Prepares models and optimizers with torch.distributed: DDP and its hooks, FSDP2, ZeRO.

torch's heavy parts are imported inside functions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ignite_dist.comp_models.native import ddp_reduction, further_passes, replicas
from ignite_dist.comp_models.training import Training, check_fsdp_keywords, check_no_scheduler
from ignite_dist.comp_models.transport import Group
from ignite_dist.internals import _torch
from ignite_dist.internals.call_sites import warn_user
from ignite_dist.values.gradients import parameters_of

if TYPE_CHECKING:
    from ignite_dist.comp_models.base import ComputationModel
    from ignite_dist.comp_models.native.transport import NativeTransport

_REPLACED = "_ignite_dist_replaced"  # attribute of a parameter that FSDP2 has replaced by a sharded one


class NativeTraining(Training):
    """Wraps models in DDP, shards models with FSDP2 and optimizers with ZeRO.

    Args:
        context: the context.
        transport: the context's transport.
    """

    averages_gradients: ClassVar[bool] = True
    averages_in_backward: ClassVar[bool] = True

    def __init__(self, context: ComputationModel, transport: NativeTransport) -> None:
        super().__init__(context)
        self._transport = transport

    def wrap_model(
        self,
        model: Module,
        sync_bn: bool = False,
        wrapper: Callable[..., Module] = torch.nn.parallel.DistributedDataParallel,
        comm_hook: Any = None,
        buffer_hook: Any = None,
        **kwargs: Any,
    ) -> Module:
        if self.context.get_world_size() == 1 or not any(
            parameter.requires_grad for parameter in model.parameters()
        ):
            return model
        device, backend = self.context.device(), self.context.backend() or ""
        wrapped = _wrap_model(model, device, backend, sync_bn, wrapper, comm_hook, buffer_hook, kwargs)
        if device.type == "cpu" and comm_hook is None and isinstance(wrapped, DistributedDataParallel):
            self._average_in_memory(wrapped)
        return wrapped

    def _average_in_memory(self, wrapped: DistributedDataParallel) -> None:
        """Let ``wrapped`` average gradients over shared memory if its ranks are on one machine.

        All ranks of its process group call this function.
        """
        handle = wrapped.process_group
        group = self._transport.reducer_group(Group(handle, self._transport.ranks_of(handle)), wrapped)
        if group is not None:
            group.carry_gradients_of(wrapped)

    def wrap_optimizer(self, optimizer: Optimizer, **kwargs: Any) -> Optimizer:
        _check_optimizer(optimizer)
        if self.context.get_world_size() > 1 and any(map(_mesh_of, parameters_of(optimizer))):
            _check_separable(optimizer, "strategy='fsdp' shards its parameters")
        return optimizer

    def check_sharding(self) -> None:
        pass

    def shard_model(self, model: Module, wrap: Sequence[type[Module]], **kwargs: Any) -> Module:
        return _shard_model(model, self.context.device(), wrap, **kwargs)

    def replicate_model(
        self, model: Module, group: Group, average: Callable[[list[Parameter], Group], None]
    ) -> None:
        replicas.replicate(model, group, average)

    def average_further_passes(self, model: Module, average: Callable[[list[Parameter]], None]) -> None:
        if isinstance(model, DistributedDataParallel):
            further_passes.average_further_passes(model, average)

    def prepare_pass(self, model: Module) -> None:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel) and torch.is_grad_enabled():
                _torch.rebuild_buckets(module)

    def has_seen_pass(self, model: Module) -> bool:
        return further_passes.has_seen_pass(model)

    def shard_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return _shard_optimizer(optimizer)

    def gradient_group(self, model: Module, optimizers: Sequence[Optimizer]) -> Group:
        groups = {self.context.transport.ranks_of(handle): handle for handle in _process_groups(model)}
        groups.update((group.ranks, group.handle) for group in replicas.groups_of(model))
        if len(groups) > 1:
            raise ValueError(
                "The parts of the model have process groups with different ranks: "
                f"{[list(ranks) for ranks in groups]}. Call this function for each part."
            )
        if groups:
            ranks, handle = next(iter(groups.items()))
            if len(ranks) < self.context.get_world_size():
                return Group(handle, ranks)
        return self.context.groups.world

    def mark_averaged(self, model: Module) -> None:
        _mark_averaged(model)
        further_passes.note_average(model)

    def accumulate(self, model: Module, optimizers: Sequence[Optimizer]) -> AbstractContextManager[None]:
        return _accumulating(model)

    def average_in_block(
        self, model: Module, optimizers: Sequence[Optimizer]
    ) -> AbstractContextManager[None]:
        return _averaging_in_block(model)

    def join(
        self, model: Module, optimizer: Optimizer | None, **kwargs: Any
    ) -> AbstractContextManager[list[int]]:
        if self.context.get_world_size() == 1:  # wrap_model has added no DistributedDataParallel
            return nullcontext([])
        return _joined(model, optimizer, kwargs)


# --- DistributedDataParallel -------------------------------------------------------------------------


def _wrap_model(
    model: Module,
    device: torch.device,
    backend: str,
    sync_bn: bool,
    wrapper: Callable[..., Module],
    comm_hook: Any,
    buffer_hook: Any,
    kwargs: dict[str, Any],
) -> Module:
    """``model`` in ``wrapper``, with its hooks; see ``auto_model``."""
    mesh = kwargs.get("device_mesh")
    group = kwargs.get("process_group") if mesh is None else mesh.get_group()
    hook = _find_hook(comm_hook, backend, group)
    if sync_bn and device.type == "cpu":
        warn_user("sync_bn=True leaves BatchNorm as it is: torch's SyncBatchNorm needs a GPU.")
    elif sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model, group)  # type: ignore[no-untyped-call]
    if device.type != "cpu":
        if "device_ids" in kwargs:
            raise ValueError(f"Omit device_ids={kwargs['device_ids']!r}: it is always this rank's {device}.")
        kwargs["device_ids"] = [device.index]
    wrapped: Any = wrapper(model, **kwargs)
    if isinstance(hook, dist.BuiltinCommHookType):
        _torch.register_builtin_hook(wrapped, hook)
    elif hook is not None:
        wrapped.register_comm_hook(*hook)
    if buffer_hook is not None:
        _torch.register_buffer_hook(wrapped, *buffer_hook)
    return wrapped  # type: ignore[no-any-return]


def _find_hook(comm_hook: Any, backend: str, group: Any) -> Any:
    """Torch's state and hook for the name ``comm_hook``. Torch's hooks reduce over all ranks without a group.

    Raises:
        ValueError: the backend does not support the hook.
    """
    if not isinstance(comm_hook, str):
        return comm_hook
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if comm_hook == "powersgd":
        return powerSGD_hook.PowerSGDState(group), powerSGD_hook.powerSGD_hook
    if comm_hook == "fp16":
        return group, default_hooks.fp16_compress_hook
    if backend not in ("nccl", "xccl"):  # torch checks this only after it has wrapped the model
        raise ValueError(f"comm_hook='bf16' needs NCCL, and this backend is {backend!r}. Use 'fp16'.")
    return group, default_hooks.bf16_compress_hook


@contextmanager
def _averaging_in_block(model: Module) -> Iterator[None]:
    with replicas.average_after_block(model), ddp_reduction.complete_in_block(model):
        yield


@contextmanager
def _accumulating(model: Module) -> Iterator[None]:
    """Keep every DDP module, and every replica, in ``model`` from averaging gradients.

    FSDP2 averages in each backward pass, which gives the same sums. Otherwise it would keep the gradients of
    whole parameters, which need more memory, outside of ``grad``, where ``zero_grad`` does not drop them.
    """
    with ExitStack() as stack:
        stack.enter_context(replicas.local_in_block(model))
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                if module.static_graph and not _torch.has_learnt_static_graph(module):
                    raise ValueError(
                        "With static_graph=True the first backward pass must average gradients, because "
                        "torch learns the graph from it. Do not accumulate before it, or omit static_graph."
                    )
                stack.enter_context(module.no_sync())
        yield


def _process_groups(model: Module) -> list[Any]:
    """The process group of each ``DistributedDataParallel`` in ``model``."""
    return [module.process_group for module in model.modules() if isinstance(module, DistributedDataParallel)]


def _mesh_of(parameter: Parameter) -> Any:
    """The device mesh over which FSDP2 has sharded ``parameter``, or None."""
    return getattr(parameter, "device_mesh", None)


def _mark_averaged(model: Module) -> None:
    """Make the next forward pass broadcast rank 0's buffers. DDP does so only after an averaging pass."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module.require_forward_param_sync = True


@contextmanager
def _joined(model: Module, optimizer: Optimizer | None, kwargs: dict[str, Any]) -> Iterator[list[int]]:
    """Torch's ``Join`` for every ``DistributedDataParallel`` in ``model`` and for a ZeRO optimizer."""
    from torch.distributed.algorithms.join import Join, Joinable

    fsdp = sys.modules.get("torch.distributed.fsdp")
    modules = list(model.modules())
    if fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in modules):
        raise ValueError(
            "uneven_inputs() does not support models sharded by FSDP2: every forward pass needs all ranks, "
            "and torch cannot replace a rank without data. Give all ranks the same number of batches, or "
            "stop all ranks together: any_true(...)."
        )
    joinables: list[Any] = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if not joinables:
        raise ValueError(
            "uneven_inputs() needs a model from auto_model, and this model has no DistributedDataParallel."
        )
    if isinstance(optimizer, Joinable):  # a ZeroRedundancyOptimizer
        joinables.append(optimizer)  # type: ignore[unreachable]
    with Join(joinables, **kwargs):
        yield []  # empty: Join itself makes the parameters equal


# --- shards ------------------------------------------------------------------------------------------


def _check_optimizer(optimizer: Optimizer) -> None:
    """Raise ValueError if FSDP2 has replaced the parameters of the optimizer: nothing uses them any more."""
    if any(hasattr(parameter, _REPLACED) for parameter in parameters_of(optimizer)):
        raise ValueError(
            "The optimizer was made before auto_model(strategy='fsdp'), which has replaced its parameters by "
            "shards: its steps would change nothing. First model = idist.auto_model(model, strategy='fsdp'), "
            "then make the optimizer of model.parameters()."
        )


def _check_separable(optimizer: Optimizer, sharding: str) -> None:
    """Raise if the optimizer's step on some parameters depends on its other parameters.

    No attribute shows this. This function refuses optimizers that need a closure, because their line search
    calls the closure a number of times that depends on all parameters.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} needs a closure and computes a step from all parameters together, "
            f"but {sharding} over the ranks. Omit this option, or use an optimizer that updates each "
            "parameter separately."
        )


def _shard_model(model: Module, device: torch.device, wrap: Sequence[type[Module]], **kwargs: Any) -> Module:
    """Shard ``model`` with FSDP2 in place: first its modules of the classes ``wrap``, then the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    check_fsdp_keywords(kwargs)
    kwargs.setdefault("mesh", init_device_mesh(device.type, (dist.get_world_size(),)))
    before = list(model.parameters())
    for module in reversed(list(model.modules())):  # from the inside out
        if module is not model and isinstance(module, tuple(wrap)):
            fully_shard(module, **kwargs)
    fully_shard(model, **kwargs)
    kept = set(model.parameters())  # those of ignored_params=
    for parameter in before:
        if parameter not in kept:
            setattr(parameter, _REPLACED, True)
    return model


def _shard_optimizer(optimizer: Optimizer) -> Optimizer:
    """A ``ZeroRedundancyOptimizer`` with the class, parameter groups, state and options of ``optimizer``."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer
    _check_separable(optimizer, "zero=True shards its state")
    check_no_scheduler(optimizer)
    # `defaults` may have keys that __init__ does not accept, such as AdamW's decoupled_weight_decay.
    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    groups = [
        {name: value for name, value in group.items() if name == "params" or name in accepted}
        for group in optimizer.param_groups
    ]
    sharded = ZeroRedundancyOptimizer(groups, type(optimizer), **options)
    for group, other in zip(sharded.param_groups, optimizer.param_groups, strict=True):
        group.update({name: value for name, value in other.items() if name != "params"})  # such as initial_lr
    for hooks, others in zip(_torch.step_hooks(sharded), _torch.step_hooks(optimizer), strict=True):
        hooks.update(others)
    if optimizer.state:
        sharded.load_state_dict(optimizer.state_dict())
    return sharded
