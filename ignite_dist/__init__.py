"""Distributed utilities: one script for one process, several, GPUs, Horovod and XLA.

``import ignite_dist as idist``. Every function here works in any context, and without one.
"""

from ignite_dist.auto import DistributedProxySampler, auto_dataloader, auto_model, auto_optim
from ignite_dist.collectives import (
    all_gather,
    all_gather_ragged,
    all_gather_tensors_with_shapes,
    all_reduce,
    barrier,
    broadcast,
    new_group,
)
from ignite_dist.comp_models import (
    has_hvd_support,
    has_native_dist_support,
    has_xla_support,
    register_computation_model,
    registered_computation_models,
)
from ignite_dist.context import (
    available_backends,
    backend,
    device,
    finalize,
    get_local_rank,
    get_nnodes,
    get_node_rank,
    get_nproc_per_node,
    get_rank,
    get_world_size,
    hostname,
    initialize,
    model_name,
    set_local_rank,
    show_config,
    sync,
)
from ignite_dist.control import one_rank_first, one_rank_only
from ignite_dist.errors import (
    CollectiveMismatchError,
    DistributedError,
    EnvironmentVariablesError,
    LaunchError,
    RankFailedError,
    WorkerExitedError,
    WorkerRaisedError,
)
from ignite_dist.launcher import Parallel, spawn

__version__ = "0.1.0"

__all__ = [
    "CollectiveMismatchError",
    "DistributedError",
    "DistributedProxySampler",
    "EnvironmentVariablesError",
    "LaunchError",
    "Parallel",
    "RankFailedError",
    "WorkerExitedError",
    "WorkerRaisedError",
    "all_gather",
    "all_gather_ragged",
    "all_gather_tensors_with_shapes",
    "all_reduce",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "available_backends",
    "backend",
    "barrier",
    "broadcast",
    "device",
    "finalize",
    "get_local_rank",
    "get_nnodes",
    "get_node_rank",
    "get_nproc_per_node",
    "get_rank",
    "get_world_size",
    "has_hvd_support",
    "has_native_dist_support",
    "has_xla_support",
    "hostname",
    "initialize",
    "model_name",
    "new_group",
    "one_rank_first",
    "one_rank_only",
    "register_computation_model",
    "registered_computation_models",
    "set_local_rank",
    "show_config",
    "spawn",
    "sync",
]
