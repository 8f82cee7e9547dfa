"""Starts and synchronises XLA replicas, which may be threads of one process.

``spawn`` does not use torch_xla's launcher, which returns no results, and reports a failure only after all
replicas have ended.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from types import FrameType
from typing import Any

from torch import Tensor

from ignite_dist.comp_models.work import waits_for_ranks
from ignite_dist.comp_models.xla import _torch_xla, interrupts
from ignite_dist.environments.devices import num_cores
from ignite_dist.errors import CollectiveMismatchError, DistributedError, MissingRanksError, RankFailedError
from ignite_dist.internals.ranks import describe_ranks
from ignite_dist.values import pytree
from ignite_dist.workers.failures import Failure
from ignite_dist.workers.sent_calls import EncodedCall
from ignite_dist.workers.supervisor import processes
from ignite_dist.workers.worker import ReportPipe

_logger = logging.getLogger(__name__)

# Seconds until a replica that waits for other replicas logs a warning, and the polling interval.
_PATIENCE_SECONDS = 10.0
_LOOK_SECONDS = 0.5

_RULE = (
    "All ranks must make the same calls in the same order, with tensors of one shape and dtype (except for "
    "all_gather_ragged). With XLA, ranks outside of a group must make the group's calls, too."
)
_WAITING = f"Rank %d has waited %.0f s in %s. Only ranks %s of this process have made this call. {_RULE}"
_ENDED = (
    "Another replica of this process has returned or failed, and will not reach {call}. (torch_xla.launch "
    "reports an exception only after all replicas have ended. idist.spawn reports an exception at once.)"
)


END = "the end of its context, by finalize() or because its function has returned"
"""The call of a replica that ends its context."""


# --- meeting -----------------------------------------------------------------------------------------


class _Round:
    """The replicas that have reached one collective, and the call that each replica is about to make."""

    def __init__(self) -> None:
        self.calls: dict[int, str] = {}
        self.failure: tuple[int, str, str] | None = None

    def ended(self) -> list[int]:
        """The replicas that have reached the end of their contexts while other replicas make a collective."""
        ended = [rank for rank, call in self.calls.items() if call == END]
        return sorted(ended) if len(ended) < len(self.calls) else []


class Meeting:
    """Synchronises the replicas of this process before each collective.

    PJRT ends the whole process if a replica waits for others for ten seconds, or if replicas make different
    calls. In this class a replica waits without a limit and logs a long wait. Different calls raise an
    exception.

    Args:
        size: number of replicas in this process.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.ended: set[int] = set()  # the ranks whose context has ended
        self._changed = threading.Condition()
        self._round = _Round()

    @waits_for_ranks
    def meet(self, rank: int, call: str) -> None:
        """Return when all replicas of this process have called this method with the same ``call``.

        Raises:
            MissingRanksError: some replicas have reached the end of their contexts, and others make a
                collective; raised on all these replicas.
            CollectiveMismatchError: the replicas make different calls; raised on all replicas.
            RankFailedError: another replica has failed.
            DistributedError: another replica has ended without :meth:`fail`.
            KeyboardInterrupt, SystemExit: see :meth:`given_up`.
        """
        with interrupts.delayed(), self._changed:
            interrupts.raise_delayed()
            joined = self._round
            if joined.failure is None and rank in joined.calls:
                raise RuntimeError(
                    f"Another thread of rank {rank} is in a collective. A rank must finish one "
                    "collective before it calls the next."
                )
            joined.calls[rank] = call
            if joined.ended() or (len(joined.calls) == self.size and joined.failure is None):
                self._round = _Round()
                self._changed.notify_all()
            self._wait(joined, rank, call)
        if joined.failure is not None:
            raise RankFailedError(*joined.failure)
        if ended := joined.ended():
            others = sorted(set(joined.calls) - set(ended))
            waiting = "; ".join(f"rank {one}: {joined.calls[one]}" for one in others)
            raise MissingRanksError(
                f"{describe_ranks(ended).capitalize()} reached {END}, but other ranks wait: {waiting}.",
                ended,
                dict.fromkeys(ended, END),
            )
        if len(set(joined.calls.values())) > 1:
            described = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(joined.calls.items()))
            raise CollectiveMismatchError(f"The ranks made different calls. {described}. {_RULE}")

    def _wait(self, joined: _Round, rank: int, call: str) -> None:
        """Return when the outcome of the round is known. The caller holds the lock."""
        warn_at = time.monotonic() + _PATIENCE_SECONDS
        while len(joined.calls) < self.size and joined.failure is None and not joined.ended():
            interrupts.raise_delayed()  # see given_up()
            if self._changed.wait(_LOOK_SECONDS) or self._round is not joined:
                continue
            if 0 < _num_running() < self.size:  # 0: other code has started the replicas
                del joined.calls[rank]
                raise DistributedError(_ENDED.format(call=call))
            if time.monotonic() > warn_at:
                warn_at = inf
                _logger.warning(_WAITING, rank, _PATIENCE_SECONDS, call, sorted(joined.calls))

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Context manager in which the main thread interrupts all replicas.

        No replica makes the collective for which some replicas wait: these replicas raise their interrupts.
        If all replicas have met, all make the collective, and raise their interrupts after it.
        """
        with self._changed:
            if self._round.failure is None:
                self._round = _Round()
            yield
            self._changed.notify_all()

    def enter(self, rank: int) -> None:
        """Begin a context of ``rank``, possibly after an earlier one."""
        with interrupts.delayed(), self._changed:
            if rank in self.ended:
                self.ended.remove(rank)
                if self._round.failure is not None:
                    self._round = _Round()

    def fail(self, rank: int, error_type: str, traceback: str) -> None:
        """Mark ``rank`` as failed. Replicas that wait in :meth:`meet`, or call it later, raise this error."""
        with interrupts.delayed(), self._changed:
            if self._round.failure is None:
                self._round.failure = (rank, error_type, traceback)
            self._changed.notify_all()


def _num_running() -> int:
    """Number of this process's threads that run a replica, whichever code has started them.

    The threads of torch_xla's launcher outlive their replicas, so only the stack of a thread shows if the
    thread runs a replica.
    """
    num_running = 0
    for frame in sys._current_frames().values():
        stack: FrameType | None = frame
        while stack is not None and not _runs_replica(stack):
            stack = stack.f_back
        num_running += stack is not None
    return num_running


def _runs_replica(frame: FrameType) -> bool:
    """True for a frame of the function that runs a whole replica: torch_xla's, or the one of this module."""
    code = frame.f_code
    return code is _run_replica.__code__ or code.co_name == _torch_xla.REPLICA_OF_TORCH_XLA


