"""Meshes, on every model: of torch's own backends they are groups, other backends refuse them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import ignite_dist as idist
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank, raises


def has_meshes() -> bool:
    return current_model().transport.has_meshes


def divisor(world_size: int) -> int:
    """The smallest divisor over 1, so that both dimensions of a mesh of four ranks have two."""
    return next((size for size in range(2, world_size) if world_size % size == 0), 1)


@on_every_rank
def test_a_dimension_is_a_group() -> None:
    if not has_meshes():
        return
    rank, world_size, device = idist.get_rank(), idist.get_world_size(), idist.device()
    width = divisor(world_size)
    mesh = idist.mesh(dp=-1, tp=width)
    assert mesh.mesh_dim_names == ("dp", "tp") and tuple(mesh.shape) == (world_size // width, width)
    members = {
        "dp": list(range(rank % width, world_size, width)),
        "tp": list(range(rank - rank % width, rank - rank % width + width)),
    }
    for name, ranks in members.items():
        with mesh:
            for group in (mesh[name], name, ranks):
                tensor = torch.tensor([float(rank)], device=device)
                assert idist.all_reduce(tensor, group=group) is tensor and tensor.item() == sum(ranks)
                assert idist.all_gather(rank, group=group) == ranks
                assert idist.all_gather(tensor, group).shape == (len(ranks),)
                assert idist.broadcast(rank, src=ranks[-1], group=group) == ranks[-1]
                assert idist.any_true(rank == ranks[0], group) is True
                idist.barrier(group)
    everyone = list(range(world_size))
    assert idist.all_gather(rank, group=mesh) == everyone == idist.all_gather(rank, group=idist.mesh(x=-1))


@on_every_rank
def test_wrong_sizes_are_refused_before_anything_is_sent() -> None:
    world_size = idist.get_world_size()
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"dp": world_size + 1},
            f"mesh(dp={world_size + 1}) needs {world_size + 1} ranks, but the world size",
        ),
        ({"dp": -1, "tp": world_size + 1}, f"needs a multiple of {world_size + 1} ranks"),
        ({"dp": world_size, "tp": 2}, f"needs {2 * world_size} ranks"),
        ({"dp": -1, "tp": -1}, "at most one is -1"),
        ({"dp": 0}, "positive ints"),
        ({"dp": "2"}, "positive ints"),
        ({"dp": True}, "positive ints"),
        ({"dp": 1.0}, "positive ints"),
        ({}, "needs the names and sizes"),
    ]
    with count_collectives() as counted:
        for sizes, message in wrong:
            with raises(ValueError, message):
                idist.mesh(**sizes)
    assert counted.count == 0
    assert idist.all_reduce(1) == world_size


@pytest.mark.parametrize(
    ("mine", "others"),
    [
        pytest.param({"dp": -1, "tp": 1}, {"dp": 1, "tp": -1}, id="sizes"),
        pytest.param({"dp": -1, "tp": 1}, {"tp": 1, "dp": -1}, id="order"),
        pytest.param({"dp": -1}, {"ddp": -1}, id="names"),
        pytest.param({"dp": -1}, {"dp": -1, "tp": 1}, id="number"),
    ],
)
@on_every_rank
def test_the_ranks_compare_the_dimensions(mine: dict[str, int], others: dict[str, int]) -> None:
    rank, world_size = idist.get_rank(), idist.get_world_size()
    if not has_meshes() or world_size == 1:
        return
    with raises(idist.CollectiveMismatchError, "mesh needs the same dimensions, in the same order,"):
        idist.mesh(**mine if rank == 0 else others)
    assert idist.mesh(dp=-1)["dp"].size() == world_size


@on_every_rank
def test_a_context_without_meshes_says_so() -> None:
    if has_meshes():
        return
    with count_collectives() as counted, raises(ValueError, "no meshes"):
        idist.mesh(dp=-1)
    assert counted.count == 0


@on_every_rank
def test_a_name_needs_a_current_mesh_that_has_it() -> None:
    with count_collectives() as counted, raises(ValueError, "no mesh is current"):
        idist.all_reduce(1, group="dp")
    assert counted.count == 0
    if not has_meshes():
        return
    outer, inner = idist.mesh(dp=-1), idist.mesh(pp=-1)
    with outer:
        with inner:
            assert idist.all_reduce(1, group="pp") == idist.get_world_size()
            with raises(ValueError, "'dp' is not a dimension of the current mesh: mesh(pp="):
                idist.all_reduce(1, group="dp")
        assert idist.all_reduce(1, group="dp") == idist.get_world_size()
        errors: list[BaseException] = []

        def elsewhere() -> None:
            try:
                idist.all_reduce(1, group="dp")
            except ValueError as error:
                errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(60)
        assert len(errors) == 1 and "no mesh is current" in str(errors[0])  # a mesh is its thread's own
    with raises(ValueError, "no mesh is current"):
        idist.barrier(group="dp")
