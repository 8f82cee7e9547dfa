"""Functions under ``torch.compile``: what they call here gives what the eager call gives, on every model."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor

import ignite_dist as idist
from ignite_dist.context.live import current_model
from ignite_dist.testing.conformance.cases import BACKENDS_OF_TORCH, count_collectives, on_every_rank, raises

# To compile takes seconds on every rank, and a third rank adds nothing to a graph.
pytestmark = pytest.mark.at_most_two_ranks

# Inductor makes C++ of a graph, which takes seconds. A graph has the same operators on every backend.
INDUCTOR = pytest.param("inductor", marks=pytest.mark.same_on_every_backend)
COMPILERS = ["aot_eager", INDUCTOR]


def where_it_compiles(case: Callable[..., None]) -> Callable[..., None]:
    """``case``, but nothing where ranks are threads, as XLA's may be: torch compiles in one at a time."""

    @wraps(case)
    def checked(**kwargs: Any) -> None:
        if current_model().ranks_in_process() == 1:
            case(**kwargs)

    return checked


@contextmanager
def compiling() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def sample(shape: tuple[int, ...] = (4, 3), dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of this rank's own, of which a sum is rounded."""
    generator = torch.Generator().manual_seed(idist.get_rank() + 1)
    values = torch.randn(shape, generator=generator) * 100
    return values > 60 if dtype is torch.bool else values.to(dtype)


def half_of_the_ranks() -> list[int]:
    return list(range((idist.get_world_size() + 1) // 2))


# Where torch has a functional collective: one graph, with the collective in it. (Horovod has no guard, so
# its getters end a graph: the world size is asked for outside.)
IN_A_GRAPH: dict[str, Callable[[Tensor, int], Any]] = {
    "all_reduce": lambda x, size: idist.all_reduce(x * 3) + 1,
    "all_reduce by MAX": lambda x, size: idist.all_reduce(x * 3, "MAX"),
    "all_reduce by average": lambda x, size: idist.all_reduce(x * 3, op="average"),
    "all_reduce of the argument": lambda x, size: (idist.all_reduce(x), x + 1),
    "all_reduce into a new tensor": lambda x, size: (idist.all_reduce(x, inplace=False), x),
    "all_reduce by the default of inplace": lambda x, size: (idist.all_reduce(x, inplace=None), x),
    "all_reduce of a view": lambda x, size: (idist.all_reduce(x[1:3]), x),
    "all_reduce of a transposed tensor": lambda x, size: (idist.all_reduce(x.T), x),
    "all_reduce with a gradient": lambda x, size: idist.all_reduce(x * 3, sync_grads=True) * 2,
    "all_reduce, exact by name": lambda x, size: idist.all_reduce(x * 3, exact=True),
    "all_reduce, at raw speed": lambda x, size: idist.all_reduce(x * 3, exact=False),
    "all_reduce in a group": lambda x, size: idist.all_reduce(x * 3, group=list(range(size))),
    "two in a row": lambda x, size: idist.all_reduce(idist.all_reduce(x) * 0.5, "MIN"),
    "the same twice": lambda x, size: idist.all_gather(x) + idist.all_gather(x),
    "all_gather": lambda x, size: idist.all_gather(x * 3),
    "all_gather of a number": lambda x, size: idist.all_gather(x[1, 2] * 3),
    "all_gather without out": lambda x, size: idist.all_gather(x * 3, out=None),
    "all_gather with a gradient": lambda x, size: idist.all_gather(x * 3, sync_grads=True) * 2,
    "broadcast": lambda x, size: idist.broadcast(x * 3),
    "broadcast from the last": lambda x, size: idist.broadcast(x, size - 1),
    "all_to_all": lambda x, size: idist.all_to_all(torch.cat([x * 3] * size)),
    "reduce_scatter": lambda x, size: idist.reduce_scatter(torch.cat([x * 3] * size)) + 1,
    "reduce_scatter by MAX": lambda x, size: idist.reduce_scatter(torch.cat([x] * size), "max"),
    "barrier": lambda x, size: (idist.barrier(), x * 3)[1],
}
# Everything else: the graph ends there, and another begins.
BETWEEN_GRAPHS: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda x: x + idist.all_reduce(2),
    "a tree": lambda x: idist.all_reduce({"a": x * 3, "b": 2.5, "c": [x[0].clone()]}),
    "a tree in place": lambda x: idist.all_reduce([x, x.clone()], inplace=True),
    "a place in a group": lambda x: x + idist.get_rank([0]) * 3 + idist.get_world_size([0]),
    "a printed line": lambda x: (idist.print("x", file=io.StringIO()), x * 3),
    "an object": lambda x: (idist.all_gather({"rank": idist.get_rank()}), x * 3),
    "an object broadcast": lambda x: (idist.broadcast("from 0"), x * 3),
    "safe mode": lambda x: idist.broadcast(x if idist.get_rank() == 0 else None, safe_mode=True),
    "ragged": lambda x: idist.all_gather_ragged(x[: idist.get_rank() + 1]),
    "with shapes": lambda x: idist.all_gather_tensors_with_shapes(x, [x.shape] * idist.get_world_size()),
    "out=": lambda x: idist.all_gather(x, out=x.new_empty(4 * idist.get_world_size(), 3)),
    "any_true": lambda x: x + 1 if idist.any_true(idist.get_rank() == 0) else x - 1,
    "all_true": lambda x: x + 1 if idist.all_true(idist.get_rank() == 0) else x - 1,
    "half of the ranks": lambda x: idist.all_reduce(x * 3, group=half_of_the_ranks()),
    "half of the ranks gather": lambda x: idist.all_gather(x, group=half_of_the_ranks()),
    "a handle": lambda x: idist.all_reduce(x * 3, group=idist.world_group()),
    "one_rank_only": lambda x: (on_the_first(x * 3), x),
    "one_rank_only, told": lambda x: x + of_the_first(),
    "one_rank_first": lambda x: in_a_block(idist.one_rank_first(), x),
    "raise_together": lambda x: in_a_block(idist.raise_together(), x),
    "barrier with a group": lambda x: (idist.barrier(group=half_of_the_ranks()), x)[1],
    "show_config": lambda x: (idist.show_config(), x)[1],
    "shared_seed": lambda x: (isinstance(idist.shared_seed(), int), x),
    "a batch": lambda x: idist.to_device({"x": x}),
    "gather": lambda x: (idist.gather(x * 3), x),
    "scatter": lambda x: idist.scatter([x] * idist.get_world_size() if idist.get_rank() == 0 else None),
    "reduce": lambda x: (idist.reduce(x), x),
    "reduce_scatter": lambda x: idist.reduce_scatter([x * 3] * idist.get_world_size()),
    "all_to_all": lambda x: idist.all_to_all([x * 3] * idist.get_world_size()),
}


@idist.one_rank_only()
def on_the_first(x: Tensor) -> float:
    return x.sum().item()


@idist.one_rank_only(broadcast=True)
def of_the_first() -> int:
    return idist.get_rank() + 5


def in_a_block(block: Any, x: Tensor) -> Tensor:
    with block:
        y = x * 3
    return y + 1


def check_like_eager(function: Callable[[Tensor], Any], compiler: str, **options: Any) -> None:
    eager, compiled = sample(), sample()
    with compiling():
        with count_collectives() as counted:
            expected = function(eager)
        with count_collectives() as counted_there:
            result = torch.compile(function, backend=compiler, **options)(compiled)
        # A serial model makes way for another when the compiler imports its modules.
        assert counted_there.count == counted.count or current_model().backend() is None
    for one, other in zip(leaves([expected, eager]), leaves([result, compiled]), strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(other, one, rtol=0, atol=0)
        else:
            assert one == other
    assert (result is compiled) == (expected is eager)
    assert compiled._version > 0 or eager._version == 0


def leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in leaves(one)]
    return leaves(list(value.values())) if isinstance(value, dict) else [value]


def can_hold_collectives() -> bool:
    """XLA's replicas may be threads, which share a graph: there it always ends at a collective."""
    return not current_model().transport.groups_need_all_ranks


def compiler_of_all() -> str:
    """Inductor takes a minute for all functions: only where ``INDUCTOR`` runs, and on several ranks.

    On one rank a graph has no collectives.
    """
    is_worth_it = idist.backend() in BACKENDS_OF_TORCH and idist.get_world_size() > 1
    return "inductor" if is_worth_it else "aot_eager"


@pytest.mark.parametrize("name", IN_A_GRAPH)
@on_every_rank
@where_it_compiles
def test_a_tensor_collective_is_part_of_the_graph(name: str) -> None:
    size, function = idist.get_world_size(), IN_A_GRAPH[name]
    check_like_eager(lambda x: function(x, size), "aot_eager", fullgraph=can_hold_collectives())


@pytest.mark.all_functions
@on_every_rank
@where_it_compiles
def test_they_all_are_part_of_one_graph() -> None:
    size = idist.get_world_size()

    def everything(x: Tensor) -> list[Any]:
        return [function(x.clone(), size) for function in IN_A_GRAPH.values()]

    check_like_eager(everything, compiler_of_all(), fullgraph=can_hold_collectives())


@pytest.mark.parametrize("name", BETWEEN_GRAPHS)
@on_every_rank
@where_it_compiles
def test_everything_else_is_a_graph_break(name: str) -> None:
    check_like_eager(BETWEEN_GRAPHS[name], "eager")


@pytest.mark.all_functions
@on_every_rank
@where_it_compiles
def test_graphs_around_all_the_others() -> None:
    def everything(x: Tensor) -> list[Any]:
        return [function(x.clone()) for function in BETWEEN_GRAPHS.values()]

    check_like_eager(everything, compiler_of_all())


@pytest.mark.parametrize("compiler", COMPILERS)
@on_every_rank
@where_it_compiles
def test_a_result_that_a_rank_does_not_use_is_exchanged_all_the_same(compiler: str) -> None:
    """Else the ranks that do use it would wait for ever."""

    def function(x: Tensor) -> Tensor:
        gathered = idist.all_gather(x)
        summed = idist.all_reduce(x * 2)
        with_grad = idist.all_gather(x, sync_grads=True)
        return gathered[0] + summed[0] + with_grad[0] if idist.get_rank() == 0 else x[0]

    check_like_eager(function, compiler)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool], ids=str)
