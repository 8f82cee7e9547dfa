"""Sums and products of narrow floats: nothing is rounded on the way, on every model and at every size."""

from __future__ import annotations

from fractions import Fraction
from math import inf, prod

import pytest
import torch
from torch import Tensor

import ignite_dist as idist
from ignite_dist.testing.conformance.cases import count_collectives, on_every_rank
from ignite_dist.testing.conformance.test_all_reduce import everyone, here, on_device, same_bits

HALVES = [torch.float16, torch.bfloat16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
# One element, a few, more than fit one round of gloo, and an uneven rest beside pieces.
SIZES = [1, 2, 3, 1_000, 300_001, 2_500_003]


def rounded(exact: Fraction, dtype: torch.dtype) -> float:
    """The number of ``dtype`` next to ``exact``: the even one of two that are as near."""
    info = torch.finfo(dtype)
    digits = {torch.float16: 11, torch.bfloat16: 8, torch.float8_e4m3fn: 4, torch.float8_e5m2: 3}[dtype]
    size = abs(exact)
    exponent = 0
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    while size and Fraction(2) ** exponent > size:
        exponent -= 1
    smallest = torch.tensor(info.smallest_normal).log2().int().item()
    unit = Fraction(2) ** (max(exponent, smallest) - digits + 1)
    result = round(exact / unit) * unit  # to even, as Python's round() does
    return float(result) if abs(result) <= Fraction(info.max) else inf if result > 0 else -inf


def contribution(rank: int, dtype: torch.dtype, numel: int) -> Tensor:
    """Numbers of very different sizes, half of them such that sums end next to the middle of two numbers."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(101, generator=generator) * 2.0 ** torch.randint(-8, 5, (101,), generator=generator)
    step = torch.finfo(dtype).eps
    values[::2] = [1 + step, step / 2, step / 64, step / 128][rank % 4]
    return values.to(dtype).repeat(numel // 101 + 1)[:numel]


def exact(op: str, rows: list[Tensor]) -> Tensor:
    """The reduction of the rows in fractions, rounded once."""
    dtype, numel = rows[0].dtype, len(rows[0])
    results = []
    for column in zip(*(row[:101].tolist() for row in rows), strict=True):
        values = [Fraction(value) for value in column]
        total = prod(values) if op == "PRODUCT" else sum(values, Fraction(0))
        results.append(rounded(total / len(values) if op == "AVERAGE" else total, dtype))
    return torch.tensor(results).to(dtype).repeat(numel // 101 + 1)[:numel]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("op", ["SUM", "AVERAGE", "PRODUCT"])
@on_every_rank
def test_narrow_floats_are_rounded_once(op: str, numel: int) -> None:
    for dtype in [*HALVES, *(FLOAT8 if numel < 2_000_000 else [])]:
        rows = everyone(lambda rank: contribution(rank, dtype, numel))  # noqa: B023
        wanted = exact(op, rows)
        tensor = on_device(rows[idist.get_rank()])
        idist.all_reduce(tensor, op)
        found = here(tensor)
        differs = (found.float() != wanted.float()).nonzero().view(-1)[:3]
        assert not len(differs), (dtype, differs, found[differs], wanted[differs])
        assert (idist.all_gather(tensor).view(len(rows), -1).float().cpu() == wanted.float()).all()


@pytest.mark.parametrize("numel", [1, 5, 70_000, 600_000])
@on_every_rank
def test_what_is_small_in_the_end_may_be_large_on_the_way(numel: int) -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    for dtype, large in ((torch.float16, 60_000.0), (torch.bfloat16, 3e38), (torch.float8_e5m2, 57_344.0)):
        value = torch.tensor(-large if rank == 2 else large).to(dtype)
        tensor = on_device(value.repeat(numel))
        idist.all_reduce(tensor)
        expected = {1: large, 2: inf, 3: large, 4: inf}[world_size]
        assert (here(tensor).double() == torch.tensor(expected).to(dtype).double()).all(), dtype
        tensor = on_device(torch.tensor(large).to(dtype).repeat(numel))
        idist.all_reduce(tensor, "AVERAGE")
        assert (here(tensor).double() == torch.tensor(large).to(dtype).double()).all(), dtype


@on_every_rank
def test_trees_strided_tensors_gradients_and_complex_halves_are_rounded_once() -> None:
    world_size, rank = idist.get_world_size(), idist.get_rank()
    # 256 and one for each other rank, whose sum bfloat16 has if it is even; one by one they would be lost.
    ones = torch.full((300_000, 2), 1.0 if rank else 256.0, dtype=torch.bfloat16, device=idist.device())
    wanted = torch.tensor(256.0 + world_size - 1).bfloat16().item()
    assert (idist.all_reduce({"a": ones})["a"] == wanted).all()
    assert (idist.all_reduce([ones[:3], ones[3:5]])[0] == wanted).all()
    assert (idist.all_reduce(ones, sync_grads=True) == wanted).all()
    columns = ones.clone()
    idist.all_reduce(columns[:, 0])
    assert (columns[:, 0] == wanted).all() and (columns[:, 1] == ones[:, 1]).all()
    if idist.device().type == "cpu":
        complexes = torch.full((300_000,), 2048.0 if rank == 0 else 1.0).half()
        pair = torch.view_as_complex(torch.stack([complexes, -complexes], 1))
        half = float(torch.tensor(2048.0 + world_size - 1).half())
        idist.all_reduce(pair)
        assert (torch.view_as_real(pair)[:, 0] == half).all() and (
            torch.view_as_real(pair)[:, 1] == -half
        ).all()
        product = torch.full((3,), 45.0 + 0j).to(torch.complex32)
        idist.all_reduce(product, "PRODUCT")
        assert product[0].to(torch.complex64).item() == rounded(Fraction(45) ** world_size, torch.float16)


@on_every_rank
def test_speed_instead_of_exactness() -> None:
    """``exact=False`` is the backend's own; what is not rounded is as exact as ever."""
    world_size, rank = idist.get_world_size(), idist.get_rank()
    for dtype in (*HALVES, torch.float8_e5m2):
        for numel in (1, 5, 400_000):
            for op, wanted in (("SUM", world_size), ("AVERAGE", 1), ("PRODUCT", 1), ("MAX", 1)):
                tensor = on_device(torch.ones(numel).to(dtype))
                assert idist.all_reduce(tensor, op, exact=False) is tensor
                assert (here(tensor).float() == wanted).all(), (dtype, numel, op)
    for dtype in HALVES:
        large = torch.ones(400_000, dtype=dtype, device=idist.device())
        for op in ("SUM", "AVERAGE"):
            with count_collectives() as counted:
                idist.all_reduce(large, op, exact=False)
                idist.all_reduce([large], op, exact=False)
                idist.all_reduce(large, op, sync_grads=True, exact=False)
            if world_size > 1:
                assert counted.dtypes <= {*HALVES, torch.float32, torch.uint8}, (
                    dtype,
                    op,
                )  # the last for headers
    whole = on_device(torch.full((5,), 2**40 + rank))
    idist.all_reduce(whole, exact=False)
    assert (whole == 2**40 * world_size + sum(range(world_size))).all()
    assert idist.all_reduce({"n": 1, "t": whole}, exact=False)["n"] == world_size
    ones = torch.ones(3, dtype=torch.float16, device=idist.device(), requires_grad=True)
    idist.all_reduce(ones, sync_grads=True, exact=False).sum().backward()
    assert ones.grad.tolist() == [world_size] * 3


@on_every_rank
def test_a_small_exact_sum_costs_one_collective() -> None:
    for dtype in HALVES:
        for numel in (1, 2, 3, 1_000):
            with count_collectives() as counted:
                idist.all_reduce(torch.ones(numel, dtype=dtype, device=idist.device()))
            if idist.get_world_size() > 1:
                assert counted.count == 1, (dtype, numel)


@on_every_rank
def test_the_bits_are_the_same_everywhere_with_values_that_no_format_holds() -> None:
    for dtype in HALVES:
        generator = torch.Generator().manual_seed(idist.get_rank())
        tensor = (torch.randn(400_001, generator=generator).exp() ** 5).to(dtype).to(idist.device())
        idist.all_reduce(tensor)
        rows = here(idist.all_gather(tensor)).view(idist.get_world_size(), -1)
        assert all(same_bits(row, rows[0]) for row in rows)
