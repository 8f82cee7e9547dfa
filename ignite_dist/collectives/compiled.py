"""Collectives as operators in a graph of ``torch.compile``. Imported at the first trace: the import is slow.

Each operator runs the eager call, so its checks, results and errors are the same as without the compiler. The
compiler cannot look inside the operator.

The compiler must not drop, merge or reorder collectives: other ranks would wait for a dropped call. So each
operator writes to one tensor, the token, which is an input of the graph.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from ignite_dist.collectives import autograd
from ignite_dist.collectives.path import perform_backward
from ignite_dist.context.live import current_model, model_of_the_graph
from ignite_dist.internals.tracing import call_eagerly, eager_functions, leave_traced
from ignite_dist.values import reduce_ops

leave_traced(__name__)

# torch.compile caches graphs on disk and finds operators by name only. Increase the number in the name when
# the arguments of an operator change.
_ops = torch.ops.ignite_dist_2

with torch.inference_mode(False):  # an inference tensor could not be written to later
    _token = torch.zeros(1, device="cpu")


# --- replacements of the public functions while tracing ---------------------------------------------------


def all_reduce(tensor: Any, op: Any = "SUM", group: Any = None, **options: Any) -> Any:
    """See ``idist.all_reduce``."""
    inplace, sync_grads = options.get("inplace") in (None, True), options.get("sync_grads", False)
    exact = options.get("exact", True)
    if not (
        options.keys() <= {"inplace", "sync_grads", "exact"}
        and type(exact) is bool
        and (exact or not sync_grads)
        and _is_plain(tensor, is_changed=inplace and not sync_grads)
        and isinstance(op, str)
        and _is_supported(group)
    ):
        return call_eagerly(eager_functions["all_reduce"], tensor, op, group, **options)
    ranks = _ranks(group)
    if sync_grads:
        return _keep_result(_ops.all_reduce_with_grad(tensor, _token, op, ranks))
    reduced = tensor.detach() if inplace else tensor.detach().clone()
    _ops.all_reduce_(reduced, _token, op, ranks, exact)
    return tensor if inplace else reduced


def all_gather(tensor: Any, group: Any = None, **options: Any) -> Any:
    """See ``idist.all_gather``."""
    returns_new = options.keys() <= {"sync_grads", "out"} and options.get("out") is None
    if not (returns_new and _is_plain(tensor, is_changed=False) and _is_supported(group)):
        return call_eagerly(eager_functions["all_gather"], tensor, group, **options)
    ranks, model, group_size = _ranks(group), model_of_the_graph(), _group_size(group)
    if options.get("sync_grads", False):
        rank = model.get_rank()
        position = rank if ranks is None else ranks.index(rank)
        return _keep_result(_ops.all_gather_with_grad(tensor, _token, ranks, group_size, position))
    return _ops.all_gather(tensor.detach(), _token, ranks, group_size)


def all_to_all(x: Any, group: Any = None, out: Any = None, **options: Any) -> Any:
    """See ``idist.all_to_all``."""
    if options or out is not None or not _is_divisible(x, group):
        return call_eagerly(eager_functions["all_to_all"], x, group, out, **options)
    return _ops.all_to_all(x.detach(), _token, _ranks(group))


def reduce_scatter(x: Any, op: Any = "SUM", group: Any = None, out: Any = None, **options: Any) -> Any:
    """See ``idist.reduce_scatter``."""
    if options or out is not None or not (_is_divisible(x, group) and isinstance(op, str)):
        return call_eagerly(eager_functions["reduce_scatter"], x, op, group, out, **options)
    return _ops.reduce_scatter(x.detach(), _token, op, _ranks(group), _group_size(group))


def broadcast(tensor: Any, src: Any = 0, safe_mode: Any = False, group: Any = None, **options: Any) -> Any:
    """See ``idist.broadcast``."""
    if (
        options
        or safe_mode
        or not (_is_plain(tensor, is_changed=True) and type(src) is int and _is_supported(group))
    ):
        return call_eagerly(eager_functions["broadcast"], tensor, src, safe_mode, group, **options)
    _ops.broadcast_(tensor.detach(), _token, src, _ranks(group))
    return tensor


def barrier(group: Any = None, timeout: Any = None, **options: Any) -> Any:
    """See ``idist.barrier``."""
    if options or timeout is not None or not _is_supported(group):
        return call_eagerly(eager_functions["barrier"], group, timeout, **options)
    return _ops.barrier(_token, _ranks(group))


def _is_plain(tensor: Any, *, is_changed: bool) -> bool:
    """True if a graph can contain the collective of ``tensor``. If False, the eager call checks ``tensor``.

    Args:
        tensor: the value from the caller.
        is_changed: True if the result is written into ``tensor``. If elements of ``tensor`` share memory, the
            compiler passes a copy to the operator, which then cannot raise.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False
    if tensor.is_quantized or tensor.is_meta:
        return False
    return not is_changed or tensor.is_contiguous() or _is_dense(tensor)


