"""DistributedDataParallel averages gradients over shared memory, and everything else stays torch's."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import Embedding, Linear, Module, Sequential
from torch.nn.parallel import DistributedDataParallel

import helpers
import ignite_dist as idist
from ignite_dist.comp_models.shared_memory.opening import VARIABLE
from ignite_dist.internals import _torch
from on_ranks import on_ranks
from waiting import when_waiting


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the whole suite runs without shared memory."""
    monkeypatch.delenv(VARIABLE, raising=False)


def linear() -> Linear:
    torch.manual_seed(0)
    return Linear(300, 1000, bias=False)


def backward(model: Module, scale: float = 1.0) -> Tensor:
    """The gradient after a backward pass, in which the gradient of rank ``r`` is ``scale * (r + 1)``."""
    for parameter in model.parameters():
        parameter.grad = None
    model(torch.full((1, 300), scale * (idist.get_rank() + 1))).sum().backward()
    (gradient,) = [parameter.grad for parameter in model.parameters()]
    assert gradient is not None
    return gradient


def over_gloo(run: Callable[[], Any], group: Any = None) -> int:
    """Number of collectives that ``run`` begins in torch's process group."""
    handle = dist.group.WORLD if group is None else group
    before = _torch.sequence_number(handle)
    run()
    return (_torch.sequence_number(handle) or 0) - (before or 0)


# --- results -------------------------------------------------------------------------------------------


def _averages(_: int) -> None:
    average = (idist.get_world_size() + 1) / 2
    for kwargs in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 0.3}):
        model = idist.auto_model(linear(), **kwargs)
        for _ in range(3):  # DDP agrees on its buckets in the first steps
            assert backward(model).eq(average).all()
        assert over_gloo(partial(backward, model)) == 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_averaged_without_gloo(world_size: int) -> None:
    on_ranks(_averages, world_size=world_size)


def _same_bits(_: int) -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    factors = torch.randn((size, 1000, 300), generator=torch.Generator().manual_seed(1))
    model = idist.auto_model(_Weighted())
    model(factors[rank]).backward()
    expected = factors[0] * (1 / size)
    for other in range(1, size):
        expected = expected + factors[other] * (1 / size)
    assert torch.equal(model.module.weight.grad, expected)


class _Weighted(Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1000, 300))

    def forward(self, factors: Tensor) -> Tensor:
        return (self.weight * factors).sum()


def test_gradients_are_added_in_rank_order() -> None:
    on_ranks(_same_bits, world_size=3)


# --- what torch does with a wrapped model --------------------------------------------------------------


def _hooked(_: int) -> None:
    model = idist.auto_model(linear())
    assert backward(model).eq(1.5).all()
    model.register_comm_hook(None, fp16_compress_hook)
    assert backward(model, 1 + 1e-4).eq(1.5).all(), "float16 has no 1.0001"
    assert over_gloo(partial(backward, model)) > 0


def test_a_hook_of_the_user_replaces_shared_memory() -> None:
    on_ranks(_hooked)


