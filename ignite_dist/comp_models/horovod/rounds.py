"""The rounds in which the ranks of a process set of Horovod average gradients, and who takes part in them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ignite_dist import _torch
from ignite_dist.comp_models.horovod.reduction import Call
from ignite_dist.errors import CollectiveMismatchError

__all__ = ["Calls", "Exchange", "Member", "Rounds"]

_LIMIT = 1 << 30

_UNEVEN = (
    "The ranks have made different numbers of backward passes since the last step: this rank %s. Either all "
    "ranks make as many, or none makes more than the backward_passes_per_step=... of auto_optim."
)
_REMOVED = (
    "The process set of the ranks %s, over which auto_optim(..., process_set=...) averages these gradients, "
    "was removed. Make a new optimizer by auto_optim, with a process set that is there or without one."
)


class Calls(Protocol):
    """What Horovod's context does for the calls that are made here."""

    def explaining(self) -> AbstractContextManager[None]:
        """Raise what is known of it if Horovod has been shut down, before the block or in it."""

    def result(self, call: Call, process_set: Any) -> Any:
        """What a call has made, as soon as it has ended."""

    def is_alive(self, process_set: Any) -> bool:
        """Whether Horovod has this process set, and no other one by its number."""


class Member(Protocol):
    """What a round needs of one optimizer's gradients. It calls the methods in this order."""

    number: int
    rounds: Rounds

    def submit_needs(self) -> None:
        """Start the exchange of which gradients have changed."""

    def submit_missing(self) -> None:
        """Begin to average what has changed on any rank, as far as this rank has not."""

    def submit_changed(self) -> None:
        """Average once more what has changed on any rank since it was sent."""

    def receive(self) -> None:
        """Put the averages where the gradients are."""

    def leave(self, parameters: set[int], heir: Any) -> None:
        """Average no more what is among ``parameters``, by ``id``; ``heir`` does."""


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

    def hand_over(self, parameters: Iterable[Tensor], heir: Member) -> None:
        """Leave the gradients of ``parameters`` to ``heir`` alone, whoever has averaged them until now."""
        wanted = set(map(id, parameters))
        for rounds in self._rounds:
            for one in rounds.members():
                if one is not heir:
                    one.leave(wanted, heir)

    def run_after_pass(self, rounds: Rounds) -> None:
        """Schedule the due one of ``rounds`` at the end of the running backward pass."""
        self._due.add(rounds.position)
        # Not once per pass: a pass that has failed forgets its callbacks.
        _torch.run_after_backward(self._run_due)

    def _run_due(self) -> None:
        # In the same order on each rank: a rank waits in one round before it begins the next.
        due, self._due = self._due, set()
        for position in sorted(due):
            self._rounds[position].run_due()

    def run(self, wanted: Iterable[Member]) -> None:
        """Make a round of each process set that an optimizer among ``wanted`` is of."""
        by_position: dict[int, list[Member]] = {}
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
        self._members: weakref.WeakValueDictionary[int, Member] = weakref.WeakValueDictionary()
        self._num_members = 0  # until now, the same on each rank; who of them still lives may differ
        self._num_since_step = 0
        self._due: dict[int, Member] = {}

    def are_of(self, process_set: Any) -> bool:
        """Whether it is the set of these rounds, or another handle of it."""
        own = self.process_set
        is_same = own.process_set_id == process_set.process_set_id
        # The number of a set that was removed goes to the next. That of all ranks stays, whoever they are.
        return bool(is_same and (own.process_set_id == 0 or own.ranks == process_set.ranks))

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

    def members(self) -> list[Member]:
        """The members that still exist, oldest first."""
        known = sorted(self._members.items())
        return [one for _, one in known]

    def add(self, member: Member) -> int:
        """The number of a new member. Each rank adds the same ones in the same order."""
        number = self._num_members
        self._members[number] = member
        self._num_members += 1
        return number

    def end_step(self) -> None:
        """Count from here the rounds until the next step."""
        self._num_since_step = 0

    def run_after_pass(self, member: Member) -> None:
        """Schedule a round for ``member`` at the end of the running backward pass."""
        self._due[member.number] = member
        self._exchange.run_after_pass(self)

    def run_due(self) -> None:
        """Make the round that is due, if it has not been made meanwhile."""
        if self._due:
            due, self._due = self._due, {}
            self.run(due.values())

    def run(self, wanted: Iterable[Member]) -> None:
        """Average the gradients of ``wanted``, and of whatever optimizers other ranks want.

        Raises:
            CollectiveMismatchError: another rank has made a step while this one has made another pass.
            MissingRanksError: another rank has ended.
        """
        with self.explaining():
            self._run(wanted)

    def _run(self, wanted: Iterable[Member]) -> None:
        own = {one.number: one for one in wanted}
        for number in own:
            self._due.pop(number, None)
        for one in own.values():
            one.submit_needs()
        count = self._num_since_step + 1
        said = [count, _LIMIT - count, *(number in own for number in range(self._num_members))]
        call = self.exchange_greatest(said, self._name)
        most, least, *flags = self.result(call).tolist()
        # A rank inside of hvd.join() contributes zeros.
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

    def _member(self, number: int) -> Member:
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
