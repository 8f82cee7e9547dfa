"""The rounds in which a process set's ranks average gradients; see :mod:`.averaging`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ignite_dist.comp_models.horovod.reduction import Call
from ignite_dist.errors import CollectiveMismatchError
from ignite_dist.internals import _torch

_LIMIT = 1 << 30

_UNEVEN = (
    "The ranks have made different numbers of backward passes since the last step: this rank has made %d. "
    "Make the same number on all ranks, or at most N on each rank with "
    "auto_optim(..., backward_passes_per_step=N)."
)
_REMOVED = (
    "The process set of the ranks %s, over which auto_optim(..., process_set=...) averages these gradients, "
    "was removed. Call auto_optim again, with an existing process set or without process_set=."
)


class Calls(Protocol):
    """The methods of Horovod's transport that rounds use."""

    def errors_with_cause(self) -> AbstractContextManager[None]:
        """Context manager: if Horovod was shut down before or in the block, raise an error with the cause."""

    def result(self, call: Call, process_set: Any) -> Any:
        """Wait for a call and return its result."""

    def is_alive(self, process_set: Any) -> bool:
        """True if Horovod has this process set, and has not given its id to another process set."""


class Member(Protocol):
    """One optimizer's gradients. A round calls the first four methods, in the order of this class."""

    number: int
    rounds: Rounds

    def submit_kinds(self) -> None:
        """Begin to exchange which gradients have changed on each rank."""

    def submit_missing(self) -> None:
        """Begin to average the gradients that have changed on any rank and are not submitted yet."""

    def submit_changed(self) -> None:
        """Average again the gradients that have changed on any rank after they were sent."""

    def receive(self) -> None:
        """Write the averages into the gradients."""

    def stop_averaging(self, parameters: set[int], new_owner: Any) -> None:
        """Stop averaging ``parameters``, given by ``id``: ``new_owner`` averages their gradients now."""