_meeting: Meeting | None = None
_meeting_lock = threading.Lock()


def get_meeting() -> Meeting:
    """The only :class:`Meeting` of this process. The XLA runtime must be initialized."""
    global _meeting
    with _meeting_lock:
        if _meeting is None:
            from torch_xla import runtime

            # A world of one rank has one replica, however many devices this process has.
            _meeting = Meeting(runtime.addressable_device_count() if runtime.world_size() > 1 else 1)
        return _meeting


# --- starting ----------------------------------------------------------------------------------------


def num_processes_and_replicas() -> tuple[int, int]:
    """Number of processes that PJRT needs on this host, and of replicas in each process.

    This initializes no device, and imports torch_xla only if ``PJRT_DEVICE`` is not the CPU.

    Raises:
        ValueError: ``PJRT_DEVICE`` or ``CPU_NUM_DEVICES`` is invalid.
    """
    device_type = os.environ.get("PJRT_DEVICE")
    if device_type == "CPU":
        text = os.environ.get("CPU_NUM_DEVICES", "1")
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"CPU_NUM_DEVICES must be a positive number of devices, got {text!r}.")
        return 1, int(text)
    from torch_xla.experimental import plugins

    known = {"CPU", "TPU", "NEURON", *_torch_xla.device_types_of_plugins()}
    if device_type not in known:
        raise ValueError(f"PJRT_DEVICE is {device_type!r}, not one of {', '.join(map(repr, sorted(known)))}.")
    if device_type == "TPU" and not _torch_xla.num_tpu_chips():
        raise ValueError(
            "PJRT_DEVICE is 'TPU', but torch_xla finds no TPU on this host. To use the CPU, set "
            "PJRT_DEVICE=CPU."
        )
    num_processes = 1
    if plugins.using_dynamic_plugins():
        num_processes = plugins.default().physical_chip_count()
    elif device_type == "TPU":
        num_processes = _torch_xla.num_tpu_processes()
    elif device_type == "NEURON":
        num_processes = _torch_xla.num_neuron_processes()
    return num_processes, _torch_xla.num_replicas_per_tpu_chip() if device_type == "TPU" else 1


