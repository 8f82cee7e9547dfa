"""The Horovod backend.

Methods import Horovod, and the modules that only users of Horovod need.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ignite_dist import environments
from ignite_dist.comp_models.base import ProcessModel, weak_method
from ignite_dist.comp_models.horovod import _horovod, transport
from ignite_dist.comp_models.horovod._horovod import init_mark_of
from ignite_dist.comp_models.horovod.launcher import HorovodLauncher
from ignite_dist.comp_models.horovod.one_machine import HorovodOnOneMachine
from ignite_dist.comp_models.horovod.training import HorovodTraining
from ignite_dist.comp_models.shared_memory.opening import check_variable
from ignite_dist.comp_models.topology import Topology
from ignite_dist.environments import devices, own_variables
from ignite_dist.errors import EnvironmentVariablesError
from ignite_dist.internals.arguments import check_keywords

if TYPE_CHECKING:
    from typing_extensions import Self

_DYNAMIC_SETS = transport.DYNAMIC_SETS


def _available_backends() -> tuple[str, ...]:
    """``("horovod",)`` if Horovod's torch extension is installed. Does not import Horovod."""
    spec = find_spec("horovod")
    folders = spec.submodule_search_locations if spec is not None else None
    built = any(any(Path(folder, "torch").glob("mpi_lib_v2.*")) for folder in folders or ())
    return ("horovod",) if built else ()


class HorovodModel(ProcessModel):
    """The Horovod backend between ``hvd.init()`` and ``hvd.shutdown()``.

    Args:
        undo: see :class:`ComputationModel`.
    """

    name: ClassVar[str] = "horovod-dist"
    available_backends: ClassVar[tuple[str, ...]] = _available_backends()
    library: ClassVar[str] = "horovod.torch"
    launcher: ClassVar[type[HorovodLauncher]] = HorovodLauncher
    transport: HorovodOnOneMachine

    def __init__(self, undo: Callable[[], None] | None = None) -> None:
        import horovod.torch as hvd

        self._hvd = hvd
        self._is_initialized = hvd.is_initialized
        # hvd.init() replaces this object. Nothing else shows a shutdown() followed by another init().
        self._mpi_ops = hvd.mpi_ops
        self._init_mark = init_mark_of(hvd.mpi_ops)
        self._rank: int = hvd.rank()
        self._world_size: int = hvd.size()
        self._local_rank: int = hvd.local_rank()
        if not torch.cuda.device_count():
            self._fixed_device = torch.device("cpu")
        else:
            self._fixed_device = devices.current_accelerator() if undo is not None else None
        super().__init__(HorovodOnOneMachine(hvd, weak_method(self.is_current)), undo)
        self.training = HorovodTraining(self, hvd, self.transport)

    # --- lifecycle ---------------------------------------------------------------------------------

    @classmethod
    def find(cls) -> Self | None:
        hvd = sys.modules["horovod.torch"]
        is_initialized = getattr(hvd, "is_initialized", None)  # missing if the extension was not built
        return cls() if is_initialized is not None and is_initialized() else None

    @classmethod
    def unavailable_reason(cls, backend: str) -> str | None:
        if backend != "horovod":
            return None
        found = "was built without its torch extension" if find_spec("horovod") else "is not installed"
        return (
            f"Horovod {found}. The last release of Horovod needs one edit to build with a current torch: "
            "run `make horovod` in a checkout, or see docs/backends/horovod.md."
        )

    @classmethod
    def open(cls, backend: str, *, comm: Any = None, **kwargs: Any) -> Self:
        """``comm`` is passed to ``hvd.init``: None, a list of ranks, or an ``mpi4py`` communicator."""
        check_keywords("initialize", kwargs, ("comm",))
        import horovod.torch as hvd

        _check_launcher(hvd)
        _check_comm(hvd, comm)
        with ExitStack() as undo:
            if _DYNAMIC_SETS not in os.environ:  # hvd.init() reads this variable; new groups need it
                os.environ[_DYNAMIC_SETS] = "1"
                undo.callback(os.environ.pop, _DYNAMIC_SETS, None)
            check_variable()  # before anything is to be undone
            hvd.init(comm)
            undo.callback(own_variables.restore)
            own_variables.set_missing(
                {"RANK": hvd.rank(), "WORLD_SIZE": hvd.size(), "LOCAL_RANK": hvd.local_rank()}
            )
            if count := torch.cuda.device_count():
                torch.cuda.set_device(hvd.local_rank() % count)
            return cls(undo.pop_all().close)

    def is_current(self) -> bool:
        return init_mark_of(self._mpi_ops) is self._init_mark and self._is_initialized()

    def close(self) -> None:
        self.transport.forget()
        self._hvd.shutdown()

    def abort(self) -> None:
        # The first shutdown() ends Horovod on all ranks: the other ranks' pending calls raise.
        self.transport.forget()
        self._hvd.shutdown()

    def forget(self) -> None:
        self.transport.forget()
        super().forget()

    def context_mark(self) -> object:
        return self._init_mark

    @classmethod
    def prepare_forked_child(cls) -> object | None:
        hvd = sys.modules["horovod.torch"]
        is_initialized = getattr(hvd, "is_initialized", None)
        if is_initialized is None or not is_initialized():
            return None
        _horovod.stop_waiting_at_exit(hvd.mpi_ops)  # the child's shutdown() would wait for Horovod's thread
        return init_mark_of(hvd.mpi_ops)

    # --- identity ------------------------------------------------------------------------------------

    def backend(self) -> str:
        return "horovod"

    def known_local_rank(self) -> int:
        return self._local_rank

    def get_local_rank(self) -> int:
        return self._local_rank

    def known_topology(self) -> Topology | None:
        hvd = self._hvd
        # cross_size() counts only the nodes that have a rank with this local rank.
        if self._found_topology is None and self._mpi_ops.is_homogeneous():
            nodes = hvd.cross_size(), hvd.cross_rank()
            self._found_topology = Topology(self._local_rank, hvd.local_size(), *nodes)
        return self._found_topology


# --- initialize --------------------------------------------------------------------------------------


def _check_launcher(hvd: Any) -> None:
    """Raise if Horovod does not read the launcher's variables: each rank would be alone in its world."""
    if "HOROVOD_SIZE" in os.environ or hvd.mpi_built():
        return
    environment = environments.current()
    if environment.world_size > 1:
        raise EnvironmentVariablesError(
            f"The environment variables give rank {environment.rank} of {environment.world_size}, but the "
            "variables that Horovod reads (HOROVOD_RANK, HOROVOD_SIZE, ...) are missing. Start the script by "
            f"`horovodrun -np {environment.world_size} python script.py`, or use idist.spawn('horovod', ...)."
        )


def _check_comm(hvd: Any, comm: Any) -> None:
    """Raise if ``comm`` leaves out ranks and Horovod would silently use all ranks."""
    if not isinstance(comm, Sequence) or hvd.mpi_built():
        return
    size = int(os.environ.get("HOROVOD_SIZE", "1"))
    if comm and sorted(comm) != list(range(size)):
        raise ValueError(
            f"comm={list(comm)} leaves out some of the job's ranks, [0, {size}). Such a comm needs Horovod "
            "built with MPI. Omit comm, and pass group= to the collectives."
        )
