"""Gradients of every kind, and what scripts of Horovod rely on, on the real Horovod.

As in ``test_horovod_gradients.py`` each function runs on every rank and in this very process.
"""

from __future__ import annotations

import copy
import io
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Embedding
from torch.optim import SGD, SparseAdam
from torch.utils.checkpoint import checkpoint

import ignite_dist as idist
from horovod_training import Net, backward, data, ranks, same_as_one_process, values

pytestmark = pytest.mark.horovod


# --- kinds of gradients --------------------------------------------------------------------------------


def _sparse(num_ranks: int, kwargs: dict[str, Any]) -> list[Any]:
    """A table that not every rank looks into, in two passes; and one that is used as a layer too."""
    torch.manual_seed(3)
    table, tied = (Embedding(6, 2, sparse=True).double() for _ in range(2))
    model = idist.auto_model(torch.nn.ModuleList([table, tied]))
    first = idist.auto_optim(SparseAdam(table.parameters(), lr=0.1), **kwargs)
    second = idist.auto_optim(SGD(tied.parameters(), lr=0.5), **kwargs)
    seen: list[Any] = []
    for number in range(4):
        for second_pass in (0, 1) if number < 2 else (0,):

            def loss(rank: int, number: int = number, second_pass: int = second_pass) -> Tensor | None:
                if (rank + number + second_pass) % 2:
                    return tied(torch.tensor([rank, 3])).square().sum() if number else None
                rows = table(torch.tensor([number, 3, rank]))
                if number == 3:
                    return (rows @ tied.weight.t()).square().sum()
                return rows.square().mean()

            backward(num_ranks, loss)
        for one in (first, second):
            one.step()
        seen += values(model)
        first.zero_grad()
        second.zero_grad()
    return seen


def test_sparse_gradients_that_some_ranks_do_not_have(num_ranks: int) -> None:
    for_sparse = [{}, {"sparse_as_dense": True}]
    same_as_one_process(_sparse, *((kwargs,) for kwargs in for_sparse), num_ranks=num_ranks)


def _half(num_ranks: int, dtype: torch.dtype) -> list[Any]:
    net = idist.auto_model(Net().to(dtype))
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5))
    for number in range(2):
        layers = "abc" if number else "ab"
        backward(num_ranks, lambda rank, layers=layers: net((4 * data(rank)).to(dtype), layers).double())
    seen = values(net)
    optimizer.step()
    if dtype is torch.float16:  # torch has no sum of sparse ones
        return [one.double() for one in seen]
    sparse = idist.auto_model(Embedding(6, 2, sparse=True).to(dtype))
    with torch.no_grad():
        sparse.weight.copy_(torch.arange(12).view(6, 2))
    optimizer = idist.auto_optim(SGD(sparse.parameters(), lr=0.25))
    backward(num_ranks, lambda rank: sparse(torch.tensor([rank, 3])).square().sum().double())
    optimizer.step()
    return [one.double() for one in [*seen, *values(sparse)]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_few_bits(dtype: torch.dtype) -> None:
    alone = _half(2, dtype)
    for found in idist.spawn("horovod", _half_on_rank, (dtype,), nproc_per_node=2):
        torch.testing.assert_close(found, alone, rtol=0.02, atol=0.02)


def _half_on_rank(_: int, dtype: torch.dtype) -> list[Any]:
    return _half(2, dtype)


def _checkpointed(num_ranks: int, use_reentrant: bool) -> list[Any]:
    """The layer b is there twice: two passes within the pass go through it, and the outer one too."""
    net = idist.auto_model(Net())
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5))
    seen: list[Any] = []
    for number in range(3):

        def loss(rank: int, number: int = number) -> Tensor:
            x = net.b(net.a(data(rank, number)))
            for layer in (net.b, net.c, net.b) if rank != number else (net.b, net.b):
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return net.b(x).square().mean()

        backward(num_ranks, loss)
        seen += values(net)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_gradient_checkpointing() -> None:
    same_as_one_process(_checkpointed, (False,))


