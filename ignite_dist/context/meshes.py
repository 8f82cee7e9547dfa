"""Meshes of the context's ranks: more kinds of parallelism than data parallelism."""

from __future__ import annotations

from typing import Any

from torch.distributed import DeviceMesh

from ignite_dist.call_sites import warn_user
from ignite_dist.comp_models import ComputationModel
from ignite_dist.context.live import current_model
from ignite_dist.values import meshes


def mesh(**sizes: int) -> DeviceMesh:
    """Torch's ``DeviceMesh`` of all ranks, in row-major order. Every rank calls this.

    ``mesh["dp"]`` is a dimension, and a group of this rank: ``group=mesh["dp"]`` of every collective. A mesh
    of several dimensions is the group of all its ranks. In a block ``with mesh:`` the mesh is the current
    mesh of this thread. There, ``group="dp"`` works too, and the mesh is the default of :func:`auto_model`
    and :func:`auto_dataloader`.

    Dimensions whose names begin with ``dp``, ``ddp``, ``fsdp``, ``hsdp``, ``data``, ``replicate`` or
    ``shard`` are data dimensions: their ranks have different data, and gradients are averaged over them.
    Ranks that differ only in other dimensions (``tp``, ``pp``, ``cp``, ...) have the same data. In a mesh
    without data dimensions each rank keeps its own model.

    On the ranks of a tensor-parallel group, activations that are not split need the same random numbers for
    dropout: call ``seed_everything(seed, per_rank=False)``.

    A context of one rank has meshes, too: ``mesh(dp=-1, tp=1)`` fits every world size.

    Args:
        sizes: the size of each dimension, in order. One size may be -1: what remains of the world size.

    Returns:
        A ``torch.distributed.device_mesh.DeviceMesh``, for all functions of torch that take one.

    Raises:
        ValueError: the product of the sizes is not the world size, or the backend has no meshes (Horovod,
            XLA) or is none; raised before any communication.
        RuntimeError: called inside of :func:`join`.

    Example::

        with idist.mesh(dp=2, tp=2) as mesh:  # on four ranks
            parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            model = idist.auto_model(net)
            idist.all_gather(idist.get_rank(), group="dp")  # [0, 2] on ranks 0 and 2, [1, 3] elsewhere
    """
    model = current_model()
    checked = meshes.checked_sizes(sizes, model.get_world_size())
    if unknown := [name for name in checked if not meshes.has_known_name(name)]:
        warn_user(
            f"The dimension {unknown[0]!r} of the mesh is not a data dimension: its ranks get the same data, "
            "and their gradients are not averaged. Names of data dimensions begin with dp, ddp, fsdp, hsdp, "
            "data, replicate or shard; names of others with tp, pp, cp, sp or ep."
        )
    model.groups.check_not_joining()
    return model.transport.make_mesh(checked)


def data_group(model: ComputationModel) -> Any:
    """The ranks that share the data, as a ``group=`` argument; None for all ranks. Never communicates.

    These are the ranks along the data dimensions of the current mesh. Ranks outside of this group that have
    the same position in theirs get the same data.
    """
    current = meshes.current()
    if current is None:
        return None
    return model.transport.group_of_mesh(current, meshes.data_dimensions(current))
