"""Averages gradients after backward passes that ``DistributedDataParallel`` (DDP) leaves alone.

DDP averages in the first backward pass after a forward pass. A second pass (of another loss, or of an earlier
forward pass) adds gradients of this rank only, and so does a pass through the module inside of DDP. After
such a pass the sums are averaged. The mean of earlier averages, which are equal on all ranks, is their value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from ignite_dist.internals import _torch
from ignite_dist.values.gradients import AfterBackward

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
        is_local: True after a forward pass in ``no_sync()``.
        hooks: the hooks of the parameters.
    """

    def __init__(self, module: DistributedDataParallel, average: Average) -> None:
        self.is_reducing = self.is_local = False
        self._module, self._average = weakref.ref(module), average
        self.hooks = AfterBackward(_trained(module), self._after_backward)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the module averages as DDP does

    def _after_backward(self) -> None:
        module = self._module()
        if module is None:  # the module inside goes on without its wrapper
            return
        if self.is_reducing:
            self.is_reducing = not _torch.has_reduced(module)
        elif module.require_backward_grad_sync and not self.is_local:
            self._average(_trained(module))


def _trained(module: DistributedDataParallel) -> list[Parameter]:
    ignored = module.parameters_to_ignore
    named = module.module.named_parameters()
    return [one for name, one in named if one.requires_grad and name not in ignored]


def average_further_passes(module: DistributedDataParallel, average: Average) -> None:
    """Call ``average`` after each backward pass whose gradients ``module`` does not average.

    All ranks make the same passes.
    """
    inner = vars(module.module)
    if inner.get(_PASSES) is not None:
        inner[_PASSES].hooks.remove()  # of an earlier wrapper
    inner[_PASSES] = vars(module)[_PASSES] = _Passes(module, average)
    module.register_forward_hook(_note_forward)


@contextmanager
def reducing(module: DistributedDataParallel) -> Iterator[None]:
    """Context manager: DDP completes its reduction in the block."""
    passes = _passes_of(module)
    if passes is not None:
        passes.is_reducing = True
    try:
        yield
    finally:
        if passes is not None:
            passes.is_reducing = False


def _note_forward(module: DistributedDataParallel, *_: Any) -> None:
    """The forward hook: a function of this module, because models are copied and pickled."""
    passes = _passes_of(module)
    if passes is not None and torch.is_grad_enabled():
        passes.is_local = not module.require_backward_grad_sync
        passes.is_reducing |= not passes.is_local


def _passes_of(module: DistributedDataParallel) -> _Passes | None:
    return vars(module).get(_PASSES)