@on_every_rank
@where_it_compiles
def test_every_dtype(dtype: torch.dtype) -> None:
    op = "OR" if dtype is torch.bool else "SUM"
    with compiling():
        compiled = torch.compile(
            lambda x: (idist.all_reduce(x.clone(), op), idist.all_gather(x)), backend="aot_eager"
        )
        for one, other in zip(
            compiled(sample(dtype=dtype)),
            (idist.all_reduce(sample(dtype=dtype), op), idist.all_gather(sample(dtype=dtype))),
            strict=True,
        ):
            assert one.dtype is dtype and torch.equal(one, other)


@pytest.mark.parametrize("compiler", COMPILERS)
@on_every_rank
@where_it_compiles
def test_sizes_that_change(compiler: str) -> None:
    with compiling():
        compiled = torch.compile(
            lambda x: idist.all_gather(x * 2).sum() + idist.all_reduce(x).sum(),
            backend=compiler,
            dynamic=True,
        )
        for length in (2, 3, 5):
            total = compiled(torch.ones(length)).item()
            assert total == 3 * length * idist.get_world_size()


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("collective", ["all_gather", "all_reduce"])
@on_every_rank
@where_it_compiles
def test_the_gradient_is_that_of_the_eager_call(collective: str, compiler: str) -> None:
    weight = idist.get_rank() + 1

    def loss(x: Tensor) -> Tensor:
        y = getattr(idist, collective)(x.exp(), sync_grads=True)
        return (y.pow(3) * weight).sum()

    with compiling():
        grads = []
        for function in (loss, torch.compile(loss, backend=compiler, fullgraph=can_hold_collectives())):
            x = (sample() / 100).requires_grad_()
            function(x).backward()
            assert x.grad is not None
            grads.append(x.grad)
        torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("compiler", COMPILERS)
