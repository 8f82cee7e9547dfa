"""The replicas of XLA that share a process, as threads: how they are started, and where they meet.

What torch_xla's own launcher does is done here for the workers of ``spawn``, so that each replica's result
and failure come home: that one returns nothing, and tells of a failure only when all replicas have ended.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ignite_dist import processes
from ignite_dist.devices import num_cores
from ignite_dist.errors import CollectiveMismatchError, RankFailedError
from ignite_dist.failures import Failure

__all__ = ["Meeting", "counts_here", "meeting_here", "start"]

_logger = logging.getLogger(__name__)

# How long a replica waits for the others without a word.
_PATIENCE_SECONDS = 10.0


# --- meeting -----------------------------------------------------------------------------------------


class _Round:
    """The replicas that have come to one collective, each with the call that it is about to make."""

    def __init__(self) -> None:
        self.calls: dict[int, Hashable] = {}
        self.failure: tuple[int, str, str] | None = None


class Meeting:
    """Where the replicas of this process meet before each collective.

    Inside PJRT a replica that waits for the others for ten seconds ends the whole process, and so does one
    that makes another call than they do. Here it waits as long as it takes, and hears of both.

    Args:
        size: number of replicas in this process.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._round = _Round()

    def meet(self, rank: int, call: Hashable) -> None:
        """Return when all replicas of this process have come with the same ``call``.

        Raises:
            CollectiveMismatchError: they came with different calls; raised on all of them.
            RankFailedError: another one has failed, and will not come.
        """
        with self._changed:
            here = self._round
            if here.failure is None and rank in here.calls:
                raise RuntimeError(
                    f"Rank {rank} is in a collective already, in another thread. Collectives of one rank are "
                    "called one after the other."
                )
            here.calls[rank] = call
            if len(here.calls) == self.size and here.failure is None:
                self._round = _Round()
                self._changed.notify_all()
            warned = False
            while len(here.calls) < self.size and here.failure is None:
                come = self._changed.wait(_PATIENCE_SECONDS)
                if not come and not warned and self._round is here:
                    warned = True
                    _logger.warning(
                        "Rank %d has waited %.0f s in %s. Some other replica of this process has not made "
                        "this call.",
                        rank,
                        _PATIENCE_SECONDS,
                        call,
                    )
        if here.failure is not None:
            raise RankFailedError(*here.failure)
        if len(set(here.calls.values())) > 1:
            described = ", ".join(f"rank {rank}: {call}" for rank, call in sorted(here.calls.items()))
            raise CollectiveMismatchError(f"The ranks of one collective made different calls: {described}.")

    def fail(self, rank: int, error_type: str, traceback: str) -> None:
        """Say that ``rank`` has failed: those that wait, and whoever comes later, raise that."""
        with self._changed:
            if self._round.failure is None:
                self._round.failure = (rank, error_type, traceback)
            self._changed.notify_all()

    def reopen(self) -> None:
        """Begin anew after a failure."""
        with self._changed:
            if self._round.failure is not None:
                self._round = _Round()


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
        ValueError: ``CPU_NUM_DEVICES`` is not a number.
    """
    if os.environ.get("PJRT_DEVICE") == "CPU":
        text = os.environ.get("CPU_NUM_DEVICES", "1")
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"CPU_NUM_DEVICES is a number of devices, got {text!r}.")
        return 1, int(text)
    from torch_xla import runtime
    from torch_xla._internal import neuron, tpu
    from torch_xla.experimental import plugins

    device_type = runtime.device_type()
    num_processes = 1
    if plugins.using_dynamic_plugins():
        num_processes = plugins.default().physical_chip_count()
    elif device_type == "TPU":
        num_processes = tpu.num_local_processes()
    elif device_type == "NEURON":
        num_processes = neuron.num_local_processes()
    return num_processes, tpu.num_logical_cores_per_chip() if device_type == "TPU" else 1


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


def _run_alone(sent: Any, posts: Sequence[processes.Post]) -> Failure | None:
    from torch_xla import runtime
    from torch_xla._internal import pjrt

    pjrt.initialize_singleprocess()
    (post,) = posts
    return post.run(sent, runtime.global_ordinal())


def _run_replicas(sent: Any, posts: Sequence[processes.Post]) -> Failure | None:
    """One thread for each device of this process, as torch_xla's own launcher has it."""
    import torch_xla
    from torch_xla._internal import pjrt

    pjrt.initialize_multiprocess(
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


def _run_replica(sent: Any, post: processes.Post, device: Any, failures: list[Failure]) -> None:
    import torch_xla
    from torch_xla import runtime

    torch_xla._XLAC._xla_set_default_device(str(device))  # of this thread, and with it the ordinal
    runtime._init_world_size_ordinal()
    rank = runtime.global_ordinal()
    failure = post.run(sent, rank)
    if failure is not None:
        failures.append(failure)
        meeting_here().fail(rank, failure.error_type, failure.traceback)
