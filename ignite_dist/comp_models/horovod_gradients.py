"""Gradients that are averaged by Horovod while a backward pass computes them, and are there when it ends.

A *round* is what the ranks of a process set do together: they tell each other which gradients have changed,
and average those that have on any rank. A round is made at the end of each backward pass of an optimizer's
parameters, and in the step of an optimizer that has had none. Gradients are sent as soon as the backward pass
has computed them.

Ranks may use different parameters and different optimizers in a pass: each rank takes part with what it has.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from ignite_dist.comp_models.horovod_reduction import Call, Reduction
from ignite_dist.comp_models.horovod_units import Unit, Units
from ignite_dist.errors import CollectiveMismatchError

__all__ = ["Calls", "Exchange", "Gradients", "Rounds"]

# What a rank has to say about a gradient in a round; the greatest of all ranks counts.
_NOTHING, _SPARSE, _DENSE = range(3)

_LIMIT = 1 << 30

_UNEVEN = (
    "The ranks have made different numbers of backward passes since the last step: this rank %s. Either all "
    "ranks make as many, or none makes more than the backward_passes_per_step=... of auto_optim."
)
_NOT_LINEAR = (
    "A second backward pass before the step would count the first one once for each rank, as op= is not "
    "hvd.Average. Pass backward_passes_per_step=... to auto_optim: then the gradients of all passes are "
    "reduced once."
)
_CREATES_GRAPH = (
    "backward(create_graph=True) leaves gradients with a graph, which averaging over the ranks would not "
    "follow. Take them by torch.autograd.grad(loss, parameters, create_graph=True), or in idist.no_sync()."
)
_REMOVED = (
    "The process set of the ranks %s, over which auto_optim(..., process_set=...) averages these gradients, was "
    "removed. Make a new optimizer by auto_optim, with a process set that is there or without one."
)
_OF_OTHER_RANKS = (
    "This optimizer averages over the ranks %s. A later auto_optim has taken its parameters, and averages their "
    "gradients over other ranks, %s. Use the later optimizer, or give both the same process_set=."
)
_OF_ANOTHER_OP = (
    "A later auto_optim has taken this optimizer's parameters, and reduces their gradients by another op=. Use "
    "the later optimizer, or give both the same op=."
)


class Calls(Protocol):
    """What Horovod's context does for the calls that are made here."""

    def explaining(self) -> AbstractContextManager[None]:
        """Raise what is known of it if Horovod has been shut down, before the block or in it."""

    def result(self, call: Call, process_set: Any) -> Any:
        """What a call has made, as soon as it has ended."""

    def is_alive(self, process_set: Any) -> bool:
        """Whether Horovod has this process set, and no other one by its number."""