def start(
    entry: Callable[..., Any],
    nproc_per_node: int,
    start_method: str | None,
    daemon: bool,
    prefix_output: bool,
) -> processes.Workers:
    """Start processes with one thread per replica. Each replica calls ``entry(local_rank)``."""
    num_processes, num_replicas = (1, 1) if nproc_per_node == 1 else num_processes_and_replicas()
    environs = []
    for local_process in range(num_processes):
        environ = {
            "PJRT_LOCAL_PROCESS_RANK": str(local_process),
            "PJRT_LOCAL_PROCESS_COUNT": str(num_processes),
        }
        if "XLA_THREAD_POOL_SIZE" not in os.environ:
            # A replica inside a collective occupies a thread of this pool, which has one thread per core. If
            # the pool has fewer threads than replicas, the last replica never enters the collective.
            environ["XLA_THREAD_POOL_SIZE"] = str(max(num_replicas, num_cores()))
        environs.append(environ)
    return processes.start(
        entry,
        {},
        environs,
        store=None,
        start_method=start_method,
        daemon=daemon,
        ranks_per_process=num_replicas,
        run=_run_alone if nproc_per_node == 1 else _run_replicas,
        prefix_output=prefix_output,
    )


def _run_alone(sent: Any, pipes: Sequence[ReportPipe]) -> Failure | None:
    from torch_xla import runtime

    _torch_xla.initialize_alone()
    (pipe,) = pipes
    return pipe.run(partial(_result_on_cpu, sent), runtime.global_ordinal())


def _run_replicas(sent: Any, pipes: Sequence[ReportPipe]) -> Failure | None:
    """Run a replica in one thread for each device of this process, like torch_xla's launcher."""
    import torch_xla

    _torch_xla.initialize_process(
        int(os.environ["PJRT_LOCAL_PROCESS_RANK"]), int(os.environ["PJRT_LOCAL_PROCESS_COUNT"])
    )
    devices = torch_xla.devices()
    if len(devices) != len(pipes):
        raise ValueError(
            f"PJRT gives this process {len(devices)} devices, for {len(pipes)} replicas. Set nproc_per_node "
            "to the number of devices of this host."
        )
    failures: list[Failure] = []
    interrupts.run_in_threads(
        {
            f"replica on {device}": partial(_run_replica, sent, pipe, device, failures)
            for pipe, device in zip(pipes, devices, strict=True)
        },
        get_meeting().given_up(),
    )
    return failures[0] if failures else None


def _run_replica(sent: Any, pipe: ReportPipe, device: Any, failures: list[Failure]) -> None:
    from torch_xla import runtime

    _torch_xla.use_device(device)
    rank = runtime.global_ordinal()
    failure = pipe.run(partial(_result_on_cpu, sent), rank)
    if failure is not None:
        failures.append(failure)
    meeting = get_meeting()
    if rank not in meeting.ended:  # the replica has failed, or called sys.exit()
        error_type = failure.error_type if failure else SystemExit.__name__
        meeting.fail(rank, error_type, failure.traceback if failure else "")


def _result_on_cpu(sent: Any, local_rank: int) -> Any:
    """The result of the sent call, with tensors on the CPU, because the launcher has no XLA device."""
    call = sent.decode(local_rank) if isinstance(sent, EncodedCall) else sent
    with interrupts.allowed():
        result = call(local_rank)
    leaves, _ = pytree.flatten(result, is_local=True)
    on_xla = [isinstance(leaf, Tensor) and leaf.device.type == "xla" for leaf in leaves]
    if not any(on_xla):
        return result
    moved = (leaf.cpu() if is_on_xla else leaf for leaf, is_on_xla in zip(leaves, on_xla, strict=True))
    return pytree.rebuild(result, moved)
