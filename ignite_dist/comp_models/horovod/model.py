"""Horovod: its own ranks, background thread and collectives, under the same facade.

Horovod itself, and what of this package only its users need, is imported inside methods.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import count
from math import inf
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import Store
from torch.nn import Module
from torch.optim import Optimizer

from ignite_dist import devices, environments, flight_recorder
from ignite_dist.arguments import check_counts, check_keywords
from ignite_dist.comp_models.base import NO_OPTIMIZER, ComputationModel, Group, WaitedFor
from ignite_dist.comp_models.topology import Topology
from ignite_dist.environments import variables
from ignite_dist.errors import EnvironmentVariablesError
from ignite_dist.rendezvous import connections, stores

if TYPE_CHECKING:
    from typing_extensions import Self

    from ignite_dist.comp_models.horovod.averaging_optimizer import Exchange

__all__ = ["HorovodModel"]

_logger = logging.getLogger(__name__)

# Horovod looks for new calls once a cycle, a millisecond by default. Whoever wakes up late after one misses
# the next, so a rank with a core to itself stays awake for a little longer than that, and sleeps only then.
_SPIN_SECONDS = 1.2e-3
_SLEEP_SECONDS = 200e-6

# How long the watchdog waits for a change of the process sets.
_LOCK_SECONDS = 0.1

# How long a rank waits without a word.
_PATIENCE_SECONDS = 10.0
_WAITING = (
    "Rank %d has waited %.0f s in %s. Some other rank has not made this call, or with another shape or dtype."
)
_WAITING_FOR_GROUP = (
    "Rank %d waits for the other ranks to make the group %s. With Horovod every rank of the world makes a "
    "new group, members or not: by new_group, or by a collective with the list of its ranks."
)
_SHUT_DOWN = (
    "Horovod has been shut down by another rank: it has called hvd.shutdown() or finalize(), or has failed, "
    "and then its own output says why."
)
_REMOVED = (
    "This ProcessSet was removed, or never added; got %s. Handles of the same ranks are one process set of "
    "Horovod, so hvd.remove_process_set() of one ends them all: make a new group."
)
_MOST_RANKS = 1 << 14
_DYNAMIC_SETS = "HOROVOD_DYNAMIC_PROCESS_SETS"
# What the torch extension of 0.28.1 has functions for.
_GATHERED = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
    }
)
_REDUCED = frozenset({torch.int32, torch.int64, torch.float16, torch.float32, torch.float64})


def _available_backends() -> tuple[str, ...]:
    """Whether Horovod is installed with its torch extension; looked up without importing it."""
    spec = find_spec("horovod")
    folders = spec.submodule_search_locations if spec is not None else None
    built = any(any(Path(folder, "torch").glob("mpi_lib_v2.*")) for folder in folders or ())
    return ("horovod",) if built else ()


class HorovodModel(ComputationModel):
    """The model of Horovod between ``hvd.init()`` and ``hvd.shutdown()``.

    Args:
        undo: what to take back when this model's own context ends.
    """

    name: ClassVar[str] = "horovod-dist"
    available_backends: ClassVar[tuple[str, ...]] = _available_backends()
    library: ClassVar[str] = "horovod.torch"
    averages_gradients: ClassVar[bool] = True

    def __init__(self, undo: Callable[[], None] | None = None) -> None:
        super().__init__(undo)
        import horovod.torch as hvd

        self._hvd = hvd
        self._is_initialized = hvd.is_initialized
        # hvd.init() makes a new map each time: the only trace of a shutdown and another init in between.
        self._mpi_ops = hvd.mpi_ops
        self._epoch = hvd.mpi_ops._handle_map
        self._process_set_ranks: Callable[..., int] = (
            hvd.mpi_ops._basics.MPI_LIB_CTYPES.horovod_process_set_ranks
        )
        self._rank: int = hvd.rank()
        self._world_size: int = hvd.size()
        # An output buffer: nobody reads what is written there, so threads share it. An optimizer may outlive
        # this context and be used in a larger one.
        self._found_ranks = (ctypes.c_int * max(self._world_size, _MOST_RANKS))()
        self._ranks_of_set = ctypes.c_int * (self._world_size + 1)
        self._local_rank: int = hvd.local_rank()
        self._spin_seconds = _SPIN_SECONDS if hvd.local_size() <= devices.num_cores() else 0.0
        self._ops = {"SUM": hvd.Sum, "PRODUCT": hvd.Product, "MIN": hvd.Min, "MAX": hvd.Max}
        if hvd.mpi_built():
            self._ops["ADASUM"] = hvd.Adasum
        self._exchange: Exchange | None = None  # of the optimizers' gradients
        self._num_begun: dict[str, int] = {}  # calls of this package, announced or not, by their groups' tags
        self._optimizer_numbers = count(1)
        self._handle_numbers: dict[tuple[int, ...], Iterator[int]] = {}
        # Guards Horovod's table of process sets. Horovod reads it in several steps, and numbers the sets of
        # each rank in the order in which they come, although a set needs the same number on all ranks.
        self._changing_sets = threading.RLock()
        self._takes_gpu = hvd.cuda_built() or hvd.rocm_built()
        self._fixed_device = None if torch.cuda.is_available() else torch.device("cpu")

    # --- lifecycle ---------------------------------------------------------------------------------

    @classmethod
    def create_from_context(cls) -> Self | None:
        hvd = sys.modules["horovod.torch"]
        is_initialized = getattr(hvd, "is_initialized", None)  # not there if the extension was not built
        return cls() if is_initialized is not None and is_initialized() else None

    @classmethod
    def how_to_get(cls, backend: str) -> str | None:
        if backend != "horovod":
            return None
        found = "was built without its torch extension" if find_spec("horovod") else "is not installed"
        return (
            f"Horovod {found}. Its last release needs one edit to build against a current torch: "
            "`make horovod` does it in a checkout, and the README's section 'Horovod' has the three lines."
        )

    @classmethod
    def create_from_backend(cls, backend: str, *, comm: Any = None, **kwargs: Any) -> Self:
        """``comm`` goes to ``hvd.init``: None, a list of ranks, or an ``mpi4py`` communicator."""
        check_keywords("initialize", kwargs, ("comm",))
        import horovod.torch as hvd

        _check_launcher(hvd)
        _check_comm(hvd, comm)
        with ExitStack() as undo:
            if _DYNAMIC_SETS not in os.environ:  # read by init(); without it no group could be made later
                os.environ[_DYNAMIC_SETS] = "1"
                undo.callback(os.environ.pop, _DYNAMIC_SETS, None)
            hvd.init(comm)
            undo.callback(variables.give_back)
            variables.set_missing(
                {"RANK": hvd.rank(), "WORLD_SIZE": hvd.size(), "LOCAL_RANK": hvd.local_rank()}
            )
            if torch.cuda.is_available():
                torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
            return cls(undo.pop_all().close)

    @classmethod
    def spawn_keywords(cls) -> set[str]:
        from ignite_dist.comp_models.horovod import launching

        return super().spawn_keywords() | launching.run_keywords()

    @classmethod
    def check_spawn(
        cls,
        *,
        nproc_per_node: int,
        nnodes: int | None = None,
        hosts: str | None = None,
        start_method: str | None = None,
        join: bool = True,
        daemon: bool = False,
        **run_options: Any,
    ) -> None:
        from ignite_dist.comp_models.horovod import launching

        check_counts(nproc_per_node=nproc_per_node, nnodes=1 if nnodes is None else nnodes)
        launching.check_hosts(nproc_per_node, nnodes, hosts, run_options)
        if (hosts or run_options) and (start_method or daemon or not join):
            raise ValueError(
                "start_method, daemon and join=False are for workers on this machine alone; "
                f"{', '.join(['hosts'] * (hosts is not None) + list(run_options))} asks for horovod.run, "
                "which has nothing like them."
            )

    @classmethod
    def spawn(
        cls,
        entry: Callable[..., Any],
        *,
        backend: str,
        nproc_per_node: int,
        nnodes: int | None = None,
        hosts: str | None = None,
        start_method: str | None = None,
        join: bool = True,
        daemon: bool = False,
        **run_options: Any,
    ) -> Any:
        """See ``idist.spawn``; ``hosts`` and every other option of ``horovod.run`` go there."""
        from ignite_dist.comp_models.horovod import launching

        cls.check_spawn(
            nproc_per_node=nproc_per_node,
            nnodes=nnodes,
            hosts=hosts,
            start_method=start_method,
            join=join,
            daemon=daemon,
            **run_options,
        )
        if hosts is not None or run_options:
            return launching.run_on_hosts(entry, nproc_per_node, nnodes, hosts, run_options)
        workers = launching.start_here(entry, nproc_per_node, start_method, daemon)
        return workers.join() if join else workers

    def is_current(self) -> bool:
        return self._mpi_ops._handle_map is self._epoch and self._is_initialized()

    def finalize(self) -> None:
        try:
            self._barrier(self.world())
        except RuntimeError as error:
            warnings.warn(f"Not every rank came to finalize(): {error}", stacklevel=3)
        self.abort()

    def abort(self) -> None:
        # The first rank that shuts down ends it for all: what the others wait for fails, and says so.
        self._hvd.shutdown()
        self.left_behind()

    def context_mark(self) -> object:
        return self._epoch

    @classmethod
    def keep_through_fork(cls) -> object | None:
        hvd = sys.modules["horovod.torch"]
        is_initialized = getattr(hvd, "is_initialized", None)
        if is_initialized is None or not is_initialized():
            return None
        atexit.unregister(hvd.mpi_ops._basics.shutdown)  # it would wait for Horovod's thread
        mark: object = hvd.mpi_ops._handle_map
        return mark

    def side_store(self) -> Store | None:
        return stores.launchers_store()

    def calls_begun(self) -> dict[str, int | None]:
        return dict(self._num_begun)

    def waited_for(self, frame: FrameType) -> WaitedFor:
        # Horovod begins no operation, a broadcast neither, before all ranks of its set have asked for it.
        group = flight_recorder.local_of(frame, "group")
        if isinstance(group, Group):  # of this package's own call
            return WaitedFor(group.ranks, self._tag(group), is_known=True, needs_all=True)
        process_set = flight_recorder.local_of(frame, "process_set")
        if isinstance(process_set, self._hvd.ProcessSet) and process_set.ranks:  # of an optimizer
            return WaitedFor(tuple(process_set.ranks), is_known=True, needs_all=True)
        if frame.f_globals.get("__name__") == "torch.autograd.graph":  # a backward pass, which computes
            return WaitedFor()
        if not self._changing_sets.acquire(timeout=_LOCK_SECONDS):  # it may be this change that is waited for
            return WaitedFor()
        try:
            sets = self._mpi_ops._basics._get_process_set_ids_and_ranks().values()
        finally:
            self._changing_sets.release()
        members = [ranks for ranks in sets if self._rank in ranks and len(ranks) > 1]
        in_each = set(range(self._world_size)).intersection(*members)
        return WaitedFor(tuple(in_each), is_known=True, needs_all=True)

    def is_broken(self) -> bool | None:
        return not self._is_running()

    # --- identity ------------------------------------------------------------------------------------

    def get_rank(self) -> int:
        return self._rank

    def get_world_size(self) -> int:
        return self._world_size

    def device(self) -> torch.device:
        fixed = self._fixed_device
        return fixed if fixed is not None else devices.current_accelerator()

    def backend(self) -> str:
        return "horovod"

    def known_local_rank(self) -> int:
        return self._local_rank

    def get_local_rank(self) -> int:
        return self._local_rank

    def known_topology(self) -> Topology | None:
        hvd = self._hvd
        # Horovod numbers nodes among those that have a process of the same local rank.
        if self._found_topology is None and self._mpi_ops.is_homogeneous():
            nodes = hvd.cross_size(), hvd.cross_rank()
            self._found_topology = Topology(self._local_rank, hvd.local_size(), *nodes)
        return self._found_topology

    # --- groups: process sets, which every rank of the world registers ---------------------------------

    def world_handle(self) -> Any:
        return self._hvd.global_process_set

    def _new_group(self, ranks: tuple[int, ...], **options: Any) -> Any:
        check_keywords("new_group", options, ())
        if not ranks:
            return self._hvd.ProcessSet([])  # never added: Horovod takes none without members
        with self._first_use("the process set", ranks):
            process_set_id = self._known_process_set(ranks)
            if process_set_id is not None:  # Horovod refuses to add it once more
                handle = self._hvd.ProcessSet(list(ranks))
                handle.process_set_id = process_set_id
            else:
                handle = self._new_process_set(ranks)
        # Handles of the same ranks are one process set. This number tells their calls apart. It is the same
        # on all of these ranks, because they make their groups in the same order.
        handle.ignite_dist_number = next(self._handle_numbers.setdefault(ranks, count(1)))
        return handle

    def _known_process_set(self, ranks: tuple[int, ...]) -> int | None:
        if len(ranks) == self._world_size:
            return 0
        with self._changing_sets:
            known = self._mpi_ops._basics._get_process_set_ids_and_ranks()
        return next((number for number, members in known.items() if tuple(members) == ranks), None)

    def _new_process_set(self, ranks: tuple[int, ...]) -> Any:
        hvd = self._hvd
        patience = threading.Timer(
            _PATIENCE_SECONDS, _logger.warning, (_WAITING_FOR_GROUP, self._rank, list(ranks))
        )
        patience.daemon = True
        patience.start()
        try:
            # Local: the set of all ranks is there already, so this raises what the addition of another would.
            self._mpi_ops._basics._add_process_set_impl(range(self._world_size))
            # Other threads may add other sets. So all ranks come first, then rank 0 says which set is next.
            self._tell_all("come", ranks)
            with self._changing_sets if self._rank == 0 else nullcontext():
                self._tell_all("next", ranks)
                with self._changing_sets:
                    return hvd.add_process_set(list(ranks))
        except ValueError as error:
            if _DYNAMIC_SETS not in str(error):
                raise RuntimeError(f"The group {list(ranks)} was not made: {error}") from error
            raise RuntimeError(
                f"Horovod was initialized without {_DYNAMIC_SETS}=1 and takes no new groups. Set it before "
                "hvd.init(), name the groups there (process_sets=...), or call idist.initialize('horovod'), "
                "which sets it."
            ) from error
        finally:
            patience.cancel()

    def _tell_all(self, what: str, ranks: tuple[int, ...]) -> None:
        """A barrier of all ranks that make this process set; the caller says why it may take long."""
        tensor = torch.zeros(1)
        submit = partial(self._hvd.allreduce_async_, tensor, op=self._hvd.Sum)
        self._call(submit, f"new_group.{ranks}.{what}", tensor, self.world(), is_told=True)

    def group_key(self, group: Group) -> str:
        number = self._number_of(group)
        if number == 0 and (group.handle is None or group.handle.process_set_id == 0):
            return ""
        return f"{super().group_key(group)}/{number}"

    def _tag(self, group: Group) -> str:
        """What the names of the group's calls begin with, the same on all of its ranks."""
        process_set_id = 0 if group.handle is None else group.handle.process_set_id
        return f"{process_set_id}.{self._number_of(group)}"

    def _number_of(self, group: Group) -> int:
        """Which of the handles of its ranks it is; 0 for the world and for the user's own process sets."""
        number: int = getattr(group.handle, "ignite_dist_number", 0)
        return number

    def _group_ranks(self, handle: Any) -> tuple[int, ...]:
        if handle is None:
            return self.world().ranks
        if not isinstance(handle, self._hvd.ProcessSet):
            raise ValueError(f"A group is a list of ranks or a horovod.torch.ProcessSet, got {handle!r}.")
        if not self.is_alive(handle):
            raise ValueError(_REMOVED % handle)
        return tuple(handle.ranks)

    def _is_alive(self, handle: Any) -> bool:
        return self.is_alive(handle)

    def is_alive(self, process_set: Any) -> bool:
        """See :class:`~ignite_dist.comp_models.horovod.rounds.Calls`, also for the next two."""
        number = process_set.process_set_id
        if number == 0 or process_set.ranks == []:
            return True
        if number is None or not self.is_current():
            return False
        # Another handle of these ranks may have been removed. Horovod then has no such number, or has given
        # it to other ranks.
        found = self._ranks_of_set(*[-1] * (self._world_size + 1))
        self._process_set_ranks(number, found)
        ranks = [*process_set.ranks, -1]
        return bool(found[: len(ranks)] == ranks)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        try:
            if not self._is_running():
                raise self._mpi_ops.HorovodInternalError(_SHUT_DOWN)
            yield
        except self._mpi_ops.HorovodInternalError as error:
            connections.raise_explained(error)

    def result(self, call: tuple[int, str], process_set: Any) -> Any:
        # The watchdog finds `process_set` in this frame: its ranks are waited for.
        handle, name = call
        self._wait(handle, name, _PATIENCE_SECONDS)
        return self._hvd.synchronize(handle)

    # --- tensor primitives -----------------------------------------------------------------------------

    def carries(self, collective: str, op: str | None, dtype: torch.dtype, device: torch.device) -> bool:
        on_gpu = device.type == "cuda" and self._takes_gpu
        if device.type != "cpu" and not on_gpu:
            return False
        if collective != "all_reduce":
            return dtype in _GATHERED
        return op in self._ops and dtype in _REDUCED

    # Horovod matches calls by name, and each process numbers those that have none for itself: a rank that is
    # not in a group would be out of step with the world for ever. And what has a name that it has seen before
    # is negotiated with a few bits. So: names, made of what is equal on all ranks.

    def _all_reduce(self, tensor: Tensor, op: str, group: Group) -> Tensor:
        if tensor.numel():
            submit = partial(self._hvd.allreduce_async_, tensor, op=self._ops[op])
            self._call(submit, f"all_reduce.{op}", tensor, group)
        return tensor

    def _all_gather(self, tensor: Tensor, group: Group, out: Tensor | None = None) -> Tensor:
        if not tensor.numel():
            return tensor.new_empty((len(group.ranks), *tensor.shape)) if out is None else out
        submit = partial(self._hvd.allgather_async, tensor.unsqueeze(0))
        with torch.inference_mode(
            False
        ):  # Horovod's own thread, outside of the mode, resizes what is made here
            rows = self._call(submit, "all_gather", tensor, group)
        return rows if out is None else out.copy_(rows)

    def _broadcast(self, tensor: Tensor, src: int, group: Group) -> Tensor:
        if tensor.numel():
            self._call(partial(self._hvd.broadcast_async_, tensor, src), f"broadcast.{src}", tensor, group)
        return tensor

    def _barrier(self, group: Group) -> None:
        # Not hvd.barrier(), which spins; see _wait.
        tensor = torch.zeros(1)
        self._call(partial(self._hvd.allreduce_async_, tensor, op=self._hvd.Sum), "barrier", tensor, group)

    def _call(
        self, submit: Callable[..., int], name: str, tensor: Tensor, group: Group, is_told: bool = False
    ) -> Tensor:
        """Submit a call under a name that all ranks give it, and wait for its result."""
        if not self._is_running():
            connections.raise_explained(self._mpi_ops.HorovodInternalError(_SHUT_DOWN))
        process_set = self._hvd.global_process_set if group.handle is None else group.handle
        if process_set.process_set_id == 0:  # ADASUM takes no copy of the set of all ranks
            process_set = self._hvd.global_process_set
        layout = f"{tensor.dtype}.{tuple(tensor.shape)}"
        tag = self._tag(group)
        full_name = f"ignite_dist.{tag}.{name}.{layout}"
        try:
            handle = submit(name=full_name, process_set=process_set)
            self._num_begun[tag] = self._num_begun.get(tag, 0) + 1
            self._wait(handle, full_name, inf if is_told else _PATIENCE_SECONDS)
            result: Tensor = self._hvd.synchronize(handle)
        except ValueError as error:  # the only one that is not about arguments, which were checked above
            raise RuntimeError(
                "Such a call is under way in this process already: of another thread, or interrupted before "
                "its end. Collectives of one group are called one after the other; give each thread a group "
                f"of its own, by new_group. ({error})"
            ) from error
        except self._mpi_ops.HorovodInternalError as error:
            connections.raise_explained(error)
        return result

    def _wait(self, handle: int, name: str, patience: float) -> None:
        # hvd.synchronize() alone would spin to the end, which keeps a core from the thread that does the work
        # (three ranks on two cores: 4 bytes in 9 ms instead of 2), and would not let a Ctrl-C through.
        start = time.perf_counter()
        while not self._hvd.poll(handle):
            waited = time.perf_counter() - start
            if waited < self._spin_seconds:
                os.sched_yield()
                continue
            if not self._is_running() and not self._hvd.poll(handle):
                raise self._mpi_ops.HorovodInternalError(_SHUT_DOWN)
            if waited > patience:
                patience = inf
                _logger.warning(_WAITING, self._rank, waited, name)
            time.sleep(_SLEEP_SECONDS)

    def _is_running(self) -> bool:
        # Another rank may just have shut Horovod down. While its thread then gives up the calls it has, it
        # holds a lock that the next call waits for, and may need the GIL, which that call does not let go of;
        # and a call that comes as the thread ends is answered by nobody. The ranks of the world's process set
        # are asked for under that lock too, but without the GIL, and are an error once the thread is through.
        # (A moment is left between this look and the call. It is raw Horovod's.)
        return self._process_set_ranks(0, self._found_ranks) >= 0

    # --- adaptation ------------------------------------------------------------------------------------

    def wrap_model(self, model: Module, sync_bn: bool = False, **kwargs: Any) -> Module:
        if sync_bn and self.device().type == "cpu":
            warnings.warn(
                "sync_bn=True leaves BatchNorm as it is: Horovod's SyncBatchNorm needs a GPU.", stacklevel=3
            )
        elif sync_bn:
            return _with_sync_bn(model, self._hvd.SyncBatchNorm)
        return model

    def wrap_optimizer(self, optimizer: Optimizer, **kwargs: Any) -> Optimizer:
        from ignite_dist.comp_models.horovod import averaging_optimizer

        if self._exchange is None:
            self._exchange = averaging_optimizer.Exchange(self)
        name = f"optimizer{next(self._optimizer_numbers)}"
        wrapped = averaging_optimizer.distribute(optimizer, name, self._exchange, **kwargs)
        if self._world_size > 1:
            sent, failure = b"", None
            if self._rank == 0:
                try:
                    sent = averaging_optimizer.state_as_bytes(wrapped)
                except Exception as error:  # which the others hear of
                    failure = error
            received = self.broadcast_bytes(sent, 0, self.world())
            if failure is not None:
                raise failure
            if not received:
                raise RuntimeError("Rank 0 could not send the state of its optimizer; it says why.")
            if self._rank != 0:
                averaging_optimizer.load_state(wrapped, received, self.device())
        return wrapped

    def accumulate_locally(
        self, model: Module, optimizers: Sequence[Optimizer]
    ) -> AbstractContextManager[None]:
        from ignite_dist.comp_models.horovod import averaging_optimizer

        if not optimizers and self._world_size > 1 and any(one.requires_grad for one in model.parameters()):
            raise ValueError(NO_OPTIMIZER)
        return averaging_optimizer.accumulating(optimizers)

    def average_in_block(
        self, model: Module, optimizers: Sequence[Optimizer]
    ) -> AbstractContextManager[None]:
        from ignite_dist.comp_models.horovod import averaging_optimizer

        return averaging_optimizer.averaging_in_block(optimizers)

    def gradient_group(self, model: Module, optimizers: Sequence[Optimizer]) -> Group:
        sets = [getattr(optimizer, "process_set", None) for optimizer in optimizers]
        groups = {tuple(one.ranks): one for one in sets if one is not None}
        if len(groups) > 1:
            raise ValueError(
                "The model's optimizers average over different ranks, "
                f"{[list(ranks) for ranks in groups]}, as their process_set= says."
            )
        for ranks, process_set in groups.items():
            return self.world() if len(ranks) == self._world_size else Group(process_set, ranks)
        return self.world()

    def check_forced(self, model: Module, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            op, process_set = getattr(optimizer, "op", None), getattr(optimizer, "process_set", None)
            if op not in (None, self._hvd.Average) or getattr(process_set, "process_set_id", 0) != 0:
                raise ValueError(
                    "FORCED_SYNC takes the mean over all ranks; this optimizer has an op= or process_set= "
                    "of its own: use another strategy."
                )

    @contextmanager
    def join(  # type: ignore[override]  # of the options Horovod has none
        self,
        model: Module,
        optimizer: Optimizer | None,
        divide_by_initial_world_size: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[list[int]]:
        if not divide_by_initial_world_size or throw_on_early_termination:
            raise ValueError(
                "Horovod's join() divides by the number of all ranks and waits until all have come: leave "
                "divide_by_initial_world_size and throw_on_early_termination as they are."
            )
        if len(self.gradient_group(model, [] if optimizer is None else [optimizer]).ranks) < self._world_size:
            raise ValueError("Horovod's join() is for all ranks, and this optimizer has a process_set=.")
        last: list[int] = []
        yield last
        last.append(self._hvd.join())

    def reduce_gradients(self, optimizer: Optimizer) -> None:
        from ignite_dist.comp_models.horovod import averaging_optimizer

        averaging_optimizer.synchronize(optimizer)


# --- adaptation --------------------------------------------------------------------------------------


def _with_sync_bn(module: Module, sync_batch_norm: type[Module]) -> Module:
    """``module`` with each of its BatchNorm modules replaced, parameters and statistics kept."""
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        names = ("num_features", "eps", "momentum", "affine", "track_running_stats")
        made = sync_batch_norm(*(getattr(module, name) for name in names))
        kept = {name: vars(module)[name] for name in ("_parameters", "_buffers", "training")}
        vars(made).update(kept)
        return made
    for name, child in module.named_children():
        setattr(module, name, _with_sync_bn(child, sync_batch_norm))
    return module


# --- initialize --------------------------------------------------------------------------------------


def _check_launcher(hvd: Any) -> None:
    """Refuse the launchers whose ranks Horovod would not see: each process would be a world of one."""
    if "HOROVOD_SIZE" in os.environ or hvd.mpi_built():
        return
    environment = environments.current()
    if environment.world_size > 1:
        raise EnvironmentVariablesError(
            f"The environment says rank {environment.rank} of {environment.world_size}, but not in the "
            "variables that Horovod reads (HOROVOD_RANK, HOROVOD_SIZE, ...). Start the script with "
            f"`horovodrun -np {environment.world_size} python script.py`, or use idist.spawn('horovod', ...)."
        )


def _check_comm(hvd: Any, comm: Any) -> None:
    """Refuse a part of the ranks where Horovod would take all of them without a word."""
    if not isinstance(comm, Sequence) or hvd.mpi_built():
        return
    size = int(os.environ.get("HOROVOD_SIZE", "1"))
    if comm and sorted(comm) != list(range(size)):
        raise ValueError(
            f"comm={list(comm)} leaves out some of the job's ranks, [0, {size}), and this Horovod was built "
            "without MPI, which alone can do that. Leave comm out, and pass group= to the collectives."
        )