def _is_dense(tensor: Tensor) -> bool:
    """True if the elements fill memory without gaps or overlap, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _is_supported(group: Any) -> bool:
    """True if a graph can contain a collective of ``group``: the world, or a list with this rank."""
    model = model_of_the_graph()
    if model.transport.groups_need_all_ranks:  # XLA: ranks may be threads that share a graph
        return False
    if group is None:
        return True
    return (
        isinstance(group, (list, tuple))
        and all(type(rank) is int for rank in group)
        and model.get_rank() in group
    )


def _ranks(group: Any) -> list[int] | None:
    return None if group is None else sorted(group)


def _group_size(group: Any) -> int:
    return model_of_the_graph().get_world_size() if group is None else len(group)


def _is_divisible(x: Any, group: Any) -> bool:
    """True if a graph can contain an exchange of the parts of ``x``. If not, the eager call checks ``x``."""
    return (
        _is_plain(x, is_changed=False)
        and _is_supported(group)
        and x.dim() > 0
        and x.shape[0] % _group_size(group) == 0
    )


# --- the operators ----------------------------------------------------------------------------------------


@custom_op("ignite_dist_2::all_reduce_", mutates_args=("tensor", "token"))
def _all_reduce_in_place(
    tensor: Tensor, token: Tensor, op: str, ranks: list[int] | None, exact: bool
) -> None:
    eager_functions["all_reduce"](tensor, op, ranks, exact=exact)


@custom_op("ignite_dist_2::broadcast_", mutates_args=("tensor", "token"))
def _broadcast_in_place(tensor: Tensor, token: Tensor, src: int, ranks: list[int] | None) -> None:
    eager_functions["broadcast"](tensor, src, group=ranks)


@custom_op("ignite_dist_2::all_gather", mutates_args=("token",))
def _all_gather(tensor: Tensor, token: Tensor, ranks: list[int] | None, group_size: int) -> Tensor:
    return _gather(tensor, ranks, group_size)


@custom_op("ignite_dist_2::all_to_all", mutates_args=("token",))
def _all_to_all(tensor: Tensor, token: Tensor, ranks: list[int] | None) -> Tensor:
    return eager_functions["all_to_all"](tensor, ranks)  # type: ignore[no-any-return]


@custom_op("ignite_dist_2::reduce_scatter", mutates_args=("token",))
def _reduce_scatter(
    tensor: Tensor, token: Tensor, op: str, ranks: list[int] | None, group_size: int
) -> Tensor:
    part: Tensor = eager_functions["reduce_scatter"](tensor, op, ranks)
    _check_group_size(len(tensor), group_size * len(part), group_size)
    return part


@custom_op("ignite_dist_2::barrier", mutates_args=("token",))
def _barrier(token: Tensor, ranks: list[int] | None) -> None:
    eager_functions["barrier"](ranks)


# An operator with a gradient cannot write to its inputs. So the next operators read the token, which orders
# them after earlier collectives, and _keep() writes to the token. A backward pass has no token: autograd
# rejects a saved tensor that later forward passes change. Each backward call has a unique number, which stops
# the compiler from merging two equal calls.


@custom_op("ignite_dist_2::keep", mutates_args=("token",))
def _keep(token: Tensor, result: Tensor) -> None:
    pass


@custom_op("ignite_dist_2::all_reduce_with_grad", mutates_args=())
def _all_reduce_with_grad(tensor: Tensor, token: Tensor, op: str, ranks: list[int] | None) -> Tensor:
    return eager_functions["all_reduce"](tensor, op, ranks, sync_grads=True)  # type: ignore[no-any-return]


@custom_op("ignite_dist_2::all_gather_with_grad", mutates_args=())
def _all_gather_with_grad(
    tensor: Tensor, token: Tensor, ranks: list[int] | None, group_size: int, position: int
) -> Tensor:
    return _gather(tensor, ranks, group_size, sync_grads=True)


@custom_op("ignite_dist_2::reduce_gradient", mutates_args=())
def _reduce_gradient(
    gradient: Tensor, function: str, op: str, ranks: list[int] | None, number: int
) -> Tensor:
    model, op = current_model(), reduce_ops.normalize_op(op)
    members = model.groups.resolve(ranks)
    return perform_backward(
        model,
        function,
        members,
        lambda members: autograd.reduce_with_grad(model, gradient, op, members),
        gradient,
        op,
    )


def _gather(tensor: Tensor, ranks: list[int] | None, group_size: int, **options: Any) -> Tensor:
    gathered: Tensor = eager_functions["all_gather"](tensor, ranks, **options)
    _check_group_size(len(gathered), _gathered_shape(tensor, group_size)[0], group_size)
    return gathered


def _check_group_size(length: int, expected: int, group_size: int) -> None:
    if length != expected:
        raise RuntimeError(
            f"This graph was compiled for a group of {group_size} ranks in an earlier context. torch.compile "
            "did not notice the new context. Call torch.compiler.reset()."
        )


def _gathered_shape(tensor: Tensor, group_size: int) -> tuple[int, ...]:
    return (group_size * (tensor.shape[0] if tensor.dim() else 1), *tensor.shape[1:])


def _keep_result(result: Tensor) -> Tensor:
    _ops.keep(_token, result.detach())
    return result


# --- shapes and gradients of the operators ----------------------------------------------------------------


@_all_reduce_in_place.register_fake
@_broadcast_in_place.register_fake
@_barrier.register_fake
@_keep.register_fake
def _(*args: Any) -> None:
    pass


@_all_to_all.register_fake
@_all_reduce_with_grad.register_fake
@_reduce_gradient.register_fake
def _(tensor: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@_all_gather.register_fake
@_all_gather_with_grad.register_fake
def _(tensor: Tensor, token: Tensor, ranks: Any, group_size: int, *args: Any) -> Tensor:
    return tensor.new_empty(_gathered_shape(tensor, group_size))


@_reduce_scatter.register_fake
def _(tensor: Tensor, token: Tensor, op: str, ranks: Any, group_size: int) -> Tensor:
    return tensor.new_empty((tensor.shape[0] // group_size, *tensor.shape[1:]))


_numbers = itertools.count()


def _call_reduce_gradient(gradient: Tensor, function: str, op: str, ranks: list[int] | None) -> Tensor:
    reduced: Tensor = _ops.reduce_gradient(gradient, function, op, ranks, next(_numbers))
    return reduced


def _setup_reduction(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.op, ctx.ranks = inputs


def _reduction_backward(ctx: Any, gradient: Tensor) -> Any:
    return _call_reduce_gradient(gradient, "all_reduce", ctx.op, ctx.ranks), None, None, None


def _setup_gathering(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensor, _, ctx.ranks, ctx.group_size, ctx.position = inputs
    ctx.shape = tensor.shape


def _gathering_backward(ctx: Any, gradient: Tensor) -> Any:
    total = _call_reduce_gradient(gradient, "all_gather", "SUM", ctx.ranks)
    row = total.view(ctx.group_size, *ctx.shape)[ctx.position].clone()  # a view would keep all rows in memory
    return row, None, None, None, None


def _setup_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.call, _ = inputs


def _gradient_backward(ctx: Any, gradient: Tensor) -> Any:
    return _call_reduce_gradient(gradient, *ctx.call), None, None, None, None


_all_reduce_with_grad.register_autograd(_reduction_backward, setup_context=_setup_reduction)
_all_gather_with_grad.register_autograd(_gathering_backward, setup_context=_setup_gathering)
_reduce_gradient.register_autograd(_gradient_backward, setup_context=_setup_gradient)
