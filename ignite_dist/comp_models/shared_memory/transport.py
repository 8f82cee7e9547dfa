"""A transport's collectives over shared memory, in the groups whose ranks are on one machine."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ignite_dist.comp_models.shared_memory.collectives import SharedMemory
from ignite_dist.comp_models.shared_memory.opening import MAX_RANKS, check_variable, open_segments
from ignite_dist.comp_models.shared_memory.segment import part_bytes
from ignite_dist.comp_models.transport import Group, Sizes, Transport
from ignite_dist.comp_models.work import Completed, Steps, Work, waits_for_ranks
from ignite_dist.environments.rendezvous import connections
from ignite_dist.internals.ranks import describe_ranks
from ignite_dist.values.calls import Call
from ignite_dist.values.serialization import as_tensor

_logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class OneMachineTransport(Transport):
    """Carries collectives of CPU tensors over shared memory, in groups whose ranks share memory.

    To be inherited from before the transport of a backend. The ranks of a group find out whether they can
    share memory in the first of these collectives. If they cannot, the backend carries the collectives. The
    backend also carries the collectives that overlap. (mypy does not see the backend behind ``super()``.)
    """

    _rank: int
    patience_seconds: float = math.inf
    """A rank that waits longer in shared memory logs for whom it waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_variable()  # at the beginning of the context, not in its first collective
        self._of_thread = threading.local()  # its `token` is that of the last call that the backend carried
        # By the id of the handle; None if its ranks share no memory.
        self._memories: dict[int, SharedMemory | None] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._openings: dict[int, Future[SharedMemory | None]] = {}
        # The call and the token of each call in which this rank was interrupted before the memory was open.
        self._interrupted_calls: dict[int, list[tuple[Call, int]]] = {}
        # Held while a memory is published or such a call is counted: no call may come between.
        self._counting = threading.RLock()

    # --- primitives ---

    def all_reduce(self, tensor: Tensor, op: str, group: Group) -> Work:
        over_backend = partial(super().all_reduce, tensor, op, group)  # type: ignore[safe-super]
        return self._work(tensor.device, group, lambda memory: memory.all_reduce(tensor, op), over_backend)

    def reduce_exactly(self, tensor: Tensor, op: str, group: Group) -> Work:
        over_backend = partial(super().reduce_exactly, tensor, op, group)
        return self._work(tensor.device, group, lambda memory: memory.all_reduce(tensor, op), over_backend)

    def all_gather(self, tensor: Tensor, group: Group, out: Tensor | None = None) -> Work:
        def gather(memory: SharedMemory) -> Tensor:
            rows = tensor.new_empty((len(group.ranks), *tensor.shape)) if out is None else out
            return memory.all_gather(tensor, rows)

        over_backend = partial(super().all_gather, tensor, group, out)  # type: ignore[safe-super]
        return self._work(tensor.device, group, gather, over_backend)

    def all_to_all(self, tensor: Tensor, group: Group, out: Tensor, sizes: Sizes | None) -> Work:
        over_backend = partial(super().all_to_all, tensor, group, out, sizes)
        if sizes is None and tensor.nbytes <= part_bytes(len(group.ranks)):
            return self._work(
                tensor.device, group, lambda memory: memory.all_to_all(tensor, out), over_backend
            )
        of_bytes = _in_bytes(sizes, tensor, len(group.ranks))
        return self._work(
            tensor.device, group, lambda memory: memory.exchange(tensor, out, of_bytes), over_backend
        )

    def broadcast(self, tensor: Tensor, src: int, group: Group) -> Work:
        over_backend = partial(super().broadcast, tensor, src, group)  # type: ignore[safe-super]
        root = group.position(src)
        assert root is not None
        return self._work(tensor.device, group, lambda memory: memory.broadcast(tensor, root), over_backend)

    def reduce_scatter(self, tensor: Tensor, op: str, group: Group, out: Tensor) -> Work:
        over_backend = partial(super().reduce_scatter, tensor, op, group, out)

        def reduce(memory: SharedMemory) -> Tensor:
            memory.reduce_scatter(tensor.view(len(group.ranks), -1), op, out.view(-1))
            return out

        return self._work(tensor.device, group, reduce, over_backend)

    def barrier(self, group: Group) -> Work:
        # On an accelerator a barrier also waits for the device, which the backend's does.
        return self._work(self.barrier_device(), group, SharedMemory.barrier, partial(super().barrier, group))  # type: ignore[safe-super]

    def gather_bytes(self, buffer: bytearray, group: Group) -> bytearray:
        over_backend = partial(super().gather_bytes, buffer, group)
        gathered: bytearray = self._work(
            _CPU, group, lambda memory: memory.gather_bytes(buffer), lambda: Steps(over_backend)
        ).wait()
        return gathered

    def fill_rows(self, rows: Sequence[Tensor], position: int, group: Group) -> None:
        over_backend = partial(super().fill_rows, rows, position, group)
        self._work(_CPU, group, lambda memory: memory.fill_rows(rows), lambda: Steps(over_backend)).wait()

    def _work(
        self,
        device: torch.device,
        group: Group,
        run: Callable[[SharedMemory], Any],
        over_backend: Callable[[], Work],
    ) -> Work:
        if device.type != "cpu" or self.shares_memory(group) is False:
            self._leave_to_backend(group)
            return over_backend()
        return _SharedWork(self, group, run, over_backend)

    def _leave_to_backend(self, group: Group) -> None:
        """Note that the backend carries the call, so that an interrupt does not count in the memory."""
        self._of_thread.token = group.token

    # --- what the backend says ---

    @abstractmethod
    def handle_of(self, group: Group) -> Any:
        """The backend's object for ``group``, also for the world. The memory ends with it."""

    @abstractmethod
    def name_of(self, group: Group) -> str:
        """The group's name in :meth:`calls_begun`; empty if it has none."""

    @abstractmethod
    def timeout_of(self, handle: Any) -> timedelta:
        """How long a rank waits for another one in a collective."""

    def barrier_device(self) -> torch.device:
        """The device whose work a barrier waits for."""
        return _CPU

    def as_own(self, error: RuntimeError) -> RuntimeError:
        """``error`` as the backend would raise it."""
        return error

    def check_backend(self) -> None:
        """Raise if no collective of the backend can complete. Called while a rank waits for others."""

    # --- the memory of each group ---

    def memory_of(self, group: Group) -> SharedMemory | None:
        """The memory of ``group``; None if its ranks share none. All ranks make the first call together."""
        handle = self.handle_of(group)
        try:
            return self._memories[id(handle)]
        except KeyError:
            pass
        # In a thread, because the other ranks would not notice that an interrupt has ended the opening on
        # this rank. The next call of this rank waits for the same opening.
        opening = self._openings.setdefault(id(handle), Future())  # atomic: threads of one group share it
        if not (opening.running() or opening.done()):  # an interrupt may have come before start()
            threading.Thread(target=self._open_in_thread, args=(opening, handle, group), daemon=True).start()
        try:
            return opening.result()
        finally:
            if opening.done() and opening.exception() is not None:
                self._openings.pop(id(handle), None)

    def _open_in_thread(self, opening: Future[SharedMemory | None], handle: Any, group: Group) -> None:
        with self._counting:
            if opening.running() or opening.done():  # another thread opens it
                return
            opening.set_running_or_notify_cancel()
        try:
            memory = self._open_memory(handle, group)
            self._forget_with(handle)
            with self._counting:
                self._count_interrupted_calls(id(handle), memory)
                self._memories[id(handle)] = memory
            opening.set_result(memory)
        except BaseException as error:
            opening.set_exception(error)

    def _open_memory(self, handle: Any, group: Group) -> SharedMemory | None:
        position = group.position(self._rank)
        assert position is not None
        gather = partial(self._gather_over_backend, group=group)
        segments = open_segments(
            *(gather, self._rank, group.call.text, position, len(group.ranks), self.timeout_of(handle)),
            check_backend=self.check_backend,
            patience_seconds=self.patience_seconds,
        )
        if isinstance(segments, str):
            _logger.info("%s share no memory: %s", describe_ranks(group.ranks).capitalize(), segments)
            return None
        first, second = segments
        name = self.name_of(group)
        if not name:  # a group of asynchronous calls, whose thread makes one call at a time
            return SharedMemory(first, name, SharedMemory(second, ""))
        key = self.group_key(group)
        return SharedMemory(first, name, SharedMemory(second, ""), lambda: self.pending_calls(key))

    def _finish_opening(self, group: Group) -> None:
        """Open the memory if an interrupted call of this rank should have: the other ranks open it there."""
        key = id(self.handle_of(group))
        if key in self._openings or key in self._interrupted_calls:
            self.memory_of(group)

    def separate_group(self, group: Group) -> Work:
        self._finish_opening(group)
        memory = self._memories.get(id(self.handle_of(group)))
        if memory is None or memory.for_async_calls is None:
            return super().separate_group(group)
        handle = _SecondHandle()
        self._forget_with(handle)
        self._memories[id(handle)] = memory.for_async_calls
        return Completed(group._replace(handle=handle))

    def _gather_over_backend(self, buffer: bytearray, group: Group) -> bytearray:
        """As ``Transport.gather_bytes``, whose ``all_gather`` would wait for this memory."""
        gathered = bytearray(len(group.ranks) * len(buffer))
        rows = as_tensor(gathered).view(len(group.ranks), len(buffer))
        super().all_gather(as_tensor(buffer), group, rows).wait()  # type: ignore[safe-super]
        return gathered

    def _forget_with(self, handle: Any) -> None:
        """When ``handle`` is destroyed, drop what belongs to it: another handle may get its id."""
        key, memories = id(handle), self._memories
        others: tuple[dict[int, Any], ...] = (self._references, self._openings, self._interrupted_calls)

        def forget(_: Any) -> None:
            for by_id in others:
                by_id.pop(key, None)
            forgotten = memories.pop(key, None)
            if forgotten is not None:
                forgotten.leave()

        self._references.setdefault(key, weakref.ref(handle, forget))

    def count_interrupted(self, group: Group) -> None:
        if self.shares_memory(group) is False or group.position(self._rank) is None:
            return
        if group.token == getattr(self._of_thread, "token", 0) != 0:
            return
        handle = self.handle_of(group)
        self._forget_with(handle)
        with self._counting:
            self._interrupted_calls.setdefault(id(handle), []).append((group.call, group.token))
            if id(handle) in self._memories:
                self._count_interrupted_calls(id(handle), self._memories[id(handle)])

    def _count_interrupted_calls(self, key: int, memory: SharedMemory | None) -> None:
        for call, token in self._interrupted_calls.pop(key, ()):
            if memory is not None:
                memory.count_interrupted(call, token)

    def shares_memory(self, group: Group) -> bool | None:
        if not 1 < len(group.ranks) <= MAX_RANKS:
            return False
        try:
            return self._memories[id(self.handle_of(group))] is not None
        except KeyError:
            return None

    def _live_memories(self) -> list[SharedMemory]:
        return [memory for memory in list(self._memories.values()) if memory is not None]

    def forget(self) -> None:
        """Leave the memories, at the end of the context."""
        for memory in self._live_memories():
            memory.leave()
        self._references.clear()
        self._memories.clear()
        self._openings.clear()
        self._interrupted_calls.clear()

    # --- for the watchdog ---

    def num_collectives(self) -> int:
        return super().num_collectives() + sum(memory.segment.number for memory in self._live_memories())

    def calls_begun(self) -> dict[str, int | None]:
        begun = super().calls_begun()
        for memory in self._live_memories():
            number = begun.get(memory.name)
            if number is not None:
                begun[memory.name] = number + memory.segment.number
        return begun

    def end_waits(self) -> None:
        super().end_waits()
        for memory in self._live_memories():
            memory.leave()