@on_every_rank
@where_it_compiles
def test_two_forward_passes_before_two_backward_passes(compiler: str) -> None:
    """A contrastive loss of two views: each backward pass goes with its own forward pass."""

    def embed(x: Tensor) -> Tensor:
        return idist.all_gather(x.exp(), sync_grads=True).pow(2)

    with compiling():
        grads = []
        for function in (embed, torch.compile(embed, backend=compiler)):
            views = [(sample() / 100 * factor).requires_grad_() for factor in (1, 2)]
            first, second = (function(view) for view in views)
            (second.sum() * (idist.get_rank() + 1)).backward()
            first.sum().backward()
            grads.append([view.grad for view in views])
        torch.testing.assert_close(grads[1], grads[0])


@on_every_rank
@where_it_compiles
def test_arguments_are_refused_before_anything_is_sent() -> None:
    """Then the very next call is right: no rank is a collective behind."""
    size = idist.get_world_size()
    x = torch.ones(3)
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "FOO", lambda: idist.all_reduce(x * 1, "FOO")),
        (TypeError, "AND", lambda: idist.all_reduce(x * 1, "AND")),
        (ValueError, "clone", lambda: idist.all_reduce(x.expand(2, 3))),
        (ValueError, "src", lambda: idist.broadcast(x * 1, size)),
        (ValueError, "distinct", lambda: idist.all_reduce(x * 1, group=[0, size])),
        (TypeError, "all_reduce", lambda: idist.all_reduce("text")),
        (TypeError, "floating", lambda: idist.all_gather(x.long(), sync_grads=True)),
    ]
    with compiling():
        for kind, text, function in wrong:
            with count_collectives() as counted, raises(kind, text):
                torch.compile(function, backend="eager")()
            assert counted.count == 0
        assert idist.all_reduce(1) == size


