"""Import path for scripts written for ``ignite.distributed.utils``. All names are defined elsewhere."""

from ignite_dist.collectives.all_gather import all_gather, all_gather_tensors_with_shapes
from ignite_dist.collectives.all_reduce import all_reduce
from ignite_dist.collectives.barrier import barrier, new_group
from ignite_dist.collectives.broadcast import broadcast
from ignite_dist.collectives.coordination import one_rank_first, one_rank_only
from ignite_dist.comp_models import (
    has_hvd_support,
    has_native_dist_support,
    has_xla_support,
    registered_computation_models,
)
from ignite_dist.context.identity import (
    backend,
    device,
    get_local_rank,
    get_nnodes,
    get_node_rank,
    get_nproc_per_node,
    get_rank,
    get_world_size,
    hostname,
    model_name,
    set_local_rank,
    show_config,
)
from ignite_dist.context.live import available_backends, finalize, initialize, sync
from ignite_dist.launcher import spawn

__all__ = [
    "all_gather",
    "all_gather_tensors_with_shapes",
    "all_reduce",
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
    "registered_computation_models",
    "set_local_rank",
    "show_config",
    "spawn",
    "sync",
]