def _checkpointed_alike(num_ranks: int) -> list[Any]:
    """A reentrant checkpoint is a backward pass of its own, so each rank has as many as the others."""
    net = idist.auto_model(Net())
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5))
    seen: list[Any] = []
    for number in range(3):

        def loss(rank: int, number: int = number) -> Tensor:
            x = net.b(net.a(data(rank, number)))
            for layer in (net.b, net.c if rank else net.b, net.b):
                x = checkpoint(layer, x, use_reentrant=True)
            return net.b(x).square().mean()

        for rank in ranks(num_ranks):  # one after the other: torch takes no two reentrant graphs as one
            (loss(rank) / len(ranks(num_ranks))).backward()
        seen += values(net)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_reentrant_gradient_checkpointing(num_ranks: int) -> None:
    same_as_one_process(_checkpointed_alike, num_ranks=num_ranks)


# --- what goes wrong in between --------------------------------------------------------------------------


class Broken(Exception):
    """What a backward pass raises."""


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Broken


def _broken(num_ranks: int, failing: list[int], drop: str) -> list[Any]:
    """The pass of some ranks breaks off when gradients have been sent; they drop it and make another."""
    net = idist.auto_model(Net())
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5))
    seen: list[Any] = []
    for number in range(3):
        for rank in ranks(num_ranks) if idist.get_world_size() > 1 and number == 1 else ():
            if rank in failing:
                x = Breaks.apply(net.a(data(rank, 7)))
                with pytest.raises(Broken):
                    net(x, "bc").backward()
                if drop == "optimizer":
                    optimizer.zero_grad()
                else:
                    net.zero_grad(set_to_none=drop == "model")
        backward(num_ranks, lambda rank, number=number: net(data(rank, number), "ab" if rank else "abc"))
        optimizer.step()
        seen += values(net)
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("drop", ["optimizer", "model", "model, zeros"])
def test_a_backward_pass_that_breaks_off_and_is_made_again(drop: str) -> None:
    for failing in ([0], [0, 1]):
        same_as_one_process(_broken, (failing, drop))


def _joined(num_ranks: int) -> list[Any]:
    """Rank 0 has two batches more; then all go on. A rank that has joined counts as one with zeros."""
    net = idist.auto_model(Net("ab"))
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5))

    def step(number: int, few: bool) -> None:
        optimizer.zero_grad()
        backward(num_ranks, lambda rank: None if few and rank else net(data(rank, number), "ab"))
        optimizer.step()

    for number in range(3):
        step(number, False)
    if 0 in ranks(num_ranks):
        for number in (3, 4):
            step(number, True)
    if idist.get_world_size() > 1:
        import horovod.torch as hvd

        hvd.join()  # who comes early has not made those steps
        with torch.no_grad():
            for one in net.parameters():
                one.copy_(idist.broadcast(one.detach(), src=0))
    for number in range(5, 7):
        step(number, False)
    return values(net)


def test_ranks_that_have_joined() -> None:
    same_as_one_process(_joined)


# --- what scripts rely on --------------------------------------------------------------------------------


def _summed(num_ranks: int, passes: int) -> list[Any]:
    import horovod.torch as hvd

    net = idist.auto_model(Net("ab"))
    kwargs = {"op": hvd.Sum} if idist.get_world_size() > 1 else {}
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5), **kwargs, **_if_distributed(passes))
    for number in range(3):
        for one in range(passes):
            factor = 1 if idist.get_world_size() > 1 else num_ranks
            backward(
                num_ranks, lambda rank, n=2 * number + one, factor=factor: factor * net(data(rank, n), "ab")
            )
        optimizer.step()
        optimizer.zero_grad()
    return values(net)


def _if_distributed(passes: int) -> dict[str, Any]:
    return {"backward_passes_per_step": passes} if idist.get_world_size() > 1 else {}