@on_every_rank
@where_it_compiles
def test_getters_answer_inside() -> None:
    def function(x: Tensor) -> tuple[Any, ...]:
        size, rank = idist.get_world_size(), idist.get_rank()
        names = idist.backend(), idist.model_name(), idist.device().type, idist.is_global_zero()
        return x + size, rank, *names, idist.get_local_rank()

    with compiling():
        one, other = function(torch.zeros(1)), torch.compile(function, backend="eager")(torch.zeros(1))
        assert one == other


@pytest.mark.parametrize("compiler", ["eager", INDUCTOR])
@on_every_rank
@where_it_compiles
def test_debug_compares_the_calls_of_graphs(compiler: str) -> None:
    with compiling(), idist.compare_calls():
        compiled = torch.compile(lambda x: idist.all_reduce(x * 2) + idist.get_rank(), backend=compiler)
        for _ in range(3):
            assert compiled(torch.ones(2))[0].item() == 2 * idist.get_world_size() + idist.get_rank()
        if idist.get_world_size() > 1:
            with raises(idist.CollectiveMismatchError, "all_reduce"):
                compiled(torch.ones(2 + (idist.get_rank() == 0)))
            assert compiled(torch.ones(2))[0].item() == 2 * idist.get_world_size() + idist.get_rank()


class Contrastive(torch.nn.Module):
    """Every sample is compared with those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.layers(x)
        everything = idist.all_gather(embedded, sync_grads=True)
        return torch.logsumexp(embedded @ everything.T, 1).mean() - (embedded * embedded).mean()


@pytest.mark.parametrize("compiler", COMPILERS)
@on_every_rank
@where_it_compiles
def test_a_compiled_model_whose_forward_gathers(compiler: str) -> None:
    trained = []
    for is_compiled in (False, True):
        net = idist.auto_model(Contrastive())
        optimizer = idist.auto_optim(torch.optim.SGD(net.parameters(), lr=0.1))
        model = torch.compile(net, backend=compiler) if is_compiled else net
        with compiling():
            for _ in range(3):
                optimizer.zero_grad()
                model((sample() / 100).to(idist.device())).backward()
                optimizer.step()
        trained.append([parameter.detach().cpu() for parameter in net.parameters()])
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(other, one)
        assert len({tuple(row.flatten().tolist()) for row in idist.all_gather(other[None])}) == 1
