"""One process without peers: a world of one rank, with the same types and errors as any other world."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import get_worker_info

from ignite_dist import environments
from ignite_dist.comp_models.base import ComputationModel, weak_method
from ignite_dist.comp_models.groups import Groups
from ignite_dist.comp_models.objects import LocalObjects
from ignite_dist.comp_models.topology import Topology
from ignite_dist.comp_models.training import Training
from ignite_dist.comp_models.transport import CollectiveKind, Group, Sizes, Transport
from ignite_dist.comp_models.work import Completed, Work
from ignite_dist.environments import devices
from ignite_dist.errors import EnvironmentVariablesError
from ignite_dist.internals._torch import WORLD_STATE
from ignite_dist.internals.call_sites import warn_user

if TYPE_CHECKING:
    from typing_extensions import Self


class SerialModel(ComputationModel):
    """The model of a process without any distributed context.

    Args:
        num_modules: the number of modules that were imported when no library had a context. Until another
            module is imported, only torch.distributed has to be checked.
    """

    name: ClassVar[str] = "serial"
    available_backends: ClassVar[tuple[str, ...]] = ()
    library: ClassVar[str] = "torch"

    def __init__(self, num_modules: int = -1) -> None:
        super().__init__(_LocalTransport())
        self._num_modules = num_modules
        self._device: torch.device | None = None
        self.groups = _LocalGroups(self.transport, self.get_world_size())
        self.objects = LocalObjects(self.transport, weak_method(self.get_rank), weak_method(self.device))
        self.training = _LocalTraining(self)
        self._found_topology = Topology(local_rank=0, nproc_per_node=1, nnodes=1, node_rank=0)

    @classmethod
    def find(cls) -> Self | None:
        return None  # the serial model is the default when no other model has a context

    @classmethod
    def open(cls, backend: str, **options: Any) -> Self:
        raise ValueError(f"A serial context has no backend; got {backend!r}.")

    def is_current(self) -> bool:
        # Every get_rank() of a serial script runs this method. Reading default_pg takes 40% less time than
        # torch.distributed.is_initialized(). A library that is not imported cannot have made a context.
        return WORLD_STATE.default_pg is None and len(sys.modules) == self._num_modules

    def is_current_by_guards(self) -> bool:
        # sys.modules is not checked: with a guard on it, torch would compile again after each import.
        return WORLD_STATE.default_pg is None

    def can_be_replaced_by(self, model: type[ComputationModel]) -> bool:
        return True

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def get_rank(self) -> int:
        return 0

    def get_world_size(self) -> int:
        return 1

    def get_local_rank(self) -> int:
        return 0

    def device(self) -> torch.device:
        if self._device is None:
            self._device = devices.accelerator() or torch.device("cpu")
        return self._device

    def backend(self) -> str | None:
        return None


class _LocalTransport(Transport):
    """Collectives of one rank. The results are the inputs."""

    is_synchronous: ClassVar[bool] = True

    def supports(
        self, kind: CollectiveKind, op: str | None, dtype: torch.dtype, device: torch.device
    ) -> bool:
        return kind in get_args(CollectiveKind)

    def all_reduce(self, tensor: Tensor, op: str, group: Group) -> Work:
        return Completed(tensor)

    def reduce_exactly(self, tensor: Tensor, op: str, group: Group) -> Work:
        return Completed(tensor)

    def all_gather(self, tensor: Tensor, group: Group, out: Tensor | None = None) -> Work:
        rows = tensor.unsqueeze(0)
        return Completed(rows.clone() if out is None else out.copy_(rows))

    def broadcast(self, tensor: Tensor, src: int, group: Group) -> Work:
        return Completed(tensor)

    def all_to_all(self, tensor: Tensor, group: Group, out: Tensor, sizes: Sizes | None) -> Work:
        return Completed(out.copy_(tensor))

    def reduce_scatter(self, tensor: Tensor, op: str, group: Group, out: Tensor) -> Work:
        return Completed(out.copy_(tensor[0]))

    def barrier(self, group: Group) -> Work:
        return Completed(None)

    def world_handle(self) -> Any:
        return (0,)

    def make_group(self, ranks: tuple[int, ...], **options: Any) -> Any:
        return ranks

    def ranks_of(self, handle: Any) -> tuple[int, ...]:
        if handle == (0,) and isinstance(handle, tuple):
            return (0,)
        raise ValueError(
            f"A group of a serial context is a list of ranks or a result of new_group, got {handle!r}."
        )


class _LocalGroups(Groups):
    """The groups of one rank. The first use checks if a launcher has started several processes."""

    _launch_checked = False

    def resolve(self, group: Any) -> Group:
        if not self._launch_checked:
            _check_launch()
            self._launch_checked = True
        return super().resolve(group)


class _LocalTraining(Training):
    def wrap_model(
        self,
        model: Module,
        sync_bn: bool = False,
        wrapper: Any = None,
        comm_hook: Any = None,
        buffer_hook: Any = None,
        **kwargs: Any,
    ) -> Module:
        if torch.cuda.device_count() > 1 and self.context.device().type == "cuda":
            return torch.nn.parallel.DataParallel(model, **kwargs)
        return model

    def shard_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return optimizer

    def join(
        self, model: Module, optimizer: Optimizer | None, **kwargs: Any
    ) -> AbstractContextManager[list[int]]:
        return nullcontext([])


class PollingSerialModel(SerialModel):
    """The serial model when imported libraries may still make a context. Each check polls these libraries.

    Args:
        num_modules: as for :class:`SerialModel`.
        others: the computation models of the imported libraries.
    """

    def __init__(self, num_modules: int, others: Sequence[type[ComputationModel]]) -> None:
        super().__init__(num_modules)
        self._others = others

    def is_current_by_guards(self) -> bool:
        return False

    def is_current(self) -> bool:
        return super().is_current() and all(other.find() is None for other in self._others)


_warned = False


def _check_launch() -> None:
    """Warn once if a launcher started several processes and each of them runs as a world of one.

    Raises:
        RuntimeError: this is a DataLoader worker, and its main process is one of several ranks.
    """
    global _warned
    is_worker = get_worker_info() is not None
    if _warned and not is_worker:
        return
    try:
        environment = environments.current()
    except EnvironmentVariablesError:
        return  # initialize() reports the error, if it is called
    if environment.world_size == 1:
        return
    if is_worker:
        raise RuntimeError(
            "This DataLoader worker has no context, but its main process is one of "
            f"{environment.world_size} ranks ({environment.reason}). Call collectives in the main process, "
            "and pass values that a worker needs, such as the rank, to the data set."
        )
    _warned = True
    warn_user(
        f"This is one of {environment.world_size} processes ({environment.reason}), but it runs as a "
        "world of one: no distributed context was made. Call idist.initialize(backend) first, or use "
        "idist.Parallel(backend=...).",
    )
