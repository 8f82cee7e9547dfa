"""Reductions of tensors, numbers and trees over the ranks of a group."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, overload

from torch import Tensor

from ignite_dist.collectives import autograd
from ignite_dist.collectives.arguments import check_not_async, copy_of
from ignite_dist.collectives.checks import check_writable
from ignite_dist.collectives.interrupts import counts_interrupts
from ignite_dist.collectives.path import is_member, perform
from ignite_dist.collectives.primitives import plan_reduction, reduce_tensor
from ignite_dist.collectives.tree_reduction import reduce_tree
from ignite_dist.comp_models import ComputationModel, Group
from ignite_dist.comp_models.work import Completed, Work
from ignite_dist.context.live import current_model
from ignite_dist.internals.tracing import traced, traced_as
from ignite_dist.values import reduce_ops
from ignite_dist.values.arrays import check_writable_array, fill_array, is_array, tensor_of

_Value = TypeVar("_Value")


@traced
def _all_reduce_in_a_graph(*args: Any, **kwargs: Any) -> Any:
    from ignite_dist.collectives import compiled

    return compiled.all_reduce(*args, **kwargs)


@overload
def all_reduce(
    tensor: _Value,
    op: str = ...,
    group: Any = ...,
    *,
    inplace: bool | None = ...,
    sync_grads: bool = ...,
    exact: bool = ...,
    async_op: Literal[False] = ...,
) -> _Value: ...


@overload
def all_reduce(
    tensor: Any,
    op: str = ...,
    group: Any = ...,
    *,
    inplace: bool | None = ...,
    exact: bool = ...,
    async_op: Literal[True],
) -> Work: ...


@traced_as(_all_reduce_in_a_graph)
@counts_interrupts
def all_reduce(
    tensor: Any,
    op: str = "SUM",
    group: Any = None,
    *,
    inplace: bool | None = None,
    sync_grads: bool = False,
    exact: bool = True,
    async_op: bool = False,
) -> Any:
    """Reduce a value over the ranks of a group. Every rank of the group must call this function.

    A tensor is reduced in place and returned. It keeps its device, dtype and memory layout on every backend.
    Autograd counts the result as a change in place: a backward pass that needs the old value raises.
    For a number, or a tree (dict, list, tuple, named tuple) of numbers and tensors, the result is a new
    object, unless ``inplace=True`` fills the tensors of a tree. All numbers of a tree share one collective.
    Ints are exact at any size, and every rank gets the same bits. NumPy numbers become Python numbers. The
    ranks match the values of a dict by key: str, int, bool, enum member, or a tuple of these.

    float16, bfloat16 and float8 are added and multiplied in float64 (on TPUs in float32) and rounded once.

    Args:
        tensor: a dense tensor of shape ``(*S)`` on every rank and of any dtype with arithmetic; a numpy array
            of such a dtype; a number; or a tree.
        op: "SUM", "AVERAGE", "PRODUCT", "MIN", "MAX", "AND", "OR", "XOR", or "ADASUM" (Horovod with MPI).
            AND, OR and XOR are bitwise on ints and logical on bools. MIN and MAX are NaN if any rank has a
            NaN.
        group: None for all ranks, a handle of :func:`new_group`, a list of global ranks, a dimension of a
            mesh (``mesh["dp"]``), or the name of a dimension of the current mesh (see :func:`mesh`). A rank
            outside the group gets its own value back.
        inplace: None, the default, reduces a tensor in place, and returns a new array or tree. True also
            fills an array, or the tensors of a tree, and returns it. The tree's tensors of one dtype are
            sent in buckets of up to 16 MB, and a larger tensor without a copy. A tensor that occurs twice is
            reduced once; other tensors must not share memory. For a tree, True must be passed on every rank.
            False returns a new tensor and does not change ``tensor``.
        sync_grads: True returns a new tensor with an autograd graph. The gradient of ``tensor`` is the
            gradient of the sum of all ranks' losses. Only for SUM and AVERAGE of floating-point tensors.
            Every rank of the group must run the backward pass, which is a collective. Double backward works.
        exact: False uses the backend's own SUM, AVERAGE or PRODUCT for float16 and bfloat16. The backend may
            round after each rank, and may overflow (60000 + 60000 - 60000 is inf in float16). True sends
            float64, except with gloo on the CPU, so False is faster on the other backends. Other dtypes
            ignore ``exact``. Must be the same on every rank.
        async_op: True, on every rank, returns a :class:`Work` at once; its ``wait()`` returns the result. Do
            not use the tensor before ``wait()`` has returned. Not allowed with ``sync_grads``.

    Returns:
        ``(*S)``, of the same type as ``tensor``.

    Raises:
        TypeError: ``op`` cannot reduce the value or its dtype, or the type of a dict key is not listed
            above. Nothing was sent.
        ValueError: the ``op`` or group is unknown; the elements of a tensor share memory; ``inplace=True``
            with a read-only array, or with a number, alone or in a tree; or ``sync_grads`` is combined with
            another ``op``, with ``async_op``, or on XLA with a group of only some ranks. Nothing was sent.
        CollectiveMismatchError: the trees of the ranks differ in keys, shapes or dtypes, or the ranks passed
            different ``op``; raised on every rank. A single tensor is compared over shared memory only. A
            tree without numbers and with more than 448 bytes of tensors needs one more small collective for
            the comparison. The host waits for this collective, also on a GPU.

    Example::

        idist.all_reduce(torch.tensor([1.0, 2.0]))  # on two ranks: tensor([2., 4.]) on both
        idist.all_reduce({"loss": 0.5, "n": 10})  # {"loss": 1.0, "n": 20} on both
        idist.all_reduce([p.grad for p in model.parameters()], "AVERAGE", inplace=True)
    """
    model = current_model()
    op = reduce_ops.normalize_op(op)
    op_text = op if exact else f"{op} with exact=False"
    if sync_grads:
        return _reduce_with_grad(model, tensor, op, group, exact, op_text, async_op)
    if not isinstance(tensor, Tensor) and not is_array(tensor):
        return reduce_tree(model, tensor, op, group, exact, op_text, async_op, fills=bool(inplace))
    given = tensor
    if inplace is None:
        inplace = isinstance(given, Tensor)
    if is_array(given):
        if inplace:
            check_writable_array("all_reduce", given)
        tensor = tensor_of(given)
    plan = plan_reduction(model, op, tensor, exact)
    if inplace:
        check_writable("all_reduce", tensor)
    members = model.groups.resolve(group)
    target = tensor if inplace or not is_member(model, members) else copy_of(tensor)

    def begin(members: Group) -> Work:
        work = reduce_tensor(model, target, op, plan, members)
        if given is tensor:
            return work
        return work.then(lambda reduced: fill_array(given, reduced) if inplace else reduced.numpy())

    return perform(
        model,
        "all_reduce",
        members,
        begin,
        outside=given,
        value=tensor,
        op=op_text,
        begin_outside=lambda members: reduce_tensor(model, copy_of(tensor), op, plan, members),
        async_op=async_op,
    )


def _reduce_with_grad(
    model: ComputationModel, tensor: Any, op: str, group: Any, exact: bool, op_text: str, async_op: bool
) -> Any:
    if op not in ("SUM", "AVERAGE"):
        raise ValueError(f"all_reduce with sync_grads=True is for SUM and AVERAGE, got {op}.")
    check_not_async("all_reduce", async_op)
    members = model.groups.resolve(group)
    autograd.check_differentiable("all_reduce", model, tensor, members)
    return perform(
        model,
        "all_reduce",
        members,
        lambda members: Completed(autograd.reduce_with_grad(model, tensor, op, members, exact)),
        outside=tensor,
        value=tensor,
        op=f"{op_text}, sync_grads=True",
        begin_outside=lambda _: Completed(None),
    )
