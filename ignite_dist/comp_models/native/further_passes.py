"""Averages gradients after backward passes that ``DistributedDataParallel`` (DDP) leaves alone.

DDP averages in the first backward pass after a forward pass. A second pass (of another loss, or of an earlier
forward pass) adds gradients of this rank only, and so does a pass through the module inside of DDP. After
such a pass the sums are averaged. The mean of earlier averages, which are equal on all ranks, is their value.

Passes of forward passes in ``no_sync()`` stay local. Hooks at the outputs tell them from others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from ignite_dist.comp_models.native.reducer_group import miss_pass
from ignite_dist.internals import _torch
from ignite_dist.internals.call_sites import reported_as
from ignite_dist.values.gradients import AfterBackward, nodes_of
from ignite_dist.values.pytree import flatten

_PASSES = "_ignite_dist_passes"  # attribute of a DDP and of the module inside: its _Passes

Average = Callable[[list[Parameter]], None]


class _Passes:
    """The backward passes that reach the parameters of one DDP.

    It holds no parameter: hooks of the parameters hold it, and the garbage collector does not see those.

    Args:
        module: the DDP.
        average: averages the gradients of parameters over the ranks of the module.

    Attributes:
        is_reducing: True from a forward pass to the end of DDP's reduction, perhaps in the second of two
            backward passes that each reach some of the parameters.
        has_seen: True after any backward pass, also one in ``no_sync()``, or another average.
        hooks: the hooks of the parameters.
    """

    def __init__(self, module: DistributedDataParallel, average: Average) -> None:
        self.is_reducing = self.has_seen = False
        # Local forward passes since the last synchronized one that wait for their backward passes.
        self._waiting: set[_LocalForward] = set()
        self._module, self._average = weakref.ref(module), average
        trained = _trained(module)
        self._names = list(trained)
        self.hooks = AfterBackward(trained.values(), self._after_backward)

    def __reduce__(self) -> Any:
        return type(None), ()  # a pickled module averages as DDP does

    def __deepcopy__(self, memo: Any) -> _Copied:
        return _Copied(self._average)

    def _after_backward(self) -> None:
        self.has_seen, is_local = True, self._is_local_pass()
        module = self._module()
        if module is None:  # the module inside goes on without its wrapper
            return
        if self.is_reducing:
            self.is_reducing = not _torch.has_reduced(module)
            if self.is_reducing:
                self._check_frozen(module)
        elif module.require_backward_grad_sync and not is_local:
            self._average(list(_trained(module).values()))

    def _is_local_pass(self) -> bool:
        """True unless backward passes have gone through all local forward passes, and this one through none.

        A pass that reaches no parameter, such as that of a gradient penalty, does not count.
        """
        number = _torch.number_of_backward_pass()
        for forward in list(self._waiting):
            if forward.last_pass == number:
                forward.has_ended = True  # but waits on: this pass may be one inside of another
            elif forward.has_ended:
                self._waiting.discard(forward)
        return bool(self._waiting)

    def note_synchronized_forward(self) -> None:
        """Note a forward pass outside of ``no_sync()``. Local ones before it count no more."""
        self.is_reducing, self._waiting = True, set()

    def note_local_forward(self, inputs: Any, output: Any) -> None:
        """Note a forward pass in ``no_sync()``: its backward passes are local, also outside of the block."""
        outputs = _known_leaves(output)
        if outputs is None:
            self._waiting.add(_UNKNOWN)
            return
        forward, waiting = _LocalForward(), self._waiting
        waiting.add(forward)

        def note(_: Any) -> None:
            forward.last_pass = _torch.number_of_backward_pass()
            waiting.add(forward)  # again, in a second pass through the same graph

        given = flatten(inputs, is_local=True)[0]  # a module may return what it got
        for node in nodes_of(outputs) - nodes_of(given):
            node.register_prehook(note)

    def _check_frozen(self, module: DistributedDataParallel) -> None:
        trained = _trained(module)
        frozen = [name for name in self._names if name not in trained]
        if frozen and not module.find_unused_parameters:
            raise RuntimeError(FROZEN_LATER.format(", ".join(frozen)))


@dataclass(eq=False)
class _LocalForward:
    """A forward pass in ``no_sync()``.

    Attributes:
        last_pass: number of the last backward pass through its output.
        has_ended: True once such a pass has reached a parameter and ended.
    """

    last_pass: int = -2  # the number -1 stands for no pass
    has_ended: bool = False


_UNKNOWN = _LocalForward()  # stands for all whose outputs are unknown: no hook sees their backward passes


def _known_leaves(output: Any) -> list[Any] | None:
    """The leaves of a module's output; None if it may have tensors elsewhere, for example in a dataclass."""
    leaves, _ = flatten(output, is_local=True)
    known = (Tensor, str, int, float, type(None))
    return leaves if all(isinstance(leaf, known) for leaf in leaves) else None


