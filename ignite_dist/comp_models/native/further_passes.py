"""Averages what further backward passes add to gradients that DDP has averaged.

``DistributedDataParallel`` averages gradients in the first backward pass after a forward pass. What a second
pass adds (of another loss, or of a forward pass before) would stay on its rank. Here such a pass adds to
empty gradients, which are averaged at its end and then added to those of the passes before.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from ignite_dist import _torch

_PASSES = "_ignite_dist_passes"  # attribute of a DistributedDataParallel: its _Passes

Average = Callable[[list[Parameter]], None]


class _Passes:
    """The backward passes through what one ``DistributedDataParallel`` has returned.

    Args:
        module: the module.
        average: averages the gradients of parameters over the ranks of the module.
    """

    def __init__(self, module: DistributedDataParallel, average: Average) -> None:
        ignored = module.parameters_to_ignore
        self._module, self._average = weakref.ref(module), average
        self._parameters = [
            parameter
            for name, parameter in module.module.named_parameters()
            if parameter.requires_grad and name not in ignored
        ]
        self._is_expected = False  # DDP averages in the next pass
        self._number: int | None = None  # of the pass that has begun
        self._before: list[Tensor | None] = []

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the module averages as DDP does

    def note_output(self, output: Any) -> None:
        """The module has returned ``output``, and DDP averages in the next backward pass."""
        self._is_expected = True
        for tensor in _tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin)  # type: ignore[no-untyped-call]

    def _begin(self, _: Tensor) -> None:
        """Called in each backward pass, for each tensor of an output, before the gradients of parameters."""
        number = _torch.number_of_backward_pass()
        if number == self._number:
            return
        self._number = number
        self._before = [parameter.grad for parameter in self._parameters]
        self._versions = [None if one is None else _torch.version_of(one) for one in self._before]
        if not self._is_expected:
            for parameter in self._parameters:
                parameter.grad = None
        _torch.run_after_backward(self._end)

    def _end(self) -> None:
        before, self._before, self._number = self._before, [], None
        if self._is_expected:  # DDP averages after this; torch.autograd.grad reaches no parameter
            self._is_expected = not self._has_new_gradients(before)
            return
        if any(parameter.grad is not None for parameter in self._parameters):
            self._average(self._parameters)
        for parameter, gradient in zip(self._parameters, before, strict=True):
            if gradient is None:
                continue
            added = parameter.grad
            parameter.grad = gradient if added is None else _sum(gradient, added)

    def _has_new_gradients(self, before: list[Tensor | None]) -> bool:
        pairs = zip(self._parameters, before, self._versions, strict=True)
        return any(
            one.grad is not old or (old is not None and _torch.version_of(old) != version)
            for one, old, version in pairs
        )


@torch.no_grad()
def _sum(gradient: Tensor, added: Tensor) -> Tensor:
    """In the memory of ``gradient`` if it is dense: it may be part of a bucket."""
    return gradient.add_(added) if gradient.layout is torch.strided else gradient + added


def average_further_passes(module: DistributedDataParallel, average: Average) -> None:
    """Let further backward passes through ``module`` average their gradients with ``average``.

    All ranks make the same passes.
    """
    vars(module)[_PASSES] = _Passes(module, average)
    module.register_forward_hook(_note_output)


def _note_output(module: DistributedDataParallel, _: Any, output: Any) -> None:
    """The forward hook: a function of this module, because models are copied and pickled."""
    passes: _Passes | None = vars(module).get(_PASSES)
    if passes is None or torch.compiler.is_compiling():
        return
    if torch.is_grad_enabled() and module.require_backward_grad_sync:
        passes.note_output(output)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors_in(one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, field.name))