class Exchange:
    """What the optimizers of a context have in common."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._rounds: list[Rounds] = []  # every rank makes them in the same order
        self._due: set[int] = set()

    def rounds(self, process_set: Any) -> Rounds:
        """Those of a process set.

        Raises:
            ValueError: Horovod has no such set.
        """
        if not self._calls.is_alive(process_set):
            raise ValueError(f"process_set= was removed, or never added; got {process_set}.")
        for rounds in self._rounds:
            if rounds.are_of(process_set):
                return rounds
        self._rounds.append(Rounds(process_set, self._calls, self, len(self._rounds)))
        return self._rounds[-1]

    def hand_over(self, parameters: Iterable[Tensor], heir: Gradients) -> None:
        """Leave the gradients of ``parameters`` to ``heir`` alone, whoever has averaged them until now."""
        wanted = set(map(id, parameters))
        for rounds in self._rounds:
            for one in rounds.members():
                if one is not heir:
                    one.leave(wanted, heir)

    def run_after_pass(self, rounds: Rounds) -> None:
        """Make the due one of ``rounds`` when the backward pass that calls this has ended."""
        self._due.add(rounds.position)
        # torch has no public function for the end of a backward pass; its own wrappers of models use this
        # one. Not once per pass: a pass that has failed forgets its callbacks.
        torch.autograd.Variable._execution_engine.queue_callback(self._run_due)

    def _run_due(self) -> None:
        # In the same order on each rank: a rank waits in one round before it begins the next.
        due, self._due = self._due, set()
        for position in sorted(due):
            self._rounds[position].run_due()

    def run(self, wanted: Iterable[Gradients]) -> None:
        """Make a round of each process set that an optimizer among ``wanted`` is of."""
        by_position: dict[int, list[Gradients]] = {}
        for one in wanted:
            by_position.setdefault(one.rounds.position, []).append(one)
        for position, members in sorted(by_position.items()):
            self._rounds[position].run(members)


class Rounds:
    """The rounds of one process set. Every rank of it makes each of them.

    Args:
        process_set: Horovod's.
        calls: of the context.
        exchange: of the context too.
        position: there.
    """

    def __init__(self, process_set: Any, calls: Calls, exchange: Exchange, position: int) -> None:
        import horovod.torch as hvd

        self.hvd = hvd
        self.process_set = process_set
        self.position = position
        self.explaining = calls.explaining
        self._calls = calls
        self._exchange = exchange
        self._name = f"ignite_dist.gradients.{process_set.process_set_id}"
        self._members: weakref.WeakValueDictionary[int, Gradients] = weakref.WeakValueDictionary()
        self._num_members = 0  # until now, the same on each rank; who of them still lives may differ
        self._num_since_step = 0
        self._due: dict[int, Gradients] = {}

    def are_of(self, process_set: Any) -> bool:
        """Whether it is the set of these rounds, or another handle of it."""
        own = self.process_set
        is_same = own.process_set_id == process_set.process_set_id
        # The number of a set that was removed goes to the next. That of all ranks stays, whoever they are.
        return is_same and (own.process_set_id == 0 or own.ranks == process_set.ranks)

    def ranks(self) -> tuple[int, ...]:
        """The ranks of the process set."""
        return tuple(self.process_set.ranks)

    def is_active(self) -> bool:
        """Whether there is another rank to average with.

        Raises:
            RuntimeError: the process set was removed.
        """
        if not self.hvd.is_initialized() or not self.process_set.included():
            return False
        if not self._calls.is_alive(self.process_set):
            raise RuntimeError(_REMOVED % list(self.ranks()))
        return bool(self.process_set.size() > 1)

    def members(self) -> list[Gradients]:
        """Those that still exist, in the order in which they joined."""
        known = sorted(self._members.items())
        return [one for _, one in known]

    def add(self, member: Gradients) -> int:
        """The number of a new member. Each rank adds the same ones in the same order."""
        number = self._num_members
        self._members[number] = member
        self._num_members += 1
        return number

    def end_step(self) -> None:
        """Count from here the rounds until the next step."""
        self._num_since_step = 0

    def run_after_pass(self, member: Gradients) -> None:
        """Make a round for ``member`` when the backward pass that calls this has ended."""
        self._due[member.number] = member
        self._exchange.run_after_pass(self)

    def run_due(self) -> None:
        """Make the round that is due, if it has not been made meanwhile."""
        if self._due:
            due, self._due = self._due, {}
            self.run(due.values())

    def run(self, wanted: Iterable[Gradients]) -> None:
        """Average the gradients of ``wanted``, and of whatever optimizers other ranks want.

        Raises:
            CollectiveMismatchError: another rank has made a step while this one has made another pass.
            MissingRanksError: another rank has ended.
        """
        with self.explaining():
            self._run(wanted)

    def _run(self, wanted: Iterable[Gradients]) -> None:
        own = {one.number: one for one in wanted}
        for number in own:
            self._due.pop(number, None)
        for one in own.values():
            one.submit_needs()
        count = self._num_since_step + 1
        said = [count, _LIMIT - count, *(number in own for number in range(self._num_members))]
        call = self.exchange_greatest(said, self._name)
        most, least, *flags = self.result(call).tolist()
        # A rank that is in hvd.join() says 0 everywhere.
        if most != _LIMIT - least:
            raise CollectiveMismatchError(_UNEVEN % f"has made {self._num_since_step}")
        self._num_since_step += 1
        members = [self._member(number) for number, flag in enumerate(flags) if flag]
        for one in members:
            if one.number not in own:
                one.submit_needs()
        for one in members:
            one.submit_missing()
        for one in members:
            one.submit_changed()
        for one in members:
            one.receive()

    def _member(self, number: int) -> Gradients:
        member = self._members.get(number)
        if member is None:
            raise CollectiveMismatchError(
                f"Another rank averages the gradients of optimizer {number + 1}, of which this rank has no "
                "parameter any more."
            )
        return member

    def exchange_greatest(self, values: list[int], name: str) -> Call:
        """Begin to tell the other ranks; :meth:`result` is the greatest of all ranks at each place."""
        tensor = torch.tensor(values, dtype=torch.int32)
        call = self.hvd.allreduce_async(tensor, name=name, op=self.hvd.Max, process_set=self.process_set)
        return call, name

    def result(self, call: Call) -> Any:
        """What the call has made, as soon as it has ended."""
        return self._calls.result(call, self.process_set)

    def mean(self, value: float, name: str) -> float:
        """The mean of a number over the ranks."""
        tensor = torch.tensor([value], dtype=torch.float64)
        with self.explaining():
            handle = self.hvd.allreduce_async(
                tensor, name=name, op=self.hvd.Average, process_set=self.process_set
            )
            return float(self.result((handle, name)))


class Gradients:
    """The gradients of one optimizer.

    The hooks of the parameters hold this object, and it does not hold the parameters: it lives as long as any
    of them, whether the optimizer does or not. So it does not depend on the garbage collector, which runs at
    other times on each rank, which gradients are averaged.

    Args:
        exchange: of the context.
        name: the same on every rank, and of no other optimizer.
        reduction: how.
        groups: which gradients are sent as one, see ``hvd.DistributedOptimizer``.
        passes: the number of backward passes that add to a gradient before it is averaged.
    """

    def __init__(
        self, exchange: Exchange, name: str, reduction: Reduction, groups: Any = None, passes: int = 1
    ) -> None:
        self.passes = passes
        self.is_local = False  # while backward passes leave gradients as each rank's own
        self._exchange = exchange
        self._name = f"ignite_dist.{name}"
        self._is_average = reduction.is_average
        self._op = reduction.op
        self.rounds = exchange.rounds(reduction.process_set)
        self.number = self.rounds.add(self)
        # Parameters that were this optimizer's, by id, and who has averaged their gradients after it.
        self._heirs: dict[int, tuple[weakref.ref[Tensor], Gradients]] = {}
        self._units = Units(reduction, groups)
        self._hooks: list[Any] = []
        self._counts: dict[int, int] = {}  # passes that have added to each gradient since its average
        self._latest: int | None = None
        self._needs: Call = (0, "")
        self._agreed: list[int] = []  # of each gradient: _NOTHING, _SPARSE or _DENSE
        self._sent_again: list[int] = []  # of each gradient: whether some rank sends it a second time
        self._has_results = False  # of a round since the last step
        # The gradients that hold an average, and their versions when the step after it ended.
        self._averaged: dict[int, tuple[weakref.ref[Tensor], int | None]] = {}

    # --- which parameters ------------------------------------------------------------------------------

    def add(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Average the gradients of these parameters from now on; no other optimizer does any more."""
        self._exchange.hand_over((parameter for _, parameter in named), self)
        for index, (_, parameter) in enumerate(named, len(self._units)):
            self._heirs.pop(id(parameter), None)
            self._hooks.append(self._watch(index, parameter))
        self._units.add(named)

    def leave(self, parameters: set[int], heir: Gradients) -> None:
        """Average no more what is among ``parameters``, by ``id``; ``heir`` does."""
        for index in range(len(self._units)):
            parameter = self._units.parameter(index)
            if parameter is not None and id(parameter) in parameters:
                if self._hooks[index] is not None:
                    self._hooks[index].remove()
                self._units.remove(index)
                self._counts.pop(index, None)
                self._averaged.pop(index, None)
                self._heirs[id(parameter)] = weakref.ref(parameter), heir

    def _owners(self) -> list[Gradients]:
        """Who averages the gradients of the optimizer's parameters: this object, or others meanwhile."""
        found = {id(self): self}
        for reference, heir in self._heirs.values():
            parameter = reference()
            if parameter is not None:
                owner = heir._owner_of(parameter)
                found[id(owner)] = owner
        return list(found.values())

    def _owner_of(self, parameter: Tensor) -> Gradients:
        one = self
        while (known := one._heirs.get(id(parameter))) is not None and known[0]() is parameter:
            one = known[1]
        return one

    def check_heirs(self) -> None:
        """Refuse gradients that others average as this optimizer would not.

        Raises:
            RuntimeError: over other ranks, or by another operation.
        """
        for one in self._owners():
            if one.rounds.ranks() != self.rounds.ranks():
                raise RuntimeError(_OF_OTHER_RANKS % (list(self.rounds.ranks()), list(one.rounds.ranks())))
            if one._op != self._op:
                raise RuntimeError(_OF_ANOTHER_OP)

    def _watch(self, index: int, parameter: Tensor) -> Any:
        is_alone = not self.rounds.is_active() and os.environ.get("HOROVOD_ELASTIC") != "1"
        if is_alone or not (parameter.is_floating_point() or parameter.is_complex()):
            return None
        # torch takes hooks of what requires a gradient only. They stay, and run when it is trained later.
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
        # One behind: the user's hooks of this very gradient may come after this one, and change it.
        latest, self._latest = self._latest, index
        if latest is not None:
            with self.rounds.explaining():
                self._submit_if_complete(self._units.unit_of(latest))

    def _submit_if_complete(self, unit: Unit) -> None:
        if self._units.is_under_way(unit):
            return
        for index in unit:
            parameter = self._units.parameter(index)
            if parameter is None:
                return
            if parameter.requires_grad and self._counts.get(index, -1) < self.passes:
                return
            gradient = parameter.grad
            if gradient.is_sparse if gradient is not None else parameter.requires_grad:
                return  # whether it is dense on other ranks, or None, is known at the end
        self._units.submit(unit)

    # --- a round ---------------------------------------------------------------------------------------

    def submit_needs(self) -> None:
        """Begin to tell the other ranks which gradients have changed here."""
        if self._latest is not None:
            self._submit_if_complete(self._units.unit_of(self._latest))
            self._latest = None
        # Those that were sent and have changed since: in a pass within a pass, or after one that has failed.
        changed = self._units.changed()
        again = [int(index in changed) for index in range(len(self._units))]
        self._needs = self.rounds.exchange_greatest([*self._own_needs(), *again], f"{self._name}.needs")

    def _own_needs(self) -> list[int]:
        needs = []
        for index in range(len(self._units)):
            parameter = self._units.parameter(index)
            gradient = None if parameter is None else parameter.grad
            if gradient is None or parameter is None:
                needs.append(_NOTHING)
            elif index in self._counts or self._is_new(index, parameter):
                needs.append(_SPARSE if gradient.is_sparse else _DENSE)
            else:
                needs.append(_NOTHING)
        return needs

    def _is_new(self, index: int, parameter: Parameter) -> bool:
        """Whether the gradient is none that a round has averaged, but somebody's who has put it there."""
        gradient = parameter.grad
        if not parameter.requires_grad or gradient is None:
            return False
        reference, version = self._averaged.get(index, (None, None))
        if reference is None or reference() is not gradient:
            return True
        return version is not None and version != gradient._version

    def submit_missing(self) -> None:
        """Begin to average what has changed on any rank, as far as this rank has not."""
        agreed = self.rounds.result(self._needs).tolist()
        self._agreed, self._sent_again = agreed[: len(self._units)], agreed[len(self._units) :]
        if not self._is_average:
            self._check_no_result_is_reduced_again()
        for unit in self._units:
            if self._units.is_under_way(unit):
                continue
            if any(self._sent_again[index] for index in unit):
                self._units.submit(unit)
            elif any(self._agreed[index] for index in unit):
                self._units.submit(unit, self._sparse())

    def submit_changed(self) -> None:
        """Average once more what has changed on any rank since it was sent."""
        for unit in self._units:
            if any(self._sent_again[index] for index in unit):
                self._units.results(unit, self.rounds.result)
                self._units.submit(unit, self._sparse())

    def _sparse(self) -> set[int]:
        return {index for index, kind in enumerate(self._agreed) if kind == _SPARSE}

    def receive(self) -> None:
        """Put the averages where the gradients are; what has none on any rank keeps None."""
        with torch.no_grad():
            for unit in self._units:
                if self._units.is_under_way(unit):
                    for index, average in self._units.results(unit, self.rounds.result):
                        self._write(index, average)
        self._counts.clear()
        self._has_results = True

    def _write(self, index: int, average: Tensor) -> None:
        if self._agreed[index] == _NOTHING:
            return
        self._units.write(index, average, is_sparse=self._agreed[index] == _SPARSE)
        gradient = self._units.gradient(index)
        if gradient is not None:
            self._averaged[index] = weakref.ref(gradient), None

    def _check_no_result_is_reduced_again(self) -> None:
        for index, (_, version) in self._averaged.items():
            if self._agreed[index] and version is None and self._is_there(index):
                raise RuntimeError(_NOT_LINEAR)

    # --- the optimizer ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Average what has not been averaged yet; a round is made if none was since the last step."""
        owners = self._owners()
        self._exchange.run(one for one in owners if one._needs_round() and one.rounds.is_active())

    def _needs_round(self) -> bool:
        if self._units.are_removed():
            return False
        if not self._has_results or any(self._own_needs()):
            return True
        # They have been dropped by others than the optimizer, model.zero_grad() for one.
        return bool(self._averaged) and not any(self._is_there(index) for index in self._averaged)

    def _is_there(self, index: int) -> bool:
        gradient = self._averaged[index][0]()
        return gradient is not None and self._units.gradient(index) is gradient

    def begin(self) -> None:
        """Have :meth:`finish` make a round if no backward pass does from now on."""
        for one in self._owners():
            one._has_results = False

    def forget(self) -> None:
        """The optimizer has dropped the gradients, or set them to zero."""
        self._has_results = False
        self._counts.clear()
        self._averaged.clear()

    def end_step(self) -> None:
        """The optimizer has made its step."""
        self.begin()
        self.rounds.end_step()
        self._counts.clear()
        for index, (reference, _) in list(self._averaged.items()):
            gradient = reference()
            if gradient is None:
                del self._averaged[index]
            else:
                self._averaged[index] = reference, gradient._version
