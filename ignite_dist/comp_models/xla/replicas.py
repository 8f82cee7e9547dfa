"""XLA replicas that are threads of one process: how they are started, and how they synchronise.

``spawn`` does not use torch_xla's launcher, which returns no results, and reports a failure only after all
replicas have ended.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from types import FrameType
from typing import Any

from torch import Tensor

from ignite_dist.comp_models.work import waits_for_ranks
from ignite_dist.comp_models.xla import _torch_xla
from ignite_dist.devices import num_cores
from ignite_dist.errors import CollectiveMismatchError, DistributedError, MissingRanksError, RankFailedError
from ignite_dist.values import pytree, serialization
from ignite_dist.values.ranks import describe_ranks
from ignite_dist.workers import processes
from ignite_dist.workers.failures import Failure
from ignite_dist.workers.worker import Post

__all__ = ["END", "Meeting", "counts_here", "meeting_here", "start"]

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
    "reports its exception only after all replicas have ended; idist.spawn reports it at once.)"
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
    calls. Here a replica waits without a limit and logs a long wait, and different calls raise an exception.

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
        """
        with self._changed:
            here = self._round
            if here.failure is None and rank in here.calls:
                raise RuntimeError(
                    f"Another thread of rank {rank} is in a collective. A rank must finish one "
                    "collective before it calls the next."
                )
            here.calls[rank] = call
            if here.ended() or (len(here.calls) == self.size and here.failure is None):
                self._round = _Round()
                self._changed.notify_all()
            warn_at = time.monotonic() + _PATIENCE_SECONDS
            while len(here.calls) < self.size and here.failure is None and not here.ended():
                if self._changed.wait(_LOOK_SECONDS) or self._round is not here:
                    continue
                if 0 < _num_running() < self.size:  # 0: other code has started the replicas
                    del here.calls[rank]
                    raise DistributedError(_ENDED.format(call=call))
                if time.monotonic() > warn_at:
                    warn_at = inf
                    _logger.warning(_WAITING, rank, _PATIENCE_SECONDS, call, sorted(here.calls))
        if here.failure is not None:
            raise RankFailedError(*here.failure)
        if ended := here.ended():
            others = sorted(set(here.calls) - set(ended))
            waiting = "; ".join(f"rank {one}: {here.calls[one]}" for one in others)
            raise MissingRanksError(
                f"{describe_ranks(ended).capitalize()} reached {END}, but other ranks wait: {waiting}.",
                ended,
                dict.fromkeys(ended, END),
            )
        if len(set(here.calls.values())) > 1:
            described = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(here.calls.items()))
            raise CollectiveMismatchError(f"The ranks made different calls. {described}. {_RULE}")

    def enter(self, rank: int) -> None:
        """Begin a context of ``rank``, possibly after an earlier one."""
        with self._changed:
            if rank in self.ended:
                self.ended.remove(rank)
                if self._round.failure is not None:
                    self._round = _Round()

    def fail(self, rank: int, error_type: str, traceback: str) -> None:
        """Mark ``rank`` as failed: replicas that wait now or call later raise this error."""
        with self._changed:
            if self._round.failure is None:
                self._round.failure = (rank, error_type, traceback)
            self._changed.notify_all()


def _num_running() -> int:
    """Number of this process's threads that run a replica, whichever code has started them.

    The threads of torch_xla's launcher outlive their replicas, so only the stack of a thread tells if it runs
    a replica.
    """
    num_running = 0
    for frame in sys._current_frames().values():
        stack: FrameType | None = frame
        while stack is not None and stack.f_code.co_name not in _STARTERS:
            stack = stack.f_back
        num_running += stack is not None
    return num_running


# The functions that run a replica: torch_xla's, and our own below.
_STARTERS = (_torch_xla.REPLICA_OF_TORCH_XLA, "_run_replica")

_meeting: Meeting | None = None
_making = threading.Lock()


def meeting_here() -> Meeting:
    """The only :class:`Meeting` of this process. The XLA runtime must be initialized."""
    global _meeting
    with _making:
        if _meeting is None:
            from torch_xla import runtime

            # A world of one rank has one replica, however many devices this process has.
            _meeting = Meeting(runtime.addressable_device_count() if runtime.world_size() > 1 else 1)
        return _meeting


# --- starting ----------------------------------------------------------------------------------------


