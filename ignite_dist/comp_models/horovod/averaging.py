"""Gradients that Horovod averages during the backward pass. The averages are ready when the pass ends.

In a *round* the ranks of a process set exchange which gradients have changed, and average each gradient that
has changed on any rank. A round runs at the end of each backward pass of an optimizer's parameters. If there
was no backward pass, the round runs in the optimizer's step. Each gradient is sent as soon as the backward
pass has computed it.

Ranks may use different parameters and different optimizers in a pass. A missing gradient counts as zeros.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ignite_dist.comp_models.horovod.reduction import Call, Reduction
from ignite_dist.comp_models.horovod.rounds import Exchange
from ignite_dist.comp_models.horovod.units import Unit, Units
from ignite_dist.internals._torch import version_of

# The kind of a gradient, which a rank reports in a round. The ranks agree on the greatest of their values.
_NOTHING, _SPARSE, _DENSE = range(3)

_NOT_LINEAR = (
    "If op= is not hvd.Average, a second backward pass before the step would reduce the result of the first "
    "pass again. Pass backward_passes_per_step=... to auto_optim to reduce the gradients of all passes once."
)
_CREATES_GRAPH = (
    "backward(create_graph=True) makes gradients with an autograd graph, but the graph would not include "
    "averaging. Call torch.autograd.grad(loss, parameters, create_graph=True), or use idist.no_sync()."
)
_OF_OTHER_RANKS = (
    "This optimizer averages over the ranks %s. A later auto_optim has taken its parameters, and averages "
    "their gradients over other ranks, %s. Use the later optimizer, or give both the same process_set=."
)
_OF_ANOTHER_OP = (
    "A later auto_optim has taken this optimizer's parameters, and reduces their gradients by another op=. "
    "Use the later optimizer, or give both the same op=."
)


class Gradients:
    """The gradients of one optimizer.

    The parameters' hooks reference this object; this object does not reference the parameters. So this object
    lives as long as any of the parameters, even without the optimizer. Otherwise garbage collection, which
    runs at different times on different ranks, would decide which gradients are averaged.

    Args:
        exchange: the context's exchange.
        name: equal on every rank, and different from other optimizers' names.
        reduction: reduces the gradients.
        groups: the gradients to reduce together, see ``hvd.DistributedOptimizer``.
        passes: the number of backward passes that add to a gradient before the gradient is averaged.
    """

    def __init__(
        self, exchange: Exchange, name: str, reduction: Reduction, groups: Any = None, passes: int = 1
    ) -> None:
        self.passes = passes
        self.is_local = False  # True while backward passes do not average gradients
        self._exchange = exchange
        self._name = f"ignite_dist.{name}"
        self._is_average = reduction.is_average
        self._op = reduction.op
        self.rounds = exchange.rounds(reduction.process_set)
        self.number = self.rounds.add(self)
        # Parameters that another optimizer has taken over, with the Gradients of that optimizer, by id.
        self._new_owners: dict[int, tuple[weakref.ref[Tensor], Gradients]] = {}
        self._units = Units(reduction, groups)
        self._hooks: list[Any] = []
        self._counts: dict[int, int] = {}  # backward passes since the last average, by gradient
        self._latest: int | None = None
        self._kinds_call: Call = (0, "")
        self._agreed_kinds: list[int] = []  # by gradient
        self._must_resend: list[int] = []  # by gradient: 1 if any rank must send the gradient again
        self._has_results = False  # True if a round has run since the last step
        # Averaged gradients, with their versions at the end of the step (None before the step).
        self._averaged: dict[int, tuple[weakref.ref[Tensor], int | None]] = {}

    # --- the parameters --------------------------------------------------------------------------------

    def add(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Begin to average the gradients of these parameters. Other objects stop averaging them."""
        self._exchange.hand_over((parameter for _, parameter in named), self)
        for index, (_, parameter) in enumerate(named, len(self._units)):
            self._new_owners.pop(id(parameter), None)
            self._hooks.append(self._watch(index, parameter))
        self._units.add(named)

    def stop_averaging(self, parameters: set[int], new_owner: Gradients) -> None:
        """Stop averaging ``parameters``, given by ``id``: ``new_owner`` averages their gradients now."""
        for index in range(len(self._units)):
            parameter = self._units.parameter(index)
            if parameter is not None and id(parameter) in parameters:
                if self._hooks[index] is not None:
                    self._hooks[index].remove()
                self._units.remove(index)
                self._counts.pop(index, None)
                self._averaged.pop(index, None)
                self._new_owners[id(parameter)] = weakref.ref(parameter), new_owner

    def _owners(self) -> list[Gradients]:
        """Return this object and the new owners: the objects that average the parameters' gradients now."""
        found = {id(self): self}
        for reference, new_owner in self._new_owners.values():
            parameter = reference()
            if parameter is not None:
                owner = new_owner._owner_of(parameter)
                found[id(owner)] = owner
        return list(found.values())

    def _owner_of(self, parameter: Tensor) -> Gradients:
        owner = self
        while (entry := owner._new_owners.get(id(parameter))) is not None and entry[0]() is parameter:
            owner = entry[1]
        return owner

    def check_new_owners(self) -> None:
        """Check that the new owners use the same ranks and the same operation as this object.

        Raises:
            RuntimeError: a new owner reduces over other ranks, or by another operation.
        """
        for owner in self._owners():
            if owner.rounds.ranks() != self.rounds.ranks():
                raise RuntimeError(_OF_OTHER_RANKS % (list(self.rounds.ranks()), list(owner.rounds.ranks())))
            if owner._op != self._op:
                raise RuntimeError(_OF_ANOTHER_OP)

    def _watch(self, index: int, parameter: Tensor) -> Any:
        is_alone = not self.rounds.is_active() and os.environ.get("HOROVOD_ELASTIC") != "1"
        if is_alone or not (parameter.is_floating_point() or parameter.is_complex()):
            return None
        # torch rejects hooks on frozen parameters, but the user may unfreeze the parameter later.
        is_frozen = not parameter.requires_grad
        try:
            parameter.requires_grad_(True)
            return parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._add_pass, index)
            )
        finally:
            if is_frozen:
                parameter.requires_grad_(False)

    # --- the backward pass -----------------------------------------------------------------------------

    def _add_pass(self, index: int, parameter: Tensor) -> None:
        """Hook: a backward pass has just added to the gradient."""
        if not self._counts and not self.rounds.is_active():
            return
        if self.is_local:
            self._counts.setdefault(index, 0)
            return
        if parameter.grad is not None and parameter.grad.requires_grad:
            raise RuntimeError(_CREATES_GRAPH)
        count = self._counts[index] = self._counts.get(index, 0) + 1
        if count < self.passes:
            return
        self.rounds.run_after_pass(self)
        # Submit the previous gradient, because the user's hooks may still change the current gradient.
        latest, self._latest = self._latest, index
        if latest is not None:
            self._submit_if_complete(self._units.unit_of(latest))

    def _submit_if_complete(self, unit: Unit) -> None:
        if self._units.is_pending(unit):
            return
        for index in unit:
            parameter = self._units.parameter(index)
            if parameter is None:
                return
            if parameter.requires_grad and self._counts.get(index, -1) < self.passes:
                return
            gradient = parameter.grad
            if gradient.is_sparse if gradient is not None else parameter.requires_grad:
                return  # a round must first show if other ranks have a dense gradient or None
        with self.rounds.errors_with_cause():
            self._units.submit(unit)

    # --- a round ---------------------------------------------------------------------------------------

    def submit_kinds(self) -> None:
        """Begin to exchange which gradients have changed on each rank."""
        if self._latest is not None:
            self._submit_if_complete(self._units.unit_of(self._latest))
            self._latest = None
        # A nested backward pass, or a pass after a failed pass, may change gradients that were already sent.
        changed = self._units.changed()
        must_resend = [int(index in changed) for index in range(len(self._units))]
        values = [*self._own_kinds(), *must_resend]
        self._kinds_call = self.rounds.begin_maximum(values, f"{self._name}.kinds")

    def _own_kinds(self) -> list[int]:
        kinds = []
        for index in range(len(self._units)):
            parameter = self._units.parameter(index)
            gradient = None if parameter is None else parameter.grad
            if gradient is None or parameter is None:
                kinds.append(_NOTHING)
            elif index in self._counts or self._is_new(index, parameter):
                kinds.append(_SPARSE if gradient.is_sparse else _DENSE)
            else:
                kinds.append(_NOTHING)
        return kinds

    def _is_new(self, index: int, parameter: Parameter) -> bool:
        """True if other code has assigned or changed this gradient since the last round."""
        gradient = parameter.grad
        if not parameter.requires_grad or gradient is None:
            return False
        reference, version = self._averaged.get(index, (None, None))
        if reference is None or reference() is not gradient:
            return True
        return version is not None and version != version_of(gradient)

    def submit_missing(self) -> None:
        """Begin to average the gradients that have changed on any rank and are not submitted yet."""
        greatest = self.rounds.result(self._kinds_call).tolist()
        self._agreed_kinds, self._must_resend = greatest[: len(self._units)], greatest[len(self._units) :]
        if not self._is_average:
            self._check_results_are_not_reduced_again()
        for unit in self._units:
            if self._units.is_pending(unit):
                continue
            if any(self._must_resend[index] for index in unit):
                self._units.submit(unit)
            elif any(self._agreed_kinds[index] for index in unit):
                self._units.submit(unit, self._sparse())

    def submit_changed(self) -> None:
        """Average again the gradients that have changed on any rank after they were sent."""
        for unit in self._units:
            if any(self._must_resend[index] for index in unit):
                self._units.results(unit, self.rounds.result)
                self._units.submit(unit, self._sparse())

    def _sparse(self) -> set[int]:
        return {index for index, kind in enumerate(self._agreed_kinds) if kind == _SPARSE}

    def receive(self) -> None:
        """Write the averages into the gradients. A gradient that is None on all ranks stays None."""
        with torch.no_grad():
            for unit in self._units:
                if self._units.is_pending(unit):
                    for index, average in self._units.results(unit, self.rounds.result):
                        self._write(index, average)
        self._counts.clear()
        self._has_results = True

    def _write(self, index: int, average: Tensor) -> None:
        if self._agreed_kinds[index] == _NOTHING:
            return
        self._units.write(index, average, is_sparse=self._agreed_kinds[index] == _SPARSE)
        gradient = self._units.gradient(index)
        if gradient is not None:
            self._averaged[index] = weakref.ref(gradient), None

    def _check_results_are_not_reduced_again(self) -> None:
        for index, (_, version) in self._averaged.items():
            if self._agreed_kinds[index] and version is None and self._has_average(index):
                raise RuntimeError(_NOT_LINEAR)

    # --- the optimizer ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Average the gradients that have not been averaged yet. Each step has at least one round."""
        owners = [owner for owner in self._owners() if owner._needs_round() and owner.rounds.is_active()]
        self._exchange.run(owners)

    def _needs_round(self) -> bool:
        if self._units.is_empty():
            return False
        if not self._has_results or any(self._own_kinds()):
            return True
        # True if other code has removed the gradients, for example model.zero_grad().
        return bool(self._averaged) and not any(self._has_average(index) for index in self._averaged)

    def _has_average(self, index: int) -> bool:
        gradient = self._averaged[index][0]()
        return gradient is not None and self._units.gradient(index) is gradient

    def begin(self) -> None:
        """Make :meth:`finish` run a round, unless a later backward pass runs a round first."""
        for one in self._owners():
            one._has_results = False

    def forget(self) -> None:
        """Clear the state after the optimizer has set the gradients to None or to zero."""
        self._has_results = False
        self._counts.clear()
        self._averaged.clear()

    def end_step(self) -> None:
        """Update the state after the optimizer's step."""
        self.begin()
        self.rounds.end_step()
        self._counts.clear()
        for index, (reference, _) in list(self._averaged.items()):
            gradient = reference()
            if gradient is None:
                del self._averaged[index]
            else:
                self._averaged[index] = reference, version_of(gradient)
