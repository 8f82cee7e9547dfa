"""XLA through PJRT: TPUs, and the CPU for tests.

Ranks are replicas. Several replicas may be threads of one process, so each call looks up the caller's rank.
"""

from __future__ import annotations

import sys
import threading
import traceback
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ignite_dist.comp_models.base import ComputationModel
from ignite_dist.comp_models.topology import Topology
from ignite_dist.comp_models.xla import _torch_xla, dtype_views, replicas
from ignite_dist.comp_models.xla.launcher import XlaLauncher, check_pjrt_device
from ignite_dist.comp_models.xla.training import XlaTraining
from ignite_dist.comp_models.xla.transport import XlaTransport
from ignite_dist.errors import RankFailedError
from ignite_dist.internals._torch import WORLD_STATE
from ignite_dist.internals.arguments import check_keywords
from ignite_dist.internals.call_sites import warn_user

if TYPE_CHECKING:
    from typing_extensions import Self

_HOW_TO_INSTALL = (
    "torch_xla is no longer developed and has wheels for Python 3.10 to 3.13: "
    "`pip install torch==2.9.0 torch_xla==2.9.0` in an environment of its own, or `make xla` in a checkout."
)


def _required_torch() -> str | None:
    """The torch release that the installed torch_xla was built for ("2.9"); None without torch_xla."""
    try:
        return ".".join(metadata.version("torch_xla").split(".")[:2]) if find_spec("torch_xla") else None
    except metadata.PackageNotFoundError:
        return None


def _available_backends() -> tuple[str, ...]:
    version = _required_torch()
    return ("xla-tpu",) if version is not None and torch.__version__.startswith(f"{version}.") else ()


class XlaModel(ComputationModel):
    """The model of an initialized XLA runtime. One object for all replicas of this process.

    The runtime cannot be ended, so this object records which replicas have initialized and ended a context.
    """

    name: ClassVar[str] = "xla-dist"
    available_backends: ClassVar[tuple[str, ...]] = _available_backends()
    library: ClassVar[str] = "torch_xla"
    transport: XlaTransport
    launcher: ClassVar[type[XlaLauncher]] = XlaLauncher
    finds_early_ends: ClassVar[bool] = True

    _instance: ClassVar[XlaModel | None] = None
    _instance_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        import torch_xla
        from torch_xla import runtime

        self._xla, self._runtime = torch_xla, runtime
        self._world_size: int = runtime.world_size()
        self._meeting = replicas.get_meeting()
        self._devices: dict[int, torch.device] = {}
        self._topologies: dict[int, Topology] = {}
        self._initialized: set[int] = set()
        self._views = dtype_views.lower_dtype_views()
        super().__init__(XlaTransport(self, self._meeting))
        self.training = XlaTraining(self)
        if len(torch_xla.devices()) > 1:
            # torch_xla counts CPU fallbacks, such as item(), in a table without a lock. If two replicas make
            # their first item() at the same time, SIGSEGV ends the process. So make the first item() in this
            # constructor (torch_xla/csrc/aten_fallback.cpp). It copies data to the device and back, without a
            # graph.
            torch.tensor(0).to(torch_xla.device()).item()

    # --- lifecycle ---------------------------------------------------------------------------------

    @classmethod
    def find(cls) -> Self | None:
        if not _torch_xla.is_runtime_initialized():
            return None
        model = cls._get_or_create()
        return None if model.get_rank() in model._meeting.ended else model

    @classmethod
    def _get_or_create(cls) -> Self:
        with cls._instance_lock:
            if cls._instance is None:
                cls._instance = cls()
            return cls._instance  # type: ignore[return-value]

    @classmethod
    def unavailable_reason(cls, backend: str) -> str | None:
        if backend != "xla-tpu":
            return None
        version = _required_torch()
        if version is None:
            return f"torch_xla is not installed. {_HOW_TO_INSTALL}"
        mismatch = (
            f"the installed torch_xla needs torch {version}, but torch {torch.__version__} is installed"
        )
        return f"{mismatch}. {_HOW_TO_INSTALL}"

    @classmethod
    def open(cls, backend: str, **kwargs: Any) -> Self:
        check_keywords("initialize", kwargs, ())
        check_pjrt_device()
        import torch_xla

        torch_xla.device()  # initializes the runtime
        model = cls._get_or_create()
        rank = model.get_rank()
        model._initialized.add(rank)
        model._meeting.enter(rank)
        return model

    def is_current(self) -> bool:
        ended = self._meeting.ended
        if ended and self.get_rank() in ended:
            return False
        # A process that only uses an XLA device may still make a context of another backend.
        return self._world_size > 1 or WORLD_STATE.default_pg is None or bool(self._initialized)

    def can_be_replaced_by(self, model: type[ComputationModel]) -> bool:
        if self.get_rank() in self._initialized:
            return False
        return isinstance(self, model) or self._world_size == 1

    def meet_at_end(self) -> None:
        try:
            self.transport.meet(replicas.END)
        except RankFailedError as error:
            warn_user(f"Not every rank reached finalize(): {error}")

    def close(self) -> None:
        self._mark_ended()

    def context_mark(self) -> object:
        return XlaModel

    @classmethod
    def prepare_forked_child(cls) -> object | None:
        return XlaModel if _torch_xla.is_runtime_initialized() else None

    def abort(self) -> None:
        kind, error, _ = sys.exc_info()
        text = "".join(traceback.format_exception(error)) if error else ""
        self._meeting.fail(self.get_rank(), kind.__name__ if kind else "nothing", text)
        self._mark_ended()

    def _mark_ended(self) -> None:
        rank = self.get_rank()
        self._meeting.ended.add(rank)
        self._initialized.discard(rank)

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
                runtime, nproc_per_node = self._runtime, self._runtime.local_device_count()
                nnodes = self._world_size // nproc_per_node
                found = Topology(runtime.local_ordinal(), nproc_per_node, nnodes, runtime.host_index())
            self._topologies[rank] = found
        return found

    def ranks_in_process(self) -> int:
        return self._meeting.size