class _SecondHandle:
    """The handle of a separate group whose collectives go over the group's second memory."""


def _in_bytes(sizes: Sizes | None, tensor: Tensor, group_size: int) -> Sizes:
    if sizes is None:
        equal = [tensor.nbytes // group_size] * group_size
        return Sizes(equal, equal)
    width = tensor.itemsize
    return Sizes([size * width for size in sizes.sent], [size * width for size in sizes.received])


class _SharedWork(Work):
    """A collective that goes over shared memory, unless :meth:`start` is called or the ranks share no memory.

    Args:
        transport: has the memory of ``group``.
        group: the group.
        run: runs the collective in a memory.
        over_backend: begins the collective of the backend.
    """

    __slots__ = ("_group", "_inner", "_over_backend", "_result", "_run", "_transport", "needs_all", "ranks")

    def __init__(
        self,
        transport: OneMachineTransport,
        group: Group,
        run: Callable[[SharedMemory], Any],
        over_backend: Callable[[], Work],
    ) -> None:
        self._transport, self._group = transport, group
        self._run: Callable[[SharedMemory], Any] | None = run
        self._over_backend = over_backend
        self._inner: Work | None = None
        self._result: Any = None
        self.ranks = group.ranks
        self.needs_all = True

    @property
    def group_name(self) -> str:
        return self._transport.name_of(self._group)

    def start(self) -> None:
        self._run = None
        self._inner = self._over_backend()
        if isinstance(self._inner, Steps):  # Steps begin in wait(), which the caller may call late
            self._inner = Completed(self._inner.wait())
        self._inner.start()

    @waits_for_ranks
    def wait(self, timeout: timedelta | None = None) -> Any:
        run, self._run = self._run, None
        if run is not None:
            memory = self._transport.memory_of(self._group)
            if memory is None:
                self._inner = self._over_backend()
            else:
                try:
                    self._result = memory.run(run, self._group)
                except RuntimeError as error:
                    connections.raise_with_cause(self._transport.as_own(error))
        return self._result if self._inner is None else self._inner.wait()

    def is_completed(self) -> bool:
        return self._run is None and (self._inner is None or self._inner.is_completed())
