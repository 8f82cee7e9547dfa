"""Distributed utilities: the same script runs in one process, in several, on GPUs, with Horovod and XLA.

``import ignite_dist as idist``. Every function of this package works in any context, and without one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ignite_dist.internals.collector import collector_paused

with collector_paused():
    from ignite_dist.collectives.all_gather import (
        all_gather,
        all_gather_ragged,
        all_gather_tensors_with_shapes,
    )
    from ignite_dist.collectives.all_reduce import all_reduce
    from ignite_dist.collectives.all_to_all import all_to_all
    from ignite_dist.collectives.barrier import barrier, new_group
    from ignite_dist.collectives.broadcast import broadcast
    from ignite_dist.collectives.coordination import (
        all_true,
        any_true,
        one_rank_first,
        one_rank_only,
        raise_together,
    )
    from ignite_dist.collectives.gather_scatter import gather, scatter
    from ignite_dist.collectives.reduce_scatter import reduce, reduce_scatter
    from ignite_dist.comp_models import register_computation_model, registered_computation_models
    from ignite_dist.comp_models.work import Work
    from ignite_dist.context.console import print as print  # not in __all__: a star import keeps Python's own
    from ignite_dist.context.console import progress_bar
    from ignite_dist.context.identity import (
        backend,
        device,
        environment,
        get_local_rank,
        get_nnodes,
        get_node_rank,
        get_nproc_per_node,
        get_rank,
        get_world_size,
        hostname,
        is_global_zero,
        is_local_zero,
        model_name,
        node_group,
        set_local_rank,
        show_config,
        world_group,
    )
    from ignite_dist.context.live import available_backends, finalize, initialize, sync
    from ignite_dist.diagnostics.profiler.timeline import record_timeline
    from ignite_dist.diagnostics.verification import compare_calls, watch_for_hangs
    from ignite_dist.errors import (
        CollectiveMismatchError,
        DistributedError,
        EnvironmentVariablesError,
        HostLostError,
        LaunchError,
        MissingRanksError,
        RankFailedError,
        UnsafeObjectError,
        WorkerExitedError,
        WorkerRaisedError,
        original_exception,
    )
    from ignite_dist.internals import limits
    from ignite_dist.internals.tracing import untrace_package
    from ignite_dist.values.safe_objects import safe_objects

    untrace_package(__name__)  # for torch.compile

if TYPE_CHECKING:
    from ignite_dist import utils as utils  # for scripts that call ignite.distributed.utils
    from ignite_dist.auto import auto_model, auto_optim
    from ignite_dist.comp_models import has_hvd_support, has_native_dist_support, has_xla_support
    from ignite_dist.data.gathering import gather_in_order
    from ignite_dist.data.loaders import auto_dataloader
    from ignite_dist.data.samplers import DistributedProxySampler, ExactSampler
    from ignite_dist.data.splitting import sampler_kwargs, split_by_rank
    from ignite_dist.data.to_device import to_device
    from ignite_dist.launcher import Parallel, spawn
    from ignite_dist.launcher.restarts import restart_count
    from ignite_dist.training.accumulation import accumulate_gradients
    from ignite_dist.training.checkpointing.checkpoints import (
        latest_checkpoint,
        load_checkpoint,
        save_checkpoint,
    )
    from ignite_dist.training.data_meshes import mesh
    from ignite_dist.training.gradient_sync import DDPSyncStrategy, clip_grad_norm, grad_sync, no_sync
    from ignite_dist.training.interruption import any_interrupted
    from ignite_dist.training.parameter_averaging import average_parameters
    from ignite_dist.training.seeding import seed_everything, shared_seed
    from ignite_dist.training.state_dicts import (
        load_model_state,
        load_optimizer_state,
        model_state,
        optimizer_state,
    )
    from ignite_dist.training.uneven_inputs import uneven_inputs
    from ignite_dist.training.wrapped_models import mark_forward_method, unwrap_model

__version__ = "0.1.0"

# The old names, for scripts from before version 0.2. They are not in __all__, so dir() does not list them.
debug = compare_calls
original = original_exception
progress = progress_bar
timeline = record_timeline
watch = watch_for_hangs
if TYPE_CHECKING:
    from ignite_dist.training.uneven_inputs import uneven_inputs as join  # noqa: F401

    accumulate = accumulate_gradients
    interrupted = any_interrupted
    latest = latest_checkpoint
    split = split_by_rank

# The modules that are imported when one of these names is first used.
_LATER = {
    "ignite_dist.auto": ("auto_model", "auto_optim"),
    "ignite_dist.comp_models": ("has_hvd_support", "has_native_dist_support", "has_xla_support"),
    "ignite_dist.data.gathering": ("gather_in_order",),
    "ignite_dist.data.loaders": ("auto_dataloader",),
    "ignite_dist.data.samplers": ("DistributedProxySampler", "ExactSampler"),
    "ignite_dist.data.splitting": ("sampler_kwargs", "split_by_rank"),
    "ignite_dist.data.to_device": ("to_device",),
    "ignite_dist.launcher": ("Parallel", "spawn"),
    "ignite_dist.launcher.restarts": ("restart_count",),
    "ignite_dist.training.accumulation": ("accumulate_gradients",),
    "ignite_dist.training.checkpointing.checkpoints": (
        *("latest_checkpoint", "load_checkpoint", "save_checkpoint"),
    ),
    "ignite_dist.training.data_meshes": ("mesh",),
    "ignite_dist.training.gradient_sync": ("DDPSyncStrategy", "clip_grad_norm", "grad_sync", "no_sync"),
    "ignite_dist.training.interruption": ("any_interrupted",),
    "ignite_dist.training.parameter_averaging": ("average_parameters",),
    "ignite_dist.training.seeding": ("seed_everything", "shared_seed"),
    "ignite_dist.training.state_dicts": (
        *("load_model_state", "load_optimizer_state", "model_state", "optimizer_state"),
    ),
    "ignite_dist.training.uneven_inputs": ("uneven_inputs",),
    "ignite_dist.training.wrapped_models": ("mark_forward_method", "unwrap_model"),
}
_MODULE_OF = {name: module for module, names in _LATER.items() for name in names}
_MODULES = ("auto", "data", "launcher", "training", "utils", "workers")
_OLD_NAMES = {
    "accumulate": "accumulate_gradients",
    "interrupted": "any_interrupted",
    "join": "uneven_inputs",
    "latest": "latest_checkpoint",
    "split": "split_by_rank",
}


def _import_later(name: str) -> Any:
    known = _OLD_NAMES.get(name, name)
    try:
        if known in _MODULES:
            value: Any = import_module(f"{__name__}.{known}")
        elif known in _MODULE_OF:
            value = getattr(import_module(_MODULE_OF[known]), known)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    except (MemoryError, OSError) as error:
        if not limits.lacks_memory(error):
            raise
        raise limits.memory_error(name) from None
    untrace_package(__name__)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__ = _import_later


__all__ = [
    "CollectiveMismatchError",
    "DDPSyncStrategy",
    "DistributedError",
    "DistributedProxySampler",
    "EnvironmentVariablesError",
    "ExactSampler",
    "HostLostError",
    "LaunchError",
    "MissingRanksError",
    "Parallel",
    "RankFailedError",
    "UnsafeObjectError",
    "Work",
    "WorkerExitedError",
    "WorkerRaisedError",
    "accumulate_gradients",
    "all_gather",
    "all_gather_ragged",
    "all_gather_tensors_with_shapes",
    "all_reduce",
    "all_to_all",
    "all_true",
    "any_interrupted",
    "any_true",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "available_backends",
    "average_parameters",
    "backend",
    "barrier",
    "broadcast",
    "clip_grad_norm",
    "compare_calls",
    "device",
    "environment",
    "finalize",
    "gather",
    "gather_in_order",
    "get_local_rank",
    "get_nnodes",
    "get_node_rank",
    "get_nproc_per_node",
    "get_rank",
    "get_world_size",
    "grad_sync",
    "has_hvd_support",
    "has_native_dist_support",
    "has_xla_support",
    "hostname",
    "initialize",
    "is_global_zero",
    "is_local_zero",
    "latest_checkpoint",
    "load_checkpoint",
    "load_model_state",
    "load_optimizer_state",
    "mark_forward_method",
    "mesh",
    "model_name",
    "model_state",
    "new_group",
    "no_sync",
    "node_group",
    "one_rank_first",
    "one_rank_only",
    "optimizer_state",
    "original_exception",
    "progress_bar",
    "raise_together",
    "record_timeline",
    "reduce",
    "reduce_scatter",
    "register_computation_model",
    "registered_computation_models",
    "restart_count",
    "safe_objects",
    "sampler_kwargs",
    "save_checkpoint",
    "scatter",
    "seed_everything",
    "set_local_rank",
    "shared_seed",
    "show_config",
    "spawn",
    "split_by_rank",
    "sync",
    "to_device",
    "uneven_inputs",
    "unwrap_model",
    "watch_for_hangs",
    "world_group",
]


# Only scripts that were written for Ignite need these names.
_OF_OLD_SCRIPTS = {
    "DistributedProxySampler",
    "all_gather_tensors_with_shapes",
    "has_hvd_support",
    "has_native_dist_support",
    "has_xla_support",
    "model_name",
    "registered_computation_models",
    "set_local_rank",
    "show_config",
    "sync",
}


def __dir__() -> list[str]:
    """The names that new scripts use, for completion in editors and consoles."""
    return sorted({*__all__, "print"} - _OF_OLD_SCRIPTS)
