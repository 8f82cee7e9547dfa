"""The transport of process groups, with shared memory for CPU tensors on one machine."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ignite_dist.comp_models.native.transport import NativeTransport
from ignite_dist.comp_models.shared_memory.transport import OneMachineTransport
from ignite_dist.comp_models.transport import Group
from ignite_dist.internals import _torch


class NativeOnOneMachine(OneMachineTransport, NativeTransport):
    """Carries CPU tensors over shared memory on one machine, and all others over process groups."""

    handle_of = NativeTransport.handle_of

    def overlaps(self, group: Group) -> bool:
        # On one machine the thread of the group runs them over shared memory, which compares them.
        self._finish_opening(group)
        in_memory = self._device().type == "cpu" and self.shares_memory(group) is not False
        return not in_memory and super().overlaps(group)

    def timeout_of(self, handle: Any) -> timedelta:
        return _torch.timeout_of(handle, self._device())

    def name_of(self, group: Group) -> str:
        handle = self.handle_of(group)
        return handle.group_name if isinstance(handle, ProcessGroup) else ""

    def barrier_device(self) -> torch.device:
        return self._device()

    def forget(self) -> None:
        NativeTransport.forget(self)
        OneMachineTransport.forget(self)
