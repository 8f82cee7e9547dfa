"""Meshes, and the ranks that share the training of a model."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.distributed import DeviceMesh
from torch.nn import Module

from ignite_dist.collectives.checks import is_sharded
from ignite_dist.collectives.coordination import Caller, check_same
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.context.live import current_model
from ignite_dist.internals.call_sites import warn_user
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

    Args:
        sizes: the size of each dimension, in order. One size may be -1: what remains of the world size. So
            ``mesh(dp=-1, tp=1)`` fits every world size, also a context of one rank.

    Returns:
        A ``torch.distributed.device_mesh.DeviceMesh``, for all functions of torch that take one.

    Raises:
        ValueError: the product of the sizes is not the world size, or the backend has no meshes (Horovod,
            XLA) or is none. Raised before any communication: a rank that is alone with it lets the others
            wait.
        CollectiveMismatchError: the ranks pass different names, sizes or orders of dimensions.
        RuntimeError: called inside of :func:`uneven_inputs`.

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
    if model.transport.has_meshes:
        dimensions = [f"{name}={size}" for name, size in checked.items()]
        needed = "the same dimensions, in the same order, on every rank"
        check_same(model, [(model.groups.world, dimensions)], Caller("mesh"), needed)
    return model.transport.make_mesh(checked)


class DataMesh(NamedTuple):
    """The ranks that train a model.

    Attributes:
        mesh: the data dimensions; None for the world, or if the mesh has none.
        group: the ranks with a replica of this rank's parameters or shards.
        tensor_groups: the groups over which ``DTensor`` parameters are sharded. Plain parameters and buffers
            have equal values there.
        is_explicit: True if the ranks come from a mesh.
    """

    mesh: DeviceMesh | None
    group: Group
    tensor_groups: tuple[Group, ...] = ()
    is_explicit: bool = True


def find_data_mesh(live: ComputationModel, model: Module, mesh: Any) -> DataMesh:
    """The ranks that train ``model``. Does not communicate, but the first use of several dimensions does.

    Args:
        live: the context.
        model: may have ``DTensor`` parameters over dimensions that are not data dimensions.
        mesh: a ``DeviceMesh``; None for the current mesh, and the world without one.

    Raises:
        TypeError: ``mesh`` is not a ``DeviceMesh``.
        ValueError: the backend has no meshes, ``mesh`` has no data dimension and no parameter is a
            ``DTensor``, or parameters are sharded over data dimensions, or over dimensions of an unknown
            mesh.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, for example idist.mesh(dp=2, tp=2); got {mesh!r}.")
    is_given = mesh is not None
    mesh = mesh if is_given else meshes.current()
    sharded = {name: one for name, one in model.named_parameters() if is_sharded(one)}
    if mesh is None and sharded and live.get_world_size() > 1:
        raise ValueError(
            f"{next(iter(sharded))!r} is a DTensor, sharded by tensor parallelism (or by an earlier "
            "fully_shard). Pass the mesh with its data dimensions too: auto_model(model, mesh=mesh)."
        )
    if mesh is None:
        return DataMesh(None, live.groups.world, is_explicit=False)
    dimensions = meshes.data_dimensions(mesh)
    if is_given and not dimensions and not sharded:
        raise ValueError(
            f"{meshes.describe(mesh)} has no data dimension, over which auto_model could average or shard: a "
            "name that begins with dp, ddp, fsdp, hsdp, data, replicate or shard."
        )
    group = live.groups.of_mesh(mesh, dimensions)
    tensor_meshes = list(dict.fromkeys(one.device_mesh for one in sharded.values()))  # type: ignore[attr-defined]
    tensor_groups = tuple(map(live.groups.resolve, tensor_meshes))
    for name, parameter in sharded.items():
        ranks = set(tensor_groups[tensor_meshes.index(parameter.device_mesh)].ranks)  # type: ignore[attr-defined]
        if len(ranks.intersection(group.ranks)) > 1:
            raise ValueError(
                f"{name!r} is sharded over ranks {sorted(ranks)}, and the data dimensions of "
                f"{meshes.describe(mesh)} have ranks {list(group.ranks)}. Dimensions whose names "
                "begin with dp, ddp, fsdp, data, replicate or shard are data dimensions, and only auto_model "
                "shards over them."
            )
    return DataMesh(_part(mesh, dimensions), group, tensor_groups)


def _part(mesh: DeviceMesh, dimensions: list[int]) -> DeviceMesh | None:
    """The mesh of ``dimensions`` only."""
    if not dimensions:
        return None
    if len(dimensions) == mesh.ndim:
        return mesh
    assert mesh.mesh_dim_names is not None  # without names all are data dimensions
    return mesh[tuple(mesh.mesh_dim_names[number] for number in dimensions)]


def check_shardable(data: DataMesh) -> None:
    """Raise ``ValueError`` if FSDP2 cannot shard over the data dimensions."""
    if data.mesh is None:
        return
    names = data.mesh.mesh_dim_names or ()
    if data.mesh.ndim > 2 or (len(names) == 2 and "replicate" in names[1]):
        raise ValueError(
            "strategy='fsdp' takes one data dimension to shard over, or two: first the one with replicas, "
            "then the one to shard over, as in mesh(dp_replicate=2, dp_shard=4); got "
            f"{meshes.describe(data.mesh)}."
        )