class Exchange:
    """The rounds of all process sets in a context."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._rounds: list[Rounds] = []  # in the same order on every rank
        self._due: set[int] = set()

    def rounds(self, process_set: Any) -> Rounds:
        """Return the rounds of a process set.

        Raises:
            ValueError: Horovod does not have the process set.
        """
        if not self._calls.is_alive(process_set):
            raise ValueError(f"process_set= was removed or never added: {process_set}.")
        for rounds in self._rounds:
            if rounds.has_process_set(process_set):
                return rounds
        self._rounds.append(Rounds(process_set, self._calls, self, len(self._rounds)))
        return self._rounds[-1]

    def hand_over(self, parameters: Iterable[Tensor], new_owner: Member) -> None:
        """Make ``new_owner`` the only member that averages the gradients of ``parameters``."""
        ids = set(map(id, parameters))
        for rounds in self._rounds:
            for one in rounds.members():
                if one is not new_owner:
                    one.stop_averaging(ids, new_owner)

    def run_after_pass(self, rounds: Rounds) -> None:
        """Schedule :meth:`Rounds.run_due` at the end of the current backward pass."""
        self._due.add(rounds.position)
        # Register the callback in each hook: autograd drops the callbacks of a failed pass.
        _torch.run_after_backward(self._run_due)

    def _run_due(self) -> None:
        # A different order on each rank would deadlock: a round waits for the other ranks.
        due, self._due = self._due, set()
        for position in sorted(due):
            self._rounds[position].run_due()

    def run(self, members: Iterable[Member]) -> None:
        """Run a round for each process set of ``members``."""
        by_position: dict[int, list[Member]] = {}
        for one in members:
            by_position.setdefault(one.rounds.position, []).append(one)
        for position, in_process_set in sorted(by_position.items()):
            self._rounds[position].run(in_process_set)


class Rounds:
    """The rounds of one process set. Every rank of the process set takes part in every round.

    Args:
        process_set: a process set of Horovod.
        calls: the context's transport.
        exchange: the context's exchange.
        position: the index of this object in ``exchange``.
    """

    def __init__(self, process_set: Any, calls: Calls, exchange: Exchange, position: int) -> None:
        import horovod.torch as hvd

        self.hvd = hvd
        self.process_set = process_set
        self.position = position
        self.errors_with_cause = calls.errors_with_cause
        self._calls = calls
        self._exchange = exchange
        self._name = f"ignite_dist.gradients.{process_set.process_set_id}"
        self._members: weakref.WeakValueDictionary[int, Member] = weakref.WeakValueDictionary()
        self._num_members = 0  # number of members ever added, equal on each rank
        self._num_since_step = 0
        self._due: dict[int, Member] = {}

    def has_process_set(self, process_set: Any) -> bool:
        """True if ``process_set`` is a handle of the same process set as these rounds' handle."""
        known = self.process_set
        is_same = known.process_set_id == process_set.process_set_id
        # Horovod reuses the id of a removed process set. Id 0 always means all ranks.
        return bool(is_same and (known.process_set_id == 0 or known.ranks == process_set.ranks))

    def ranks(self) -> tuple[int, ...]:
        """The ranks of the process set."""
        return tuple(self.process_set.ranks)

    def is_active(self) -> bool:
        """True if this rank averages with other ranks.

        Raises:
            RuntimeError: the process set was removed.
        """
        if not self.hvd.is_initialized() or not self.process_set.included():
            return False
        if not self._calls.is_alive(self.process_set):
            raise RuntimeError(_REMOVED % list(self.ranks()))
        return bool(self.process_set.size() > 1)

    def members(self) -> list[Member]:
        """The members that still exist, oldest first."""
        by_number = sorted(self._members.items())
        return [one for _, one in by_number]

    def add(self, member: Member) -> int:
        """Add a member and return its number. Each rank adds the same members in the same order."""
        number = self._num_members
        self._members[number] = member
        self._num_members += 1
        return number

    def end_step(self) -> None:
        """Set the number of rounds since the last step to 0."""
        self._num_since_step = 0

    def run_after_pass(self, member: Member) -> None:
        """Schedule a round for ``member`` at the end of the current backward pass."""
        self._due[member.number] = member
        self._exchange.run_after_pass(self)

    def run_due(self) -> None:
        """Run the scheduled round, unless another round has included its members."""
        if self._due:
            due, self._due = self._due, {}
            self.run(due.values())

    def run(self, requested: Iterable[Member]) -> None:
        """Average the gradients of ``requested``, and of the optimizers that other ranks request.

        Raises:
            CollectiveMismatchError: the ranks made different numbers of backward passes since the last step,
                or this rank has no parameters of an optimizer that another rank requests.
            MissingRanksError: another rank has ended.
        """
        with self.errors_with_cause():
            self._run({one.number: one for one in requested})

    def _run(self, requested: dict[int, Member]) -> None:
        for number in requested:
            self._due.pop(number, None)
        for one in requested.values():
            one.submit_kinds()
        count = self._num_since_step + 1
        report = [count, _LIMIT - count, *(number in requested for number in range(self._num_members))]
        call = self.begin_maximum(report, self._name)
        most, least, *flags = self.result(call).tolist()
        # A rank inside hvd.join() contributes zeros, which are never the maximum.
        if most != _LIMIT - least:
            raise CollectiveMismatchError(_UNEVEN % self._num_since_step)
        self._num_since_step += 1
        members = [self._member(number) for number, flag in enumerate(flags) if flag]
        for one in members:
            if one.number not in requested:
                one.submit_kinds()
        for one in members:
            one.submit_missing()
        for one in members:
            one.submit_changed()
        for one in members:
            one.receive()

    def _member(self, number: int) -> Member:
        member = self._members.get(number)
        if member is None:
            raise CollectiveMismatchError(
                f"Another rank averages the gradients of optimizer {number + 1}, but this rank has deleted "
                "the parameters of that optimizer."
            )
        return member

    def begin_maximum(self, values: list[int], name: str) -> Call:
        """Begin an element-wise maximum over the ranks. :meth:`result` returns the maximum."""
        tensor = torch.tensor(values, dtype=torch.int32)
        call = self.hvd.allreduce_async(tensor, name=name, op=self.hvd.Max, process_set=self.process_set)
        return call, name

    def result(self, call: Call) -> Any:
        """Wait for a call and return its result."""
        return self._calls.result(call, self.process_set)

    def mean(self, value: float, name: str) -> float:
        """Mean of ``value`` over the ranks."""
        tensor = torch.tensor([value], dtype=torch.float64)
        with self.errors_with_cause():
            handle = self.hvd.allreduce_async(
                tensor, name=name, op=self.hvd.Average, process_set=self.process_set
            )
            return float(self.result((handle, name)))
