"""The transport of contexts whose backend carries tensors of an accelerator only, as NCCL does.

On one machine, CPU tensors, numbers, objects and agreements of ranks go over shared memory, without waiting
for the accelerator. In groups that share no memory they are copied to the accelerator and back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ignite_dist.comp_models.native.one_machine import NativeOnOneMachine
from ignite_dist.comp_models.native.transport import NativeTransport
from ignite_dist.comp_models.transport import CollectiveKind, Group, Sizes
from ignite_dist.comp_models.work import Work


class _StagingTransport(NativeTransport):
    """Copies CPU tensors to the accelerator, where the backend carries them, and the results back."""

    def supports(
        self, kind: CollectiveKind, op: str | None, dtype: torch.dtype, device: torch.device
    ) -> bool:
        sending = torch.device(next(iter(self._backends))) if device.type == "cpu" else device
        return super().supports(kind, op, dtype, sending)

    def _on_accelerator(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device()) if tensor.device.type == "cpu" else tensor

    def all_reduce(self, tensor: Tensor, op: str, group: Group) -> Work:
        sent = self._on_accelerator(tensor)
        return _into(tensor, sent, super().all_reduce(sent, op, group))

    def reduce_exactly(self, tensor: Tensor, op: str, group: Group) -> Work:
        sent = self._on_accelerator(tensor)
        return _into(tensor, sent, super().reduce_exactly(sent, op, group))

    def all_gather(self, tensor: Tensor, group: Group, out: Tensor | None = None) -> Work:
        sent = self._on_accelerator(tensor)
        if sent is tensor:
            return super().all_gather(tensor, group, out)
        received = sent.new_empty((len(group.ranks), *tensor.shape))
        target = torch.empty(received.shape, dtype=tensor.dtype) if out is None else out
        return _into(target, received, super().all_gather(sent, group, received))

    def broadcast(self, tensor: Tensor, src: int, group: Group) -> Work:
        sent = self._on_accelerator(tensor)
        return _into(tensor, sent, super().broadcast(sent, src, group))

    def all_to_all(self, tensor: Tensor, group: Group, out: Tensor, sizes: Sizes | None) -> Work:
        received = self._on_accelerator(out)
        return _into(out, received, super().all_to_all(self._on_accelerator(tensor), group, received, sizes))

    def reduce_scatter(self, tensor: Tensor, op: str, group: Group, out: Tensor) -> Work:
        received = self._on_accelerator(out)
        return _into(out, received, super().reduce_scatter(self._on_accelerator(tensor), op, group, received))


def _into(tensor: Tensor, received: Tensor, work: Work) -> Work:
    """``work`` fills ``received``. The result copies that into ``tensor``, and returns ``tensor``."""
    return work if received is tensor else work.then(lambda _: tensor.copy_(received))


class AcceleratorTransport(NativeOnOneMachine, _StagingTransport):
    """Carries CPU tensors over shared memory on one machine, and all others over the accelerator."""
