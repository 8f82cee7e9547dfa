"""The replicas of XLA that share a process, as threads: how they are started, and where they meet.

What torch_xla's own launcher does is done here for the workers of ``spawn``, so that each replica's result
and failure come home: that one returns nothing, and tells of a failure only when all replicas have ended.
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

# How long a replica waits for the others before it reports the wait, and the polling interval.
_PATIENCE_SECONDS = 10.0
_LOOK_SECONDS = 0.5

_RULE = (
    "All ranks make the same calls in the same order, with tensors of one shape and dtype (all_gather_ragged "
    "takes others); with XLA that holds for a group's, too, members or not."
)
_WAITING = f"Rank %d has waited %.0f s in %s. Only ranks %s of this process have made this call. {_RULE}"
_ENDED = (
    "Another replica of this process has returned or failed, and will not come to {call}. (What it raised, "
    "torch_xla.launch does not tell before all replicas have ended; idist.spawn does at once.)"
)


END = "the end of its context, by finalize() or because its function has returned"
"""The call of a replica that ends its context."""


# --- meeting -----------------------------------------------------------------------------------------


class _Round:
    """The replicas that have come to one collective, each with the call that it is about to make."""

    def __init__(self) -> None:
        self.calls: dict[int, str] = {}
        self.failure: tuple[int, str, str] | None = None

    def ended(self) -> list[int]:
        """The replicas that have reached the end of their contexts while other replicas make a collective."""
        ended = [rank for rank, call in self.calls.items() if call == END]
        return sorted(ended) if len(ended) < len(self.calls) else []


class Meeting:
    """Where the replicas of this process meet before each collective.

    Inside PJRT a replica that waits for the others for ten seconds ends the whole process, and so does one
    that makes another call than they do. Here it waits as long as it takes, and hears of both.

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
        """Return when all replicas of this process have come with the same ``call``.

        Raises:
            MissingRanksError: some have come to the end of their contexts, and others make a collective;
                raised on all that have come.
            CollectiveMismatchError: they came with different calls; raised on all of them.
            RankFailedError: another one has failed, and will not come.
            DistributedError: another one has ended without a word.
        """
        with self._changed:
            here = self._round
            if here.failure is None and rank in here.calls:
                raise RuntimeError(
                    f"Rank {rank} is in a collective already, in another thread. Collectives of one rank are "
                    "called one after the other."
                )
            here.calls[rank] = call
            if here.ended() or (len(here.calls) == self.size and here.failure is None):
                self._round = _Round()
                self._changed.notify_all()
            warn_at = time.monotonic() + _PATIENCE_SECONDS
            while len(here.calls) < self.size and here.failure is None and not here.ended():
                if self._changed.wait(_LOOK_SECONDS) or self._round is not here:
                    continue
                if 0 < _num_running() < self.size:  # (none: they were started in a way of their own)
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
                f"{describe_ranks(ended).capitalize()} came to {END}, and others wait for them: {waiting}.",
                ended,
                dict.fromkeys(ended, END),
            )
        if len(set(here.calls.values())) > 1:
            described = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(here.calls.items()))
            raise CollectiveMismatchError(f"The ranks made different calls. {described}. {_RULE}")

    def enter(self, rank: int) -> None:
        """Begin a context, the first one or another."""
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
    """Return the number of this process's threads that run as replicas, whichever code started them.

    The thread of a replica that has returned lives on in the pool of torch_xla's launcher.
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
    """The one meeting of this process, whose runtime is live."""
    global _meeting
    with _making:
        if _meeting is None:
            from torch_xla import runtime

            # A world of one does not replicate, however many devices this process has.
            _meeting = Meeting(runtime.addressable_device_count() if runtime.world_size() > 1 else 1)
        return _meeting


# --- starting ----------------------------------------------------------------------------------------


def counts_here() -> tuple[int, int]:
    """How many processes PJRT starts on this host, and with how many replicas each.

    Local: nothing is initialised. Only for other devices than the CPU is torch_xla imported.

    Raises:
        ValueError: ``PJRT_DEVICE`` or ``CPU_NUM_DEVICES`` names something that there is not.
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
    """Start processes whose threads run ``entry(local_rank)``, a replica each; or one replica alone."""
    num_processes, num_replicas = (1, 1) if nproc_per_node == 1 else counts_here()
    environs = []
    for local_process in range(num_processes):
        environ = {
            "PJRT_LOCAL_PROCESS_RANK": str(local_process),
            "PJRT_LOCAL_PROCESS_COUNT": str(num_processes),
        }
        if "XLA_THREAD_POOL_SIZE" not in os.environ:
            # A replica inside a collective holds a thread of this pool. It has one for each core, and where
            # that is fewer than replicas the last of them never gets there.
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
    """One thread for each device of this process, as torch_xla's own launcher has it."""
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
    if rank not in meeting.ended:  # it has failed, or left by sys.exit()
        error_type = failure.error_type if failure else SystemExit.__name__
        meeting.fail(rank, error_type, failure.traceback if failure else "")


def _result_on_cpu(sent: Any, local_rank: int) -> Any:
    """What the call returns, with tensors on the CPU: the launcher has no XLA device to put them on."""
    call = serialization.decode(sent) if isinstance(sent, bytes) else sent
    result = call(local_rank)
    leaves, _ = pytree.flatten(result, is_local=True)
    is_moved = [isinstance(leaf, Tensor) and leaf.device.type == "xla" for leaf in leaves]
    if not any(is_moved):
        return result
    moved = (leaf.cpu() if moves else leaf for leaf, moves in zip(leaves, is_moved, strict=True))
    return pytree.rebuild(result, moved)
