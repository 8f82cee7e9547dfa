"""Distributed utilities: the same script runs in one process, in several, on GPUs, with Horovod and XLA.

``import ignite_dist as idist``. Every function of this package works in any context, and without one.
"""

from ignite_dist import utils as utils  # for scripts that call ignite.distributed.utils
from ignite_dist.auto import auto_model, auto_optim
from ignite_dist.collectives.all_gather import all_gather, all_gather_ragged, all_gather_tensors_with_shapes
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
from ignite_dist.comp_models import (
    has_hvd_support,
    has_native_dist_support,
    has_xla_support,
    register_computation_model,
    registered_computation_models,
)
from ignite_dist.comp_models.work import Work
from ignite_dist.context.console import print as print  # not in __all__: a star import keeps Python's own
from ignite_dist.context.console import progress
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
from ignite_dist.data.gathering import gather_in_order
from ignite_dist.data.loaders import auto_dataloader
from ignite_dist.data.samplers import DistributedProxySampler, ExactSampler
from ignite_dist.data.splitting import sampler_kwargs, split
from ignite_dist.data.to_device import to_device
from ignite_dist.diagnostics.profiler.timeline import timeline
from ignite_dist.diagnostics.verification import debug, watch
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
    original,
)
from ignite_dist.internals.tracing import untrace_package
from ignite_dist.launcher import Parallel, spawn
from ignite_dist.launcher.restarts import restart_count
from ignite_dist.training.accumulation import accumulate
from ignite_dist.training.checkpointing.checkpoints import latest, load_checkpoint, save_checkpoint
from ignite_dist.training.data_meshes import mesh
from ignite_dist.training.gradient_sync import DDPSyncStrategy, clip_grad_norm, grad_sync, no_sync
from ignite_dist.training.interruption import interrupted
from ignite_dist.training.parameter_averaging import average_parameters
from ignite_dist.training.seeding import seed_everything, shared_seed
from ignite_dist.training.state_dicts import (
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
)
from ignite_dist.training.uneven_inputs import join
from ignite_dist.training.wrapped_models import mark_forward_method, unwrap_model
from ignite_dist.values.safe_objects import safe_objects

__version__ = "0.1.0"

untrace_package(__name__)  # for torch.compile

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
    "accumulate",
    "all_gather",
    "all_gather_ragged",
    "all_gather_tensors_with_shapes",
    "all_reduce",
    "all_to_all",
    "all_true",
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
    "debug",
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
    "interrupted",
    "is_global_zero",
    "is_local_zero",
    "join",
    "latest",
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
    "original",
    "optimizer_state",
    "progress",
    "raise_together",
    "reduce",
    "reduce_scatter",
    "restart_count",
    "register_computation_model",
    "registered_computation_models",
    "safe_objects",
    "save_checkpoint",
    "sampler_kwargs",
    "scatter",
    "seed_everything",
    "set_local_rank",
    "shared_seed",
    "show_config",
    "spawn",
    "split",
    "sync",
    "timeline",
    "to_device",
    "unwrap_model",
    "watch",
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