class _Copied(NamedTuple):
    """What a copy of a DDP has, until its first forward pass, in place of its :class:`_Passes`."""

    average: Average

    def __reduce__(self) -> Any:
        return type(None), ()  # as for _Passes

    def __deepcopy__(self, memo: Any) -> _Copied:
        return self


FROZEN_LATER = (
    "Frozen after auto_model: {}. DistributedDataParallel waits for these gradients and has averaged nothing "
    "in this step. After freezing, call model = idist.auto_model(idist.unwrap_model(model)) again. Or pass "
    "find_unused_parameters=True to auto_model."
)

_FAILED_BEFORE = (
    "The last backward pass of this model failed on this rank, and a DistributedDataParallel cannot be used "
    "after that. On all ranks, call model = idist.auto_model(idist.unwrap_model(model)), and keep no other "
    "reference to the old one. Or let the job end, and start it again from a checkpoint."
)


def _trained(module: DistributedDataParallel) -> dict[str, Parameter]:
    ignored = module.parameters_to_ignore
    named = module.module.named_parameters()
    return {name: one for name, one in named if one.requires_grad and name not in ignored}


def average_further_passes(module: DistributedDataParallel, average: Average) -> None:
    """Call ``average`` after each backward pass whose gradients ``module`` does not average.

    All ranks make the same passes.
    """
    _begin(module, average)
    module.register_forward_pre_hook(_check_last_pass)
    module.register_forward_hook(_note_forward, with_kwargs=True)


def _begin(module: DistributedDataParallel, average: Average) -> _Passes:
    inner = vars(module.module)
    if isinstance(earlier := inner.get(_PASSES), _Passes):
        earlier.hooks.remove()  # of an earlier wrapper
    inner[_PASSES] = vars(module)[_PASSES] = passes = _Passes(module, average)
    return passes


def note_average(model: Module) -> None:
    """Note that the gradients of ``model`` have been averaged outside of its backward passes."""
    for module in model.modules():
        if isinstance(passes := vars(module).get(_PASSES), _Passes):
            passes.has_seen = True


def has_seen_pass(module: Module) -> bool:
    """True if a backward pass has reached the parameters of ``module``; always True if no DDP was watched."""
    passes = vars(module).get(_PASSES)
    return passes is None or (isinstance(passes, _Passes) and passes.has_seen)


@contextmanager
def reducing(module: DistributedDataParallel) -> Iterator[None]:
    """Context manager: DDP completes its reduction in the block."""
    passes = _passes_of(module)
    if passes is not None:
        passes.is_reducing = passes.has_seen = True
    try:
        yield
    finally:
        if passes is not None:
            passes.is_reducing = False


@reported_as("forward")
def _check_last_pass(module: DistributedDataParallel, _: Any) -> None:
    """The hook before a forward pass. torch's own error says nothing of the pass that has failed.

    Raises:
        RuntimeError: a backward pass has failed. The other ranks get an error if they average in this pass.
    """
    passes = _passes_of(module)
    if passes is None or not passes.hooks.has_unfinished_pass or not torch.is_grad_enabled():
        return
    if _torch.number_of_backward_pass() < 0 and not _torch.has_reduced(module):
        if module.require_backward_grad_sync:
            miss_pass(module)
        raise RuntimeError(_FAILED_BEFORE)


def _note_forward(module: DistributedDataParallel, args: Any, kwargs: Any, output: Any) -> None:
    """The forward hook: a function of this module, because models are copied and pickled."""
    if not torch.is_grad_enabled():
        return
    passes = vars(module).get(_PASSES)
    if isinstance(passes, _Copied):  # all ranks train the copy
        passes = _begin(module, passes.average)
    if passes is None:
        return
    if module.require_backward_grad_sync:
        passes.note_synchronized_forward()
    else:
        passes.note_local_forward((args, kwargs), output)


def _passes_of(module: DistributedDataParallel) -> _Passes | None:
    passes = vars(module).get(_PASSES)
    return passes if isinstance(passes, _Passes) else None
