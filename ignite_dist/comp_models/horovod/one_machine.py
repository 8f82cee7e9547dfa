"""The transport of Horovod contexts: over shared memory in the groups whose ranks are on one machine."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import DistBackendError

from ignite_dist.comp_models.horovod.transport import PATIENCE_SECONDS, SHUT_DOWN, HorovodTransport
from ignite_dist.comp_models.shared_memory.transport import OneMachineTransport
from ignite_dist.comp_models.transport import Group
from ignite_dist.comp_models.work import Completed, Steps, Work


class HorovodOnOneMachine(OneMachineTransport, HorovodTransport):
    """Carries CPU tensors over shared memory on one machine, and all others over Horovod."""

    patience_seconds = PATIENCE_SECONDS  # a context of the user's own has no watchdog

    def all_reduce(self, tensor: Tensor, op: str, group: Group) -> Work:
        if op == "ADASUM":
            self._leave_to_backend(group)
            return Steps(lambda: HorovodTransport.all_reduce(self, tensor, op, group).wait())
        return super().all_reduce(tensor, op, group)

    def separate_group(self, group: Group) -> Work:
        self._finish_opening(group)
        shares_memory = self.shares_memory(group)
        if shares_memory:
            return super().separate_group(group)
        # Another handle of the process set, which opens a memory of its own unless the ranks share none.
        known = self.handle_of(group)
        handle = self._hvd.ProcessSet(list(group.ranks))
        handle.process_set_id = known.process_set_id
        handle.ignite_dist_number = self._number_of(group)
        if shares_memory is False:
            self._forget_with(handle)
            self._memories[id(handle)] = None
        return Completed(Group(handle, group.ranks))

    def handle_of(self, group: Group) -> Any:
        return self.world_handle() if group.handle is None else group.handle

    def name_of(self, group: Group) -> str:
        # Asynchronous calls over shared memory are in no process set.
        return self._tag(group) if isinstance(self.handle_of(group), self._hvd.ProcessSet) else ""

    def timeout_of(self, handle: Any) -> timedelta:
        return timedelta.max  # Horovod waits for ever

    def check_backend(self) -> None:
        if not (self._is_current() and self._is_running()):
            raise DistBackendError(SHUT_DOWN)

    def as_own(self, error: RuntimeError) -> RuntimeError:
        """A lost rank is a ``HorovodInternalError``, which elastic scripts catch."""
        if not isinstance(error, DistBackendError):
            return error
        return self._mpi_ops.HorovodInternalError(str(error))  # type: ignore[no-any-return]
