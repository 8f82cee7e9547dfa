"""The ranks over which a model is data parallel, and the ranks that share its tensor-parallel parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.distributed import DeviceMesh
from torch.nn import Module

from ignite_dist.collectives.checks import is_sharded
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.values import meshes


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
