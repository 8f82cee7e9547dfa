"""The parameters of a Horovod optimizer, and the pending reductions of their gradients.

The gradients of a *unit* are reduced together. A unit is one parameter, or several with ``groups=``.
Parameters are identified by numbers, which are equal on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ignite_dist.comp_models.horovod.reduction import Reduction, WaitForCall
from ignite_dist.internals._torch import version_of

Unit = tuple[int, ...]

# A call of Horovod costs 0.1 ms and more in the backward pass: it waits for the lock of Horovod's thread.
_UNIT_BYTES = 1 << 20
_MAX_UNIT = 32  # parameters; each new gradient checks all gradients of its unit


@dataclass
class _Submitted:
    """The pending calls of a unit, and its gradients with their versions at submission."""

    calls: list[tuple[list[int], Callable[[WaitForCall], list[Tensor]]]]
    sent: list[tuple[Tensor | None, int]]


class Units:
    """The units of an optimizer, with weak references to the parameters.

    Args:
        reduction: reduces the gradients.
        groups: the number of units, or lists of parameters; see ``hvd.DistributedOptimizer``. A parameter
            outside the lists gets its own unit. None: small parameters share units.
    """

    def __init__(self, reduction: Reduction, groups: int | Sequence[Sequence[Tensor]] | None) -> None:
        self._reduction = reduction
        self._groups = groups
        self._parameters: list[weakref.ref[Tensor] | None] = []
        self._stand_ins: list[Tensor] = []  # without memory, for parameters that no longer exist
        self._names: list[str] = []
        self._units: list[Unit] = []
        self._submitted: dict[Unit, _Submitted] = {}

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[Unit]:
        return iter(dict.fromkeys(self._units))

    def add(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Add parameters. Their numbers follow the existing numbers."""
        first = len(self._parameters)
        for name, parameter in named:
            self._names.append(name)
            self._parameters.append(weakref.ref(parameter))
            self._stand_ins.append(parameter.detach().new_zeros(()).expand_as(parameter))
        self._units += _make_units(self._groups, [parameter for _, parameter in named], first)

    def remove(self, number: int) -> None:
        """Remove this parameter. The other parameters keep their numbers."""
        self._parameters[number] = None

    def is_empty(self) -> bool:
        """True if no parameters are left: all were removed."""
        return all(one is None for one in self._parameters)

    def parameter(self, number: int) -> Parameter | None:
        """The parameter, or None if the parameter was removed or no longer exists."""
        reference = self._parameters[number]
        return None if reference is None else reference()  # type: ignore[return-value]

    def gradient(self, number: int) -> Tensor | None:
        """The parameter's gradient, or None."""
        parameter = self.parameter(number)
        return None if parameter is None else parameter.grad

    def unit_of(self, number: int) -> Unit:
        """The unit of the parameter."""
        return self._units[number]

    def is_pending(self, unit: Unit) -> bool:
        """True if the unit has been submitted and :meth:`results` has not been called."""
        return unit in self._submitted

    def changed(self) -> set[int]:
        """The parameters of pending units in which a gradient has changed since submission."""
        return {
            number for unit, one in self._submitted.items() if self._has_changed(unit, one) for number in unit
        }

    def _has_changed(self, unit: Unit, submitted: _Submitted) -> bool:
        return any(
            self.gradient(number) is not gradient or _version(gradient) != version
            for number, (gradient, version) in zip(unit, submitted.sent, strict=True)
        )

    def submit(self, unit: Unit, sparse: Collection[int] = ()) -> None:
        """Begin to reduce a unit, with zeros for parameters without a gradient.

        Args:
            unit: a unit that is not pending.
            sparse: the parameters with a sparse gradient on some rank and a dense gradient on no rank.
        """
        # Parameters that no longer exist count too: another rank may not have collected them yet.
        existing = [number for number in unit if self._parameters[number] is not None]
        gathered = [number for number in existing if number in sparse and not self._reduction.sparse_as_dense]
        dense = [number for number in existing if number not in gathered]
        calls: list[tuple[list[int], Callable[[WaitForCall], list[Tensor]]]] = []
        for number in gathered:
            gradient, parameter = self.gradient(number), self._parameter_or_zeros(number)
            calls.append(([number], self._reduction.begin_sparse(self._names[number], gradient, parameter)))
        if dense:
            values = [self._value(number) for number in dense]
            calls.append((dense, self._reduction.begin(self._names[dense[0]], values)))
        gradients = [self.gradient(number) for number in unit]
        self._submitted[unit] = _Submitted(calls, [(one, _version(one)) for one in gradients])

    def _value(self, number: int) -> Tensor:
        gradient = self.gradient(number)
        if gradient is None:
            return torch.zeros_like(self._parameter_or_zeros(number))
        return gradient.to_dense() if gradient.is_sparse else gradient.detach()

    def _parameter_or_zeros(self, number: int) -> Tensor:
        parameter = self.parameter(number)
        return self._stand_ins[number] if parameter is None else parameter

    def results(self, unit: Unit, wait: WaitForCall) -> list[tuple[int, Tensor]]:
        """Wait for a unit. Return its results with the numbers of their parameters."""
        found: list[tuple[int, Tensor]] = []
        for numbers, finish in self._submitted.pop(unit).calls:
            found += zip(numbers, finish(wait), strict=True)
        return found

    def write(self, number: int, result: Tensor, is_sparse: bool) -> None:
        """Write a result into the gradient."""
        parameter = self.parameter(number)
        if parameter is None:
            return
        if is_sparse:
            parameter.grad = result if result.is_sparse else result.to_sparse(1)
            return
        if parameter.grad is None or parameter.grad.is_sparse:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(result)  # not set_(): the gradient may be a view of the user's buffer


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None else version_of(gradient)


def _make_units(groups: Any, parameters: Sequence[Tensor], first: int) -> list[Unit]:
    """Return the unit of each parameter. The parameters' numbers start at ``first``."""
    trained = {id(one): number for number, one in enumerate(parameters, first) if one.requires_grad}
    numbers = list(trained.values())
    if groups is None:
        parts = _small_parts(numbers, parameters, first)
    elif isinstance(groups, int):
        size, longer = divmod(len(numbers), groups)
        ends = [number * size + min(number, longer) for number in range(groups + 1)]
        parts = [numbers[start:end] for start, end in pairwise(ends)]
    else:
        parts = [[trained[id(one)] for one in group if id(one) in trained] for group in groups]
    units: dict[int, Unit] = {number: (number,) for number in range(first, first + len(parameters))}
    for part in parts:
        by_type: dict[Any, list[int]] = {}  # one call of Horovod takes one dtype and one device
        for number in part:
            one = parameters[number - first]
            by_type.setdefault((one.dtype, one.device), []).append(number)
        for members in by_type.values():
            units.update(dict.fromkeys(members, tuple(members)))
    return list(units.values())


def _small_parts(numbers: Sequence[int], parameters: Sequence[Tensor], first: int) -> list[list[int]]:
    """The numbers in parts of at most ``_MAX_UNIT`` parameters and ``_UNIT_BYTES``, or of one parameter."""
    parts: list[list[int]] = []
    room = 0
    for number in numbers:
        num_bytes = parameters[number - first].nbytes
        if not parts or num_bytes > room or len(parts[-1]) == _MAX_UNIT:
            parts.append([])
            room = _UNIT_BYTES
        parts[-1].append(number)
        room -= num_bytes
    return parts