def test_sums() -> None:
    same_as_one_process(_summed, (1,), (2,))


def _summed_twice(_: int) -> str:
    import horovod.torch as hvd

    net = idist.auto_model(Net("ab"))
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5), op=hvd.Sum)
    net(data(0), "ab").backward()
    with pytest.raises(RuntimeError) as caught:
        net(data(0), "a" if idist.get_rank() else "ab").backward()
    del optimizer
    return str(caught.value)


def test_what_is_a_sum_already_is_not_summed_again() -> None:
    for said in idist.spawn("horovod", _summed_twice, nproc_per_node=2):
        assert "backward_passes_per_step" in said


def _of_some_ranks(_: int) -> tuple[bool, list[Any]]:
    import horovod.torch as hvd

    process_set = hvd.add_process_set([0, 2])
    net = idist.auto_model(Net("ab"))
    optimizer = idist.auto_optim(
        SGD(net.parameters(), lr=0.5), process_set=process_set, named_parameters=net.named_parameters()
    )
    net(data(idist.get_rank()), "ab").backward()
    optimizer.step()
    return process_set.included(), values(net)


def test_a_process_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")

    def of(*numbers: int) -> list[Any]:
        net = Net("ab")
        torch.stack([net(data(number), "ab") for number in numbers]).mean().backward()
        SGD(net.parameters(), lr=0.5).step()
        return values(net)

    found = idist.spawn("horovod", _of_some_ranks, nproc_per_node=3)
    assert [included for included, _ in found] == [True, False, True]
    for (_, one), expected in zip(found, [of(0, 2), of(1), of(0, 2)], strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-12, equal_nan=True)


