"""XLA through PJRT: TPUs, and the CPU to try things out.

What knows torch_xla is here and in the three ``xla_*.py`` beside it, which only this imports. Ranks
are replicas, and several of them may be threads of one process: which one is calling is asked each time.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import HashStore, Store, distributed_c10d
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import Dataset

from ignite_dist.arguments import check_counts, check_keywords
from ignite_dist.comp_models.base import ComputationModel, Group
from ignite_dist.comp_models.topology import Topology
from ignite_dist.comp_models.xla import dtype_views, replicas
from ignite_dist.errors import EnvironmentVariablesError, RankFailedError
from ignite_dist.gradients import parameters_of
from ignite_dist.samplers import loader_class
from ignite_dist.values import serialization

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["XlaModel"]

_OPS = {"SUM": "sum", "PRODUCT": "mul", "MIN": "min", "MAX": "max"}
_REDUCED = frozenset(
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
# PJRT's CPU has no all-reduce for bfloat16. TPUs have one, and none for float64, which they emulate: "While
# rewriting computation to not contain X64 element types, XLA encountered ... all-reduce".
_REDUCED_BY_TPUS = _REDUCED - {torch.float64} | {torch.bfloat16}

# Replicas of one process wait for each other by the compiled module, and two that compile the same graph at
# the same time get two: one after the other, the second finds what the first has compiled.
_compiling = threading.Lock()

_GET = (
    "It is no longer developed and has wheels for Python 3.10 to 3.13: "
    "`pip install torch==2.9.0 torch_xla==2.9.0` in an environment of its own, or `make xla` in a checkout."
)


def _installed_for() -> str | None:
    """The torch release that the installed torch_xla was built for ("2.9"); None if it is not installed."""
    try:
        return ".".join(metadata.version("torch_xla").split(".")[:2]) if find_spec("torch_xla") else None
    except metadata.PackageNotFoundError:
        return None


def _available_backends() -> tuple[str, ...]:
    version = _installed_for()
    return ("xla-tpu",) if version is not None and torch.__version__.startswith(f"{version}.") else ()


class XlaModel(ComputationModel):
    """The model of an initialized XLA runtime. One object for all replicas of this process.

    The runtime cannot be ended, so which replicas use it, and which were told to, is noted here.
    """

    name: ClassVar[str] = "xla-dist"
    available_backends: ClassVar[tuple[str, ...]] = _available_backends()
    library: ClassVar[str] = "torch_xla"
    groups_need_everyone: ClassVar[bool] = True

    _of_this_process: ClassVar[XlaModel | None] = None
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        super().__init__()
        import torch_xla
        from torch_xla import runtime
        from torch_xla.core import xla_model

        self._xla, self._runtime, self._xm = torch_xla, runtime, xla_model
        self._world_size: int = runtime.world_size()
        self._meeting = replicas.meeting_here()
        self._devices: dict[int, torch.device] = {}
        self._real_names = dict(zip(torch_xla.devices(), xla_model.xla_real_devices(), strict=True))
        self._topologies: dict[int, Topology] = {}
        self._reduced = _REDUCED_BY_TPUS if runtime.device_type() == "TPU" else _REDUCED
        self._side_store = HashStore()  # for replicas that all are in this process
        self._initialized: set[int] = set()
        self._views = dtype_views.lower_dtype_views()
        if len(self._real_names) > 1:
            # torch_xla counts each operation that it leaves to the CPU, in a table without a lock, and item()
            # is one: two replicas whose first it is at the same time would end the process by SIGSEGV. So it
            # happens here, once (torch_xla/csrc/aten_fallback.cpp). Data goes there and back; nothing is run.
            torch.tensor(0).to(torch_xla.device()).item()

    # --- lifecycle ---------------------------------------------------------------------------------

    @classmethod
    def create_from_context(cls) -> Self | None:
        xlac = getattr(sys.modules["torch_xla"], "_XLAC", None)  # not there while it is being imported
        if xlac is None or not xlac._xla_runtime_is_initialized():
            return None
        model = cls._live()
        return None if model.get_rank() in model._meeting.ended else model

    @classmethod
    def _live(cls) -> Self:
        with cls._making:
            if cls._of_this_process is None:
                cls._of_this_process = cls()
            return cls._of_this_process  # type: ignore[return-value]

    @classmethod
    def how_to_get(cls, backend: str) -> str | None:
        if backend != "xla-tpu":
            return None
        version = _installed_for()
        if version is None:
            return f"torch_xla is not installed. {_GET}"
        return f"the installed torch_xla needs torch {version}, and this is {torch.__version__}. {_GET}"

    @classmethod
    def create_from_backend(cls, backend: str, **kwargs: Any) -> Self:
        check_keywords("initialize", kwargs, ())
        _check_pjrt_device()
        import torch_xla

        torch_xla.device()  # initializes the runtime
        model = cls._live()
        rank = model.get_rank()
        model._initialized.add(rank)
        model._meeting.enter(rank)
        return model

    @classmethod
    def check_spawn(cls, *, nproc_per_node: int, nnodes: int | None = None, **kwargs: Any) -> None:
        check_counts(nproc_per_node=nproc_per_node, nnodes=1 if nnodes is None else nnodes)
        _check_pjrt_device()
        if _is_runtime_initialized():
            raise RuntimeError(
                "This process has used an XLA device, and PJRT gives the devices of a host to one process at "
                "a time. Start the replicas before any XLA device is asked for, or from another process."
            )
        num_processes, num_replicas = replicas.counts_here()
        count = num_processes * num_replicas
        if nproc_per_node in (1, count):
            return
        device_type = os.environ["PJRT_DEVICE"]
        hint = f" Set CPU_NUM_DEVICES={nproc_per_node}." if device_type == "CPU" else ""
        raise ValueError(
            f"nproc_per_node={nproc_per_node}, but this host has {count} XLA device(s) "
            f"(PJRT_DEVICE={device_type}), and PJRT runs one replica or one on each device.{hint}"
        )

    @classmethod
    def spawn(  # type: ignore[override]  # the keywords are each backend's own
        cls,
        entry: Callable[..., Any],
        *,
        backend: str,
        nproc_per_node: int,
        nnodes: int | None = None,
        start_method: str | None = None,
        join: bool = True,
        daemon: bool = False,
    ) -> Any:
        """See ``idist.spawn``; PJRT itself finds the other hosts of a pod, each of which runs this."""
        cls.check_spawn(nproc_per_node=nproc_per_node, nnodes=nnodes)
        workers = replicas.start(entry, nproc_per_node, start_method, daemon)
        return workers.join() if join else workers

    def is_current(self) -> bool:
        ended = self._meeting.ended
        if ended and self.get_rank() in ended:
            return False
        # Who has an XLA device at hand may still make a context of another kind.
        return self._world_size > 1 or distributed_c10d._world.default_pg is None or bool(self._initialized)

    def gives_way_to(self, model: type[ComputationModel]) -> bool:
        if self.get_rank() in self._initialized:
            return False
        return isinstance(self, model) or self._world_size == 1

    def meet_at_end(self) -> None:
        pass  # replicas see it where they meet

    def finalize(self) -> None:
        try:
            self._meet(replicas.END)
        except RankFailedError as error:
            warnings.warn(f"Not every rank came to finalize(): {error}", stacklevel=3)
        self._end()

    def context_mark(self) -> object:
        return XlaModel

    @classmethod
    def keep_through_fork(cls) -> object | None:
        xlac = getattr(sys.modules["torch_xla"], "_XLAC", None)
        return None if xlac is None or not xlac._xla_runtime_is_initialized() else XlaModel

    def abort(self) -> None:
        kind, error, _ = sys.exc_info()
        text = "".join(traceback.format_exception(error)) if error else ""
        self._meeting.fail(self.get_rank(), kind.__name__ if kind else "nothing", text)
        self._end()

    def _end(self) -> None:
        rank = self.get_rank()
        self._meeting.ended.add(rank)
        self._initialized.discard(rank)
        if len(self._meeting.ended) == self._meeting.size:
            self.stop_watching()

    # --- identity ------------------------------------------------------------------------------------

    def get_rank(self) -> int:
        return self._runtime.global_ordinal() if self._world_size > 1 else 0

    def get_world_size(self) -> int:
        return self._world_size

    def device(self) -> torch.device:
        rank = self.get_rank()
        device = self._devices.get(rank)
        if device is None:
            device = self._devices[rank] = self._xla.device()
        return device

    def backend(self) -> str:
        return "xla-tpu"

    def get_local_rank(self) -> int:
        return self.known_topology().local_rank

    def known_local_rank(self) -> int:
        return self.known_topology().local_rank

    def known_topology(self) -> Topology:
        rank = self.get_rank()
        found = self._topologies.get(rank)
        if found is None:
            if self._world_size == 1:
                found = Topology(local_rank=0, nproc_per_node=1, nnodes=1, node_rank=0)
            else:
                runtime, on_node = self._runtime, self._runtime.local_device_count()
                nnodes = self._world_size // on_node
                found = Topology(runtime.local_ordinal(), on_node, nnodes, runtime.host_index())
            self._topologies[rank] = found
        return found

    def side_store(self) -> Store | None:
        return self._side_store if self._meeting.size == self._world_size else None

    def ranks_in_process(self) -> int:
        return self._meeting.size

    # --- groups: what a handle is for other backends is just the ranks here ------------------------------

    def _new_group(self, ranks: tuple[int, ...], **options: Any) -> Any:
        check_keywords("new_group", options, ())
        return ranks

    def _group_ranks(self, handle: Any) -> tuple[int, ...]:
        raise ValueError(f"A group is a list of ranks or what new_group gave, got {handle!r}.")

    # --- tensor primitives -----------------------------------------------------------------------------

    def carries(self, collective: str, op: str | None, dtype: torch.dtype, device: torch.device) -> bool:
        if device.type != "xla":
            return device.type == "cpu" and self._world_size == 1
        return collective != "all_reduce" or (op in _OPS and dtype in self._reduced)

    def _all_reduce(self, tensor: Tensor, op: str, group: Group) -> Tensor:
        if tensor.numel() and tensor.device.type == "xla" and not _is_one_of_more(group):
            groups = None
            if group.handle is not None:  # XLA's are a partition of the world: each of the others is alone
                others = set(range(self._world_size)).difference(group.ranks)
                groups = [list(group.ranks), *([rank] for rank in sorted(others))]
            if self._meeting.size == 1 and not tensor._is_view() and not tensor.is_inference():
                # One node of the graph less, but torch_xla would leave the base of a view as it was.
                self._xm.all_reduce(_OPS[op], [tensor], groups=groups)
                return tensor
            reduced = self._run(
                _describe(f"all_reduce {op}", tensor, group),
                tensor,
                lambda sent: self._xm.all_reduce(_OPS[op], sent, groups=groups),
            )
            tensor.copy_(reduced)
        return tensor

    def _all_gather(self, tensor: Tensor, group: Group, out: Tensor | None = None) -> Tensor:
        if len(group.ranks) == 1 or not tensor.numel():
            rows = tensor.unsqueeze(0).expand(len(group.ranks), *tensor.shape).clone()
        else:
            # Groups of a partition would have to be of one size for this.
            everyones = self._run(
                _describe("all_gather", tensor, group),
                dtype_views.bits(tensor).unsqueeze(0),
                lambda sent: self._xm.all_gather(sent, pin_layout=False),
            )
            bits = everyones if group.handle is None else everyones[list(group.ranks)]
            rows = dtype_views.from_bits(bits, tensor.dtype).view(len(group.ranks), *tensor.shape)
        return rows if out is None else out.copy_(rows)

    def _broadcast(self, tensor: Tensor, src: int, group: Group) -> Tensor:
        if len(group.ranks) == 1 or not tensor.numel():
            return tensor
        # A sum of which all but one are zero, and of ints, so that no bit is lost. Which one is data: a graph
        # with the rank in it would be another one on each replica, and they could not meet in it.
        bits = dtype_views.bits(tensor)
        is_src = torch.tensor([int(self.get_rank() == src)], dtype=bits.dtype).to(tensor.device)
        received = self._run(
            _describe(f"broadcast from rank {src}", tensor, group),
            bits * is_src,
            lambda sent: self._xm.all_reduce("sum", sent),
        )
        return tensor.copy_(dtype_views.from_bits(received, tensor.dtype).view(tensor.shape))

    def _barrier(self, group: Group) -> None:
        if not _is_one_of_more(group):
            self._meet(f"barrier of ranks {list(group.ranks)}")

    def _meet(self, call: str) -> None:
        self._meeting.meet(self.get_rank(), call)
        if self._meeting.size < self._world_size:  # and the other processes
            self._all_reduce(torch.zeros(1, device=self.device()), "SUM", self.world()).item()

    def _run(self, call: str, tensor: Tensor, collective: Callable[[Tensor], Tensor]) -> Tensor:
        """The result of a collective: lazy where a replica has the process to itself, else there already.

        Replicas of one process have to execute the same graph. So what goes in is computed first, all of them
        meet, and what comes out is computed before anything of the user's can become a part of that graph.
        """
        if self._meeting.size == 1:
            return collective(tensor)
        if tensor.device != self.device():
            raise ValueError(
                f"The tensor is on {tensor.device}, and this replica's device is {self.device()}: see "
                "idist.device()."
            )
        self._xm.unlazy([tensor])
        self._meeting.meet(self.get_rank(), call)
        result = collective(tensor)  # not in place: PJRT's CPU hangs where an input gives its memory up
        with _compiling:
            self._xla._XLAC._xla_sync_multi([result], [], wait=False)
        # Each collective depends on the one before until this is taken back; what has been computed need not.
        self._xla._XLAC._set_all_reduce_token(str(tensor.device), None)
        # Calls under way hold threads of a pool, and with enough of them nobody can complete one. (Of this
        # device: to wait for all of them would be to wait for those who wait for us.)
        self._xm.wait_device_ops([self._real_names[tensor.device]])
        return result

    # --- adaptation ------------------------------------------------------------------------------------

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self._xm.set_rng_state(seed, str(self.device()))

    def wrap_model(self, model: Module, sync_bn: bool = False, **kwargs: Any) -> Module:
        if sync_bn:
            warnings.warn("sync_bn=True leaves BatchNorm as it is with XLA.", stacklevel=3)
        return model

    def wrap_optimizer(self, optimizer: Optimizer, **kwargs: Any) -> Optimizer:
        if all(parameter.device.type != "xla" for parameter in parameters_of(optimizer)):
            raise ValueError(
                "None of the optimizer's parameters is on an XLA device. Moved there, a model has new ones: "
                "make the optimizer from the parameters of what auto_model has returned."
            )
        return optimizer

    def computes_lazily(self) -> bool:
        return self._meeting.size == 1

    def make_dataloader(self, dataset: Dataset[Any], **kwargs: Any) -> Any:
        from ignite_dist.comp_models.xla.loader import DeviceLoader

        if self._meeting.size > 1:  # torch's own draws in between would be another replica's, too
            seed = torch.initial_seed() + self.get_rank()
            kwargs.setdefault("generator", torch.Generator().manual_seed(seed))
        return DeviceLoader(loader_class(dataset, None)(dataset, **kwargs), self.device())


# --- calls -------------------------------------------------------------------------------------------


def _is_one_of_more(group: Group) -> bool:
    """Whether it is a group of one rank, which needs nobody; not so a world of one, which may be asked to."""
    return group.handle is not None and len(group.ranks) == 1


def _describe(call: str, tensor: Tensor, group: Group) -> str:
    """A collective as its caller knows it. What is not a tensor begins with one header."""
    is_header = tensor.dtype is torch.uint8 and tuple(tensor.shape) == (serialization.HEADER_BYTES,)
    value = "an object or a number" if is_header else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
    return f"{call} of {value}" + (f" in the group {list(group.ranks)}" if group.handle is not None else "")


# --- this host ---------------------------------------------------------------------------------------


def _is_runtime_initialized() -> bool:
    torch_xla = sys.modules.get("torch_xla")
    return torch_xla is not None and torch_xla._XLAC._xla_runtime_is_initialized()


def _check_pjrt_device() -> None:
    """Refuse a device that is not there, and the CPU where nobody asked for it: torch_xla's last resort."""
    if "PJRT_DEVICE" in os.environ:
        replicas.counts_here()
        return
    import torch_xla  # noqa: F401  # looks for a TPU, or what else a plugin brings, and sets PJRT_DEVICE

    if os.environ.get("PJRT_DEVICE", "CPU") == "CPU":
        os.environ.pop("PJRT_DEVICE", None)
        raise EnvironmentVariablesError(
            "PJRT_DEVICE is not set, and torch_xla finds no TPU here. Set PJRT_DEVICE=CPU to run on the CPU "
            "(and CPU_NUM_DEVICES=2 for two replicas)."
        )