def _copied(_: int) -> None:
    model = idist.auto_model(linear())
    for _ in range(2):  # DDP agrees on its buckets in the first steps
        backward(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert backward(copied).eq(1.5).all()
    assert over_gloo(partial(backward, model)) == 0


def test_a_wrapped_model_can_be_copied_and_pickled() -> None:
    on_ranks(_copied)


def _joined(_: int, unused: bool) -> list[list[float]]:
    found = []
    for by_all in (True, False):
        for wrap in (idist.auto_model, DistributedDataParallel):
            model = wrap(linear(), find_unused_parameters=unused)
            gradients = []
            with idist.uneven_inputs(model, divide_by_initial_world_size=by_all):
                for _ in range(1 + 2 * idist.get_rank()):
                    gradients.append(float(backward(model)[0, 0]))
            found.append(gradients)
    return found


@pytest.mark.parametrize("unused", [False, True])
def test_uneven_inputs(unused: bool) -> None:
    """A rank without data sends zeros, and the divisor may be the number of the others."""
    assert on_ranks(_joined, unused) == [[[1.5]] * 4, [[1.5, 1, 1]] * 2 + [[1.5, 2, 2]] * 2]


class _TwoModels(Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (idist.auto_model(Linear(3, 3, bias=False)) for _ in range(2))

    def forward(self, data: Tensor) -> Tensor:
        return self.first(data).sum() + 2 * self.second(data).sum()


def _two_joined(rank: int) -> list[list[float]]:
    """A rank without data sends zeros for the first model first, unlike a backward pass."""
    model, found = _TwoModels(), []

    def step() -> None:
        model.zero_grad()
        model(torch.full((1, 3), rank + 1.0)).backward()
        found.append([float(one.grad[0, 0]) for one in model.parameters()])

    step(), step()  # DDP agrees on its buckets
    with idist.uneven_inputs(model):
        for _ in range(1 + rank):
            step()
    return found[2:]


def test_uneven_inputs_of_two_models() -> None:
    assert on_ranks(_two_joined) == [[[1.5, 3]], [[1.5, 3], [1, 2]]]


def _sparse(_: int) -> None:
    model = idist.auto_model(Embedding(4, 3, sparse=True))
    model(torch.tensor([idist.get_rank()])).sum().backward()
    assert model.module.weight.grad.to_dense()[:, 0].tolist() == [0.5, 0.5, 0, 0]


def test_sparse_gradients() -> None:
    on_ranks(_sparse)


def _in_pairs(_: int) -> None:
    rank = idist.get_rank()
    pairs = [idist.new_group(pair) for pair in ([0, 1], [2, 3])]
    pair = pairs[rank // 2]
    model = idist.auto_model(linear(), process_group=pair)
    for _ in range(2):
        assert backward(model).eq(1.5 if rank < 2 else 3.5).all()
    assert over_gloo(partial(backward, model), pair) == 0


def test_a_process_group_of_the_user() -> None:
    on_ranks(_in_pairs, world_size=4)


def _over_gloo(_: int) -> None:
    if idist.get_rank() == 1:
        os.environ[VARIABLE] = "0"
    try:
        model = idist.auto_model(linear())
        assert backward(model).eq(1.5).all()
        assert over_gloo(partial(backward, model)) > 0
    finally:
        os.environ.pop(VARIABLE, None)


def test_ranks_that_share_no_memory_average_over_gloo() -> None:
    on_ranks(_over_gloo)


def _in_a_later_context() -> None:
    """A wrapped model goes on as torch's own does."""
    idist.initialize("gloo")
    model = idist.auto_model(linear())
    backward(model)
    for _ in range(2):
        idist.finalize()
        idist.initialize("gloo")
        assert backward(model).eq(1.5).all()
        assert backward(idist.auto_model(linear())).eq(1.5).all()
    idist.finalize()


def test_a_model_outlives_its_context() -> None:
    helpers.run_ranks(_in_a_later_context)


def _unsorted(_: int) -> str:
    group = dist.new_group([1, 0], sort_ranks=False)
    with pytest.raises(ValueError, match="ascending") as caught:
        idist.auto_model(linear(), process_group=group)
    with pytest.raises(ValueError, match="ascending"):
        idist.all_reduce(1, group=group)
    return str(caught.value)


def test_a_group_that_is_not_in_ascending_order() -> None:
    assert "[1, 0]" in on_ranks(_unsorted)[0]


# --- failures ------------------------------------------------------------------------------------------


def _other_call(_: int) -> None:
    model = idist.auto_model(linear())
    if idist.get_rank() == 0:
        backward(model)
    else:
        idist.all_reduce(torch.ones(3))


def test_another_call_on_another_rank() -> None:
    with pytest.raises(idist.WorkerRaisedError) as caught:
        on_ranks(_other_call)
    text = str(caught.value)
    assert "CollectiveMismatchError: The ranks made different calls (" in text
    place = "at training/test_ddp_in_memory.py:"
    gradients = "gradients of model 1(torch.float32 (300000,))"
    assert f"rank 0: backward {place}" in text and f"({gradients})" in text
    assert f"rank 1: all_reduce {place}" in text and "(SUM torch.float32 (3,))" in text


class _FailsOnRank1(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, output: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        if idist.get_rank() == 1:
            raise MemoryError
        return gradient


def _misses_a_pass(rank: int, sparse: bool) -> list[str]:
    """Two models of one size are trained in turn. Rank 1 misses a pass, before any gradient."""
    generator, critic = (idist.auto_model(Embedding(4, 3, sparse=sparse)) for _ in range(2))
    said = []
    for step, model in enumerate([generator, critic] * 4 + [generator] * rank):
        try:
            output = model(torch.tensor([step % 4]))
            (_FailsOnRank1.apply(output) if step == 4 else output).sum().backward()
            said.append("no error")
        except MemoryError:
            said.append("no memory")
        except idist.CollectiveMismatchError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_two_models_are_never_added(sparse: bool) -> None:
    first, second = on_ranks(_misses_a_pass, sparse)
    assert first[:4] == second[:4] == ["no error"] * 4
    assert second[4] == "no memory" and "no error" not in first[4:] + second[5:]
    for text in (first[4], second[5]):
        assert "gradients of model 1(" in text and "gradients of model 2(" in text


def _in_two_groups(rank: int) -> list[Any]:
    """Rank 1 fails in a pass, and makes another call in its group. Rank 2 has a group with rank 0 too."""
    groups = [idist.new_group(ranks) for ranks in ([0, 1], [0, 2])]
    own = [
        idist.auto_model(Linear(1, 1, bias=False), process_group=group)
        for group in groups
        if idist.get_rank(group) >= 0
    ]
    found: list[Any] = []
    for step in range(4):
        outputs = [model(torch.full((1, 1), 10.0**step)) for model in own]
        for model in own:
            model.zero_grad()
        try:
            loss = torch.stack(outputs).sum()
            (_FailsOnRank1.apply(loss) if step == 2 else loss).backward()
            found.append([float(model.module.weight.grad) for model in own])
        except MemoryError:
            with pytest.raises(idist.CollectiveMismatchError):
                idist.all_reduce(1, group=groups[0])
        except idist.CollectiveMismatchError:
            found.append("mismatch")
    return found


def test_a_group_goes_on_after_a_mismatch_in_another_one() -> None:
    assert on_ranks(_in_two_groups, world_size=3) == [
        [[1, 1], [10, 10], "mismatch", [1000, 1000]],
        [[1], [10], [1000]],
        [[1], [10], [100], [1000]],
    ]


class _FailsBetweenLayers(Sequential):
    fails = False

    def forward(self, data: Tensor) -> Tensor:
        first, second = self
        hidden = first(data)
        return second(_FailsOnRank1.apply(hidden) if self.fails else hidden)


def _fails_in_a_pass(rank: int, kwargs: dict[str, Any]) -> list[str]:
    """Rank 1 has no memory in the middle of a pass. Ranks that get an error after it make a new wrapper."""

    def wrap() -> Any:
        return idist.auto_model(idist.unwrap_model(model), **kwargs)

    said = []
    model = _FailsBetweenLayers(Linear(3, 3), Linear(3, 3))
    model = wrap()
    for step in range(6):
        model.zero_grad()
        idist.unwrap_model(model).fails = step == 2
        try:
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
            said.append("no error")
        except MemoryError:
            said.append("no memory")
        except RuntimeError as error:
            said.append(str(error))
            model = wrap()
    if rank == 1:  # it has missed a pass
        model(torch.ones(1, 3)).sum().backward()
    return said


@pytest.mark.parametrize(
    "kwargs", [{}, {"bucket_cap_mb": 1e-5}, {"find_unused_parameters": True}, {"static_graph": True}]
)
def test_after_a_pass_that_failed_all_ranks_are_told(kwargs: dict[str, Any]) -> None:
    first, second = on_ranks(_fails_in_a_pass, kwargs)
    assert first[:2] + first[3:] == ["no error"] * 5
    assert "rank 1: forward at" in first[2] and "the last backward pass of model 1 failed" in first[2]
    assert second[:3] + second[4:] == ["no error", "no error", "no memory", "no error", "no error"]
    assert "idist.auto_model(idist.unwrap_model(model))" in second[3]


class _FailsAtItsInput(Module):
    """Its backward pass may fail after all gradients of the model were sent."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Linear(3, 3)

    def forward(self, data: Tensor, fails: bool) -> Tensor:
        return self.model(_FailsOnRank1.apply(data) if fails else data)


def _fails_before_a_local_pass(rank: int) -> list[list[int]]:
    model = idist.auto_model(_FailsAtItsInput())
    for fails in (False, False, True):
        with pytest.raises(MemoryError) if fails and rank == 1 else nullcontext():
            model(torch.ones(1, 3, requires_grad=True), fails).sum().backward()
    with model.no_sync(), pytest.raises(RuntimeError, match="failed") if rank == 1 else nullcontext():
        model(torch.ones(1, 3), False).sum().backward()
    return [idist.all_gather(rank) for _ in range(2)]


def test_a_rank_that_misses_a_local_pass_misses_no_call() -> None:
    assert on_ranks(_fails_before_a_local_pass) == [[[0, 1]] * 2] * 2


def _interrupted(_: int, width: int) -> None:
    """Rank 0 is interrupted while it waits for rank 1 in the first of several buckets."""
    control = idist.new_group([0, 1])
    os.environ[VARIABLE] = "0"
    idist.barrier(control)
    del os.environ[VARIABLE]
    model = idist.auto_model(Sequential(*(Linear(width, width) for _ in range(4))), bucket_cap_mb=1e-5)
    data = torch.ones(2, width) * (idist.get_rank() + 1)
    for _ in range(2):
        model(data).sum().backward()
    loss = model(data).sum()
    if idist.get_rank() == 0:
        when_waiting(lambda: (os.kill(os.getpid(), signal.SIGINT), idist.barrier(control)))
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    else:
        idist.barrier(control)
        loss.backward()
    for _ in range(2):
        model.zero_grad()
        model(data).sum().backward()
        assert model.module[3].bias.grad.eq(2).all()
        assert len({float(one.grad.sum()) for one in model.parameters()}) > 1
        assert all_equal([one.grad for one in model.parameters()])


def all_equal(gradients: list[Any]) -> bool:
    flat = torch.cat([one.reshape(-1) for one in gradients])
    return torch.equal(*idist.all_gather(flat[None]).unbind())


@pytest.mark.parametrize("width", [30, 160])  # 160: more than 64 KB in one step
def test_an_interrupt_in_a_backward_pass_is_raised_at_its_end(width: int) -> None:
    on_ranks(_interrupted, width)


def _raises_in_a_pass(rank: int) -> list[str]:
    """Rank 1 gets an exception of a signal handler while it waits, and has not sent all pieces."""

    def interrupt(*_: Any) -> None:
        raise TimeoutError("too long")

    signal.signal(signal.SIGALRM, interrupt)
    control = idist.new_group([0, 1])
    os.environ[VARIABLE] = "0"
    idist.barrier(control)
    del os.environ[VARIABLE]
    model, said = idist.auto_model(linear()), []
    for _ in range(2):  # torch rebuilds its buckets between the two
        backward(model)
    if rank == 1:
        when_waiting(lambda: (os.kill(os.getpid(), signal.SIGALRM), idist.barrier(control)))
    else:
        idist.barrier(control)
    try:
        backward(model)
    except (TimeoutError, idist.CollectiveMismatchError) as error:
        said.append(type(error).__name__)
    for _ in range(2):
        assert backward(model).eq(1.5).all()
    return said


def test_an_exception_of_a_signal_handler_is_raised_at_the_end_too() -> None:
    assert on_ranks(_raises_in_a_pass) == [["CollectiveMismatchError"], ["TimeoutError"]]


def _makes_other_calls(rank: int, num_steps: int) -> list[str]:
    """In place of one backward pass, rank 0 makes another call; torch rebuilds its buckets in the second."""
    model, said = idist.auto_model(Sequential(Linear(3, 3), Linear(3, 3)), bucket_cap_mb=1e-5), []

    def step() -> None:
        model.zero_grad()
        model(torch.full((1, 3), rank + 1.0)).sum().backward()

    for _ in range(num_steps):
        step()
    for call in (lambda: idist.all_reduce(1) if rank == 0 else step(), *(step for _ in range(4))):
        try:
            call()
        except idist.CollectiveMismatchError as error:
            said.append(str(error).partition("(rank 0: ")[2].partition("(")[0])
    assert all_equal([one.grad for one in model.parameters()])
    return said


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_the_model_goes_on_after_another_call_in_place_of_a_step(num_steps: int) -> None:
    first, second = on_ranks(_makes_other_calls, num_steps)
    assert first == second and first[0].startswith("all_reduce at")
    # Only the first pass lets torch rebuild the buckets, so one more call of the ranks differs.
    assert len(first) <= 2