def _as_horovods(_: int) -> dict[str, Any]:
    import horovod.torch as hvd

    net = idist.auto_model(Net("ab"))
    plain = SGD(net.parameters(), lr=0.5, momentum=0.9)
    optimizer: Any = idist.auto_optim(
        plain,
        named_parameters=net.named_parameters(),
        compression=hvd.Compression.fp16,
        gradient_predivide_factor=2.0,
        backward_passes_per_step=2,
    )
    assert isinstance(optimizer, SGD) and type(optimizer).__name__ == "SGD"
    assert optimizer.param_groups is plain.param_groups and optimizer.state is plain.state
    assert idist.auto_optim(optimizer) is optimizer
    assert (optimizer.op, optimizer.backward_passes_per_step) == (hvd.Average, 2)
    optimizer.set_backward_passes_per_step(1)
    if idist.get_rank() == 0:  # as after a resume: the others have no state, and make it by a step
        for one in net.parameters():
            optimizer.state[one]["momentum_buffer"] = torch.ones_like(one)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    momenta = [optimizer.state[one]["momentum_buffer"].sum().item() for one in net.parameters()]
    optimizer.zero_grad()
    net(data(idist.get_rank()), "ab").backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    buffer = io.BytesIO()
    torch.save(net, buffer)  # with hooks on its parameters
    copied = copy.deepcopy(net)
    copied(data(idist.get_rank()), "ab").backward()  # nobody averages this one
    wrong: list[str] = []
    for kwargs in (
        {"backward_passes_per_step": 0},
        {"groups": 0.5},
        {"groups": [[net.a.weight], [net.a.weight]]},
        {"groups": [[1]]},
        {"named_parameters": [("a", net.a.weight)]},
        {"named_parameters": [("a", one) for one in net.parameters()]},
        {"named_parameters": list(net.parameters())},
        {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
    ):
        with pytest.raises(ValueError) as caught:
            idist.auto_optim(SGD(net.parameters(), lr=1), **kwargs)
        wrong.append(str(caught.value))
    with pytest.raises(TypeError):
        idist.auto_optim(SGD(net.parameters(), lr=1), unknown=1)
    return {"momenta": momenta, "values": values(net), "saved": buffer.tell() > 0, "wrong": len(wrong)}


def test_what_scripts_of_horovod_use() -> None:
    net = Net("ab")
    plain = SGD(net.parameters(), lr=0.5, momentum=0.9)
    for one in net.parameters():
        plain.state[one]["momentum_buffer"] = torch.ones_like(one)
    torch.stack([net(data(rank), "ab") for rank in range(2)]).mean().backward()
    plain.step()
    for found in idist.spawn("horovod", _as_horovods, nproc_per_node=2):
        assert found["momenta"] == [16, 4, 16, 4]
        assert found["saved"] and found["wrong"] == 8
        torch.testing.assert_close(found["values"], values(net), rtol=1e-2, atol=1e-3)


def _collected(_: int) -> list[bool]:
    """Neither hooks nor gradients keep a model."""
    net = idist.auto_model(Net("ab"))
    optimizer = idist.auto_optim(SGD(net.parameters(), lr=0.5))
    net(data(0), "ab").backward()
    optimizer.step()
    known = [weakref.ref(one) for one in (optimizer, *net.parameters())]
    del net, optimizer
    return [one() is None for one in known]


def test_a_model_goes_when_nobody_has_it() -> None:
    for found in idist.spawn("horovod", _collected, nproc_per_node=2):
        assert all(found)


def _replaced(num_ranks: int) -> list[Any]:
    """An optimizer that is replaced by another one for fewer parameters, and is still there."""
    net = idist.auto_model(Net("abc"))
    first = idist.auto_optim(SGD(net.parameters(), lr=0.5, momentum=0.9))
    backward(num_ranks, lambda rank: net(data(rank), "abc"))
    first.step()
    net.zero_grad()
    second = idist.auto_optim(SGD([*net.a.parameters(), *net.b.parameters()], lr=0.25))
    for number in range(3):
        backward(num_ranks, lambda rank, number=number: net(data(rank, number), "abc" if rank else "bc"))
        second.step()
        net.zero_grad()
    return values(net)


def test_an_optimizer_that_is_replaced() -> None:
    same_as_one_process(_replaced)


def _horovods_own(num_ranks: int) -> list[Any]:
    """An optimizer that the script has wrapped itself stays as it is, and may accumulate."""
    net = idist.auto_model(Net("ab"))
    plain = SGD(net.parameters(), lr=0.5)
    if idist.get_world_size() > 1:
        import horovod.torch as hvd

        block = idist.grad_sync(net, plain, is_final_microbatch=False)
        with pytest.raises(ValueError, match="use the result of auto_optim"), block:
            pass
        plain = hvd.DistributedOptimizer(plain)
    optimizer = idist.auto_optim(plain)
    assert optimizer is plain
    for number in range(2):
        with idist.no_sync(net):
            backward(num_ranks, lambda rank, number=number: net(data(rank, number), "ab"))
        backward(num_ranks, lambda rank, number=number: net(data(rank, number + 2), "ab"))
        optimizer.step()
        optimizer.zero_grad()
    return values(net)


def test_an_optimizer_that_the_script_has_wrapped_itself() -> None:
    same_as_one_process(_horovods_own)


def _adasum(_: int) -> str:
    import horovod.torch as hvd

    net = idist.auto_model(Net("ab"))
    assert not hvd.mpi_built()
    with pytest.raises(ValueError) as caught:
        idist.auto_optim(SGD(net.parameters(), lr=0.5), op=hvd.Adasum)
    assert idist.all_reduce(1) == idist.get_world_size()  # nothing was sent
    return str(caught.value)


@pytest.mark.parametrize("size", [1, 2])
def test_adasum_needs_horovod_built_with_mpi(size: int) -> None:
    """As ``all_reduce`` of ADASUM: Horovod itself raises it in the first step, as an internal error."""
    for said in idist.spawn("horovod", _adasum, nproc_per_node=size):
        assert "op=hvd.Adasum" in said and "built with MPI" in said and "hvd.Average" in said