def counts_here() -> tuple[int, int]:
    """Number of processes that PJRT needs on this host, and of replicas in each process.

    This initializes no device, and imports torch_xla only if ``PJRT_DEVICE`` is not the CPU.

    Raises:
        ValueError: ``PJRT_DEVICE`` or ``CPU_NUM_DEVICES`` is invalid.
    """
    device_type = os.environ.get("PJRT_DEVICE")
    if device_type == "CPU":
        text = os.environ.get("CPU_NUM_DEVICES", "1")
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"CPU_NUM_DEVICES is a number of devices, got {text!r}.")
        return 1, int(text)
    from torch_xla.experimental import plugins

    known = {"CPU", "TPU", "NEURON", *_torch_xla.device_types_of_plugins()}
    if device_type not in known:
        raise ValueError(f"PJRT_DEVICE is {device_type!r}, not one of {', '.join(map(repr, sorted(known)))}.")
    if device_type == "TPU" and not _torch_xla.num_tpu_chips():
        raise ValueError("PJRT_DEVICE is 'TPU', and torch_xla finds no TPU here. 'CPU' runs on the CPU.")
    num_processes = 1
    if plugins.using_dynamic_plugins():
        num_processes = plugins.default().physical_chip_count()
    elif device_type == "TPU":
        num_processes = _torch_xla.num_tpu_processes()
    elif device_type == "NEURON":
        num_processes = _torch_xla.num_neuron_processes()
    return num_processes, _torch_xla.num_replicas_per_tpu_chip() if device_type == "TPU" else 1


def start(
    entry: Callable[..., Any], nproc_per_node: int, start_method: str | None, daemon: bool
) -> processes.Workers:
    """Start processes with one thread per replica. Each replica calls ``entry(local_rank)``."""
    num_processes, num_replicas = (1, 1) if nproc_per_node == 1 else counts_here()
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
        serving=None,
        start_method=start_method,
        daemon=daemon,
        ranks_per_process=num_replicas,
        run=_run_alone if nproc_per_node == 1 else _run_replicas,
    )


def _run_alone(sent: Any, posts: Sequence[Post]) -> Failure | None:
    from torch_xla import runtime

    _torch_xla.initialize_alone()
    (post,) = posts
    return post.run(partial(_result_on_cpu, sent), runtime.global_ordinal())


def _run_replicas(sent: Any, posts: Sequence[Post]) -> Failure | None:
    """Run a replica in one thread for each device of this process, like torch_xla's launcher."""
    import torch_xla

    _torch_xla.initialize_process(
        int(os.environ["PJRT_LOCAL_PROCESS_RANK"]), int(os.environ["PJRT_LOCAL_PROCESS_COUNT"])
    )
    devices = torch_xla.devices()
    if len(devices) != len(posts):
        raise ValueError(
            f"PJRT gives this process {len(devices)} devices, for {len(posts)} replicas. Set nproc_per_node "
            "to the number of devices of this host."
        )
    failures: list[Failure] = []
    threads = [
        threading.Thread(
            target=_run_replica, args=(sent, post, device, failures), name=f"replica on {device}"
        )
        for post, device in zip(posts, devices, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures[0] if failures else None


def _run_replica(sent: Any, post: Post, device: Any, failures: list[Failure]) -> None:
    from torch_xla import runtime

    _torch_xla.use_device(device)
    rank = runtime.global_ordinal()
    failure = post.run(partial(_result_on_cpu, sent), rank)
    if failure is not None:
        failures.append(failure)
    meeting = meeting_here()
    if rank not in meeting.ended:  # the replica has failed, or called sys.exit()
        error_type = failure.error_type if failure else SystemExit.__name__
        meeting.fail(rank, error_type, failure.traceback if failure else "")


def _result_on_cpu(sent: Any, local_rank: int) -> Any:
    """The result of the call, with tensors on the CPU, because the launcher has no XLA device."""
    call = serialization.decode(sent) if isinstance(sent, bytes) else sent
    result = call(local_rank)
    leaves, _ = pytree.flatten(result, is_local=True)
    is_moved = [isinstance(leaf, Tensor) and leaf.device.type == "xla" for leaf in leaves]
    if not any(is_moved):
        return result
    moved = (leaf.cpu() if moves else leaf for leaf, moves in zip(leaves, is_moved, strict=True))
    return pytree.rebuild(result, moved)
