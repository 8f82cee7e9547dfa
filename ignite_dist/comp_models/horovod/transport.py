"""Horovod's collectives of tensors, and process sets as groups."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import count
from math import inf
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from ignite_dist.comp_models.groups import Once
from ignite_dist.comp_models.horovod import _horovod
from ignite_dist.comp_models.transport import STANDARD_DTYPES, CollectiveKind, Group, Sizes, Transport, Wait
from ignite_dist.comp_models.work import Completed, Work, waits_for_ranks, work_of
from ignite_dist.environments import devices
from ignite_dist.environments.rendezvous import connections, stores
from ignite_dist.internals.arguments import check_keywords
from ignite_dist.internals.call_sites import local_of

_logger = logging.getLogger(__name__)

# Horovod looks for new calls once per cycle, 1 ms by default. A rank that wakes up late misses the next
# cycle. So a rank with its own core spins for slightly longer than one cycle, and sleeps afterwards.
_SPIN_SECONDS = 1.2e-3
_SLEEP_SECONDS = 200e-6
# Between two looks whether Horovod still runs. A look waits for the lock of Horovod's thread.
_CHECK_SECONDS = 5e-3

# The watchdog's timeout for the lock on the process sets.
_LOCK_SECONDS = 0.1

# A rank that waits longer logs a warning.
PATIENCE_SECONDS = 10.0
_WAITING = (
    "Rank %d has waited %.0f s in %s. Another rank has not made this call, or the shapes or dtypes differ."
)
_WAITING_FOR_GROUP = (
    "Rank %d waits for the other ranks to make the group %s. With Horovod, every rank of the world must make "
    "a new group, also the ranks outside it: call new_group, or a collective with the list of ranks."
)
SHUT_DOWN = (
    "Horovod has been shut down by another rank, which has called hvd.shutdown() or finalize(), or has "
    "failed. See the output of that rank."
)
_REMOVED = (
    "This ProcessSet was removed or never added: %s. hvd.remove_process_set() removes all groups of the same "
    "ranks. Make a new group."
)
_MOST_RANKS = 1 << 14
_LARGEST_PART = (1 << 31) - 1
DYNAMIC_SETS = "HOROVOD_DYNAMIC_PROCESS_SETS"
# The dtypes that the torch extension of Horovod 0.28.1 supports.
_REDUCED = frozenset({torch.int32, torch.int64, torch.float16, torch.float32, torch.float64})


class HorovodTransport(Transport):
    """Horovod's collectives between ``hvd.init()`` and ``hvd.shutdown()``.

    Args:
        hvd: the module ``horovod.torch``.
        is_current: returns False after Horovod was shut down.
    """

    def __init__(self, hvd: Any, is_current: Callable[[], bool]) -> None:
        self._hvd = hvd
        self._is_current = is_current
        self._mpi_ops = hvd.mpi_ops
        self._read_process_set_ranks = _horovod.native_process_set_ranks(hvd.mpi_ops)
        self._rank: int = hvd.rank()
        self._world_size: int = hvd.size()
        self._world = Group(None, tuple(range(self._world_size)))
        # Output buffer of _is_running(). No code reads the buffer, so threads share it. An optimizer may
        # outlive this context and be used in a larger world, so the buffer has a minimum size.
        self._ranks_buffer = (ctypes.c_int * max(self._world_size, _MOST_RANKS))()
        self._ranks_array_type = ctypes.c_int * (self._world_size + 1)
        self._spin_seconds = _SPIN_SECONDS if hvd.local_size() <= devices.num_cores() else 0.0
        self._ops = {"SUM": hvd.Sum, "PRODUCT": hvd.Product, "MIN": hvd.Min, "MAX": hvd.Max}
        if hvd.mpi_built():
            self._ops["ADASUM"] = hvd.Adasum
        self._num_begun: dict[str, int] = {}  # number of this package's calls, by the group's tag
        self._handle_numbers: dict[tuple[int, ...], Iterator[int]] = {}
        self._once = Once()
        # Guards Horovod's table of process sets. Horovod reads the table in several steps. Each rank assigns
        # ids in the order of its own calls, but a process set needs the same id on all ranks.
        self._sets_lock = threading.RLock()
        self._supports_gpu = hvd.cuda_built() or hvd.rocm_built()

    # --- groups: every rank of the world creates each process set --------------------------------------

    def world_handle(self) -> Any:
        return self._hvd.global_process_set

    def make_group(self, ranks: tuple[int, ...], **options: Any) -> Any:
        check_keywords("new_group", options, ())
        if not ranks:
            return self._hvd.ProcessSet([])  # never added: Horovod rejects an empty set
        with self._once("the process set", ranks):
            process_set_id = self._known_process_set(ranks)
            if process_set_id is not None:  # Horovod rejects a second set of the same ranks
                handle = self._hvd.ProcessSet(list(ranks))
                handle.process_set_id = process_set_id
            else:
                handle = self._new_process_set(ranks)
        # Groups of the same ranks share a process set. This number distinguishes the calls of these groups.
        # The number is equal on all members, because the members make these groups in the same order.
        handle.ignite_dist_number = next(self._handle_numbers.setdefault(ranks, count(1)))
        return handle

    def _known_process_set(self, ranks: tuple[int, ...]) -> int | None:
        if len(ranks) == self._world_size:
            return 0
        with self._sets_lock:
            known = _horovod.known_process_sets(self._mpi_ops)
        return next((number for number, members in known.items() if tuple(members) == ranks), None)

    def _new_process_set(self, ranks: tuple[int, ...]) -> Any:
        hvd = self._hvd
        late_warning = threading.Timer(
            PATIENCE_SECONDS, _logger.warning, (_WAITING_FOR_GROUP, self._rank, list(ranks))
        )
        late_warning.daemon = True
        late_warning.start()
        try:
            # Raises, without communication, if Horovod takes no new sets. The set of all ranks exists, so
            # adding this set has no effect.
            _horovod.add_process_set(self._mpi_ops, range(self._world_size))
            # Other threads may add other sets. When all ranks have arrived, rank 0 decides which set is next.
            self._run_barrier("arrived", ranks)
            with self._sets_lock if self._rank == 0 else nullcontext():
                self._run_barrier("next", ranks)
                with self._sets_lock:
                    return hvd.add_process_set(list(ranks))
        except ValueError as error:
            if DYNAMIC_SETS not in str(error):
                raise RuntimeError(f"The group {list(ranks)} was not made: {error}") from error
            raise RuntimeError(
                f"Horovod was initialized without {DYNAMIC_SETS}=1 and takes no new groups. Set the "
                "variable before hvd.init(), pass the groups as hvd.init(process_sets=...), or call "
                "idist.initialize('horovod'), which sets the variable."
            ) from error
        finally:
            late_warning.cancel()

    def _run_barrier(self, step: str, ranks: tuple[int, ...]) -> None:
        """Run a barrier of the world for a new process set. The caller logs the warning about a long wait."""
        tensor = torch.zeros(1)
        submit = partial(self._hvd.allreduce_async_, tensor, op=self._hvd.Sum)
        self._begin(submit, f"new_group.{ranks}.{step}", tensor, self._world, warns_if_late=False).wait()

    def group_key(self, group: Group) -> str:
        number = self._number_of(group)
        if number == 0 and (group.handle is None or group.handle.process_set_id == 0):
            return ""
        return f"{super().group_key(group)}/{number}"

    def _tag(self, group: Group) -> str:
        """Return the prefix of the names of the group's calls. It is equal on all members."""
        process_set_id = 0 if group.handle is None else group.handle.process_set_id
        return f"{process_set_id}.{self._number_of(group)}"

    def _number_of(self, group: Group) -> int:
        """Number of the group among groups of the same ranks; 0 for the world and the user's process sets."""
        number: int = getattr(group.handle, "ignite_dist_number", 0)
        return number

    def ranks_of(self, handle: Any) -> tuple[int, ...]:
        if not isinstance(handle, self._hvd.ProcessSet):
            raise ValueError(f"A group is a list of ranks or a horovod.torch.ProcessSet, got {handle!r}.")
        if not self.is_alive(handle):
            raise ValueError(_REMOVED % handle)
        return tuple(handle.ranks)

    def is_alive(self, handle: Any) -> bool:
        number = handle.process_set_id
        if number == 0 or handle.ranks == []:
            return True
        if number is None or not self._is_current():
            return False
        # The user may have removed this set through another handle. Horovod may reuse the id for other ranks.
        found = self._ranks_array_type(*[-1] * (self._world_size + 1))
        self._read_process_set_ranks(number, found)
        ranks = [*handle.ranks, -1]
        return bool(found[: len(ranks)] == ranks)

    @contextmanager
    def errors_with_cause(self) -> Iterator[None]:
        try:
            if not self._is_running():
                raise self._mpi_ops.HorovodInternalError(SHUT_DOWN)
            yield
        except self._mpi_ops.HorovodInternalError as error:
            connections.raise_with_cause(error)

    @waits_for_ranks
    def result(self, call: tuple[int, str], process_set: Any) -> Any:
        # The watchdog reads `process_set` in this frame: this rank waits for the ranks of the process set.
        handle, name = call
        self._wait(handle, name, PATIENCE_SECONDS)
        return self._hvd.synchronize(handle)

    # --- primitives ------------------------------------------------------------------------------------

    def supports(
        self, kind: CollectiveKind, op: str | None, dtype: torch.dtype, device: torch.device
    ) -> bool:
        on_gpu = device.type == "cuda" and self._supports_gpu
        if device.type != "cpu" and not on_gpu:
            return False
        if kind == "all_reduce":
            return op in self._ops and dtype in _REDUCED
        return kind in ("all_gather", "all_to_all", "broadcast") and dtype in STANDARD_DTYPES

    # Horovod matches calls by name. Each process numbers unnamed calls itself, and ranks outside a group
    # would count fewer calls. Horovod negotiates known names with a few bits. So each call here has a name,
    # made of values that are equal on all ranks.

    def all_reduce(self, tensor: Tensor, op: str, group: Group) -> Work:
        if not tensor.numel():
            return Completed(tensor)
        submit = partial(self._hvd.allreduce_async_, tensor, op=self._ops[op])
        return self._begin(submit, f"all_reduce.{op}", tensor, group)

    def all_gather(self, tensor: Tensor, group: Group, out: Tensor | None = None) -> Work:
        if not tensor.numel():
            return Completed(tensor.new_empty((len(group.ranks), *tensor.shape)) if out is None else out)
        submit = partial(self._hvd.allgather_async, tensor.unsqueeze(0))
        # Horovod resizes the output in its own thread, which is not in inference mode.
        with torch.inference_mode(False):
            begun = self._begin(submit, "all_gather", tensor, group)
        return begun if out is None else begun.then(out.copy_)

    def broadcast(self, tensor: Tensor, src: int, group: Group) -> Work:
        if not tensor.numel():
            return Completed(tensor)
        return self._begin(
            partial(self._hvd.broadcast_async_, tensor, src), f"broadcast.{src}", tensor, group
        )

    def all_to_all(self, tensor: Tensor, group: Group, out: Tensor, sizes: Sizes | None) -> Work:
        if sizes is None:
            sent, layout = [tensor.numel() // len(group.ranks)] * len(group.ranks), tensor
        else:  # the sizes of the tensors differ between the ranks, and the names of the calls must not
            sent, layout = list(sizes.sent), tensor.new_empty(0)
        if max(sent) > _LARGEST_PART:
            raise ValueError(f"Horovod exchanges parts of at most {_LARGEST_PART} elements, got {max(sent)}.")
        submit = partial(self._hvd.alltoall_async, tensor, splits=torch.tensor(sent, dtype=torch.int32))
        with torch.inference_mode(False):
            begun = self._begin(submit, "all_to_all", layout, group)
        return begun.then(lambda received: out.copy_(received[0]))

    def barrier(self, group: Group) -> Work:
        # Not hvd.barrier(), which would spin: see _wait.
        tensor = torch.zeros(1)
        work = self._begin(
            partial(self._hvd.allreduce_async_, tensor, op=self._hvd.Sum), "barrier", tensor, group
        )
        return work.then(lambda _: None)

    def _begin(
        self,
        submit: Callable[..., int],
        name: str,
        tensor: Tensor,
        group: Group,
        warns_if_late: bool = True,
    ) -> Work:
        """Submit a call under a name that is equal on all ranks."""
        if not self._is_running():
            connections.raise_with_cause(self._mpi_ops.HorovodInternalError(SHUT_DOWN))
        process_set = self._hvd.global_process_set if group.handle is None else group.handle
        if process_set.process_set_id == 0:  # ADASUM rejects other handles of the world
            process_set = self._hvd.global_process_set
        layout = f"{tensor.dtype}.{tuple(tensor.shape)}"
        tag = self._tag(group)
        full_name = f"ignite_dist.{tag}.{name}.{layout}"
        with self._clearer_errors():
            handle = submit(name=full_name, process_set=process_set)
        self._num_begun[tag] = self._num_begun.get(tag, 0) + 1
        patience = PATIENCE_SECONDS if warns_if_late else inf
        return _HorovodWork(self, handle, full_name, patience, tag, group.ranks)

    @contextmanager
    def _clearer_errors(self) -> Iterator[None]:
        """Context manager: replace Horovod's errors with errors that name the cause."""
        try:
            yield
        except ValueError as error:  # the name is in use: the other arguments have been checked
            raise RuntimeError(
                "The same call is already pending in this process: another thread has made the call, or "
                "it was interrupted before its end. Call the collectives of a group one after the other, or "
                f"make a group for each thread with new_group. ({error})"
            ) from error
        except self._mpi_ops.HorovodInternalError as error:
            connections.raise_with_cause(error)

    def finish(self, handle: int, name: str, patience: float) -> Any:
        """Wait for a call and return its result."""
        with self._clearer_errors():
            self._wait(handle, name, patience)
            return self._hvd.synchronize(handle)

    def is_finished(self, handle: int) -> bool:
        """True if :meth:`finish` would return or raise without waiting."""
        return bool(self._hvd.poll(handle)) or not self._is_running()

    def _wait(self, handle: int, name: str, patience: float) -> None:
        # hvd.synchronize() alone would spin until the call ends. Spinning takes a core from Horovod's thread
        # (with three ranks on two cores, 4 bytes take 9 ms instead of 2 ms), and blocks Ctrl-C.
        start, next_check = time.perf_counter(), 0.0
        while not self._hvd.poll(handle):
            waited = time.perf_counter() - start
            if waited < self._spin_seconds:
                os.sched_yield()
                continue
            if waited > next_check:
                if not self._is_running() and not self._hvd.poll(handle):
                    raise self._mpi_ops.HorovodInternalError(SHUT_DOWN)
                next_check = waited + _CHECK_SECONDS
            if waited > patience:
                patience = inf
                _logger.warning(_WAITING, self._rank, waited, name)
            time.sleep(_SLEEP_SECONDS)

    def _is_running(self) -> bool:
        # After another rank's shutdown, Horovod's thread aborts the pending calls. The thread holds a lock
        # and may need the GIL. A new call would keep the GIL and wait for the lock (deadlock), or never
        # return if the thread ends. This check waits for the lock without the GIL. Its result is negative
        # after the thread has ended. A shutdown between this check and the next call remains possible.
        return self._read_process_set_ranks(0, self._ranks_buffer) >= 0

    # --- for the watchdog ------------------------------------------------------------------------------

    def store(self) -> Store | None:
        return stores.launchers_store()

    def calls_begun(self) -> dict[str, int | None]:
        return dict(self._num_begun)

    def find_wait(self, frame: FrameType) -> Wait:
        # Horovod begins an operation, even a broadcast, only after all ranks of the set have submitted it.
        work = work_of(frame)
        if work is not None:  # a call of this package
            return Wait(work.ranks, work.group_name, is_known=True, needs_all=True)
        process_set = local_of(frame, "process_set")
        if isinstance(process_set, self._hvd.ProcessSet) and process_set.ranks:  # a call of an optimizer
            return Wait(tuple(process_set.ranks), is_known=True, needs_all=True)
        if frame.f_globals.get("__name__") == "torch.autograd.graph":  # this rank computes a backward pass
            return Wait()
        if not self._sets_lock.acquire(timeout=_LOCK_SECONDS):  # a pending new_group may hold the lock
            return Wait()
        try:
            sets = _horovod.known_process_sets(self._mpi_ops).values()
        finally:
            self._sets_lock.release()
        members = [ranks for ranks in sets if self._rank in ranks and len(ranks) > 1]
        in_all_sets = set(range(self._world_size)).intersection(*members)
        return Wait(tuple(in_all_sets), is_known=True, needs_all=True)

    def is_broken(self) -> bool | None:
        return not self._is_running()


class _HorovodWork(Work):
    """A submitted call of Horovod."""

    __slots__ = ("_group_name", "_handle", "_name", "_patience", "_transport", "ranks")

    def __init__(
        self,
        transport: HorovodTransport,
        handle: int,
        name: str,
        patience: float,
        group_name: str,
        ranks: tuple[int, ...],
    ) -> None:
        self._transport = transport
        self._handle = handle
        self._name = name
        self._patience = patience
        self._group_name = group_name
        self.ranks = ranks

    @property
    def group_name(self) -> str:
        return self._group_name

    @waits_for_ranks
    def wait(self, timeout: timedelta | None = None) -> Any:
        return self._transport.finish(self._handle, self._name, self._patience)

    def is_completed(self) -> bool:
        return self._transport.is_finished(self._handle)
