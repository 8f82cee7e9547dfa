"""Device meshes: the current mesh, its data dimensions, and the ranks along dimensions. No communication."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch.distributed import DeviceMesh

from ignite_dist.internals import _torch
from ignite_dist.internals.arguments import as_int

_DATA_NAMES = ("dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard")

_OTHER_NAMES = (
    "tp",
    "pp",
    "cp",
    "sp",
    "ep",
    "tensor",
    "pipe",
    "stage",
    "context",
    "sequence",
    "expert",
    "model",
)


def has_known_name(name: str) -> bool:
    """True if the name of a dimension says whether its ranks have different data."""
    return name.startswith(_DATA_NAMES + _OTHER_NAMES)


def current() -> DeviceMesh | None:
    """The mesh of the innermost ``with mesh:`` block of this thread; None outside of such a block."""
    entered = _torch.entered_meshes()
    return entered[-1] if entered else None


def named(name: str) -> tuple[DeviceMesh, int]:
    """The current mesh, and the position of its dimension ``name``.

    Raises:
        ValueError: no mesh is current, or the mesh has no such dimension.
    """
    mesh = current()
    if mesh is None:
        raise ValueError(
            f"group={name!r} is a dimension of the current mesh, but no mesh is current. Call it inside of "
            f"`with idist.mesh(...):`, or pass mesh[{name!r}]. Other groups are lists of ranks or handles."
        )
    names = mesh.mesh_dim_names or ()
    if name not in names:
        raise ValueError(f"group={name!r} is not a dimension of the current mesh: {describe(mesh)}.")
    return mesh, names.index(name)


def describe(mesh: DeviceMesh) -> str:
    """``"mesh(dp=2, tp=2)"``."""
    names = mesh.mesh_dim_names or [f"dimension {number}" for number in range(mesh.ndim)]
    return f"mesh({', '.join(f'{name}={size}' for name, size in zip(names, mesh.shape, strict=True))})"


def data_dimensions(mesh: DeviceMesh) -> list[int]:
    """The positions of the dimensions along which ranks have different data.

    Their names begin with dp, ddp, fsdp, hsdp, data, replicate or shard. If no dimension has a name, all are
    data dimensions, as for ``torch.distributed.fsdp.fully_shard``.
    """
    names = mesh.mesh_dim_names
    if names is None:
        return list(range(mesh.ndim))
    return [number for number, name in enumerate(names) if name.startswith(_DATA_NAMES)]


def ranks_along(mesh: DeviceMesh, dimensions: Collection[int], rank: int) -> tuple[int, ...]:
    """The ranks that differ from ``rank`` only in ``dimensions``, ascending; empty if it is outside."""
    ranks = mesh.mesh
    found = (ranks == rank).nonzero().tolist()
    if not found:
        return ()
    place = tuple(slice(None) if number in dimensions else one for number, one in enumerate(found[0]))
    return tuple(sorted(ranks[place].flatten().tolist()))


def checked_sizes(sizes: Mapping[str, Any], world_size: int) -> dict[str, int]:
    """The sizes of a mesh's dimensions, with the size of the dimension that is -1.

    Raises:
        ValueError: a size is not a positive int, or the product is not ``world_size``.
    """
    given = {name: as_int(size) for name, size in sizes.items()}
    call = f"mesh({', '.join(f'{name}={size!r}' for name, size in given.items())})"
    if not given:
        raise ValueError("mesh() needs the names and sizes of its dimensions, for example mesh(dp=-1, tp=2).")
    is_valid = all(type(size) is int and (size > 0 or size == -1) for size in given.values())
    free = [name for name, size in given.items() if size == -1]
    if not is_valid or len(free) > 1:
        raise ValueError(f"Sizes of a mesh are positive ints, and at most one is -1; got {call}.")
    product = math.prod(size for size in given.values() if size != -1)
    if free and world_size % product == 0:
        return {name: world_size // product if size == -1 else size for name, size in given.items()}
    if free or product != world_size:
        raise ValueError(
            f"{call} needs {'a multiple of ' * bool(free)}{product} ranks, but the world size is "
            f"{world_size}. The product of the sizes must be the world size. One size may be -1."
        )
    return given
