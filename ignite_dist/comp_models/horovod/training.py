"""Wraps models and optimizers for Horovod."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

from torch.nn import Module
from torch.optim import Optimizer

from ignite_dist.comp_models.base import ComputationModel
from ignite_dist.comp_models.training import NO_OPTIMIZER, Training
from ignite_dist.comp_models.transport import Group
from ignite_dist.internals import _torch
from ignite_dist.internals.call_sites import warn_user

if TYPE_CHECKING:
    from ignite_dist.comp_models.horovod.rounds import Calls, Exchange


class HorovodTraining(Training):
    """Wraps models and optimizers for Horovod.

    Args:
        context: the context.
        hvd: the module ``horovod.torch``.
        calls: the context's transport.
    """

    averages_gradients: ClassVar[bool] = True
    shares_optimizers: ClassVar[bool] = True

    def __init__(self, context: ComputationModel, hvd: Any, calls: Calls) -> None:
        super().__init__(context)
        self._hvd = hvd
        self._calls = calls
        self._exchange: Exchange | None = None
        self._optimizer_numbers = count(1)

    def wrap_model(self, model: Module, sync_bn: bool = False, **kwargs: Any) -> Module:
        if sync_bn and self.context.device().type == "cpu":
            warn_user("sync_bn=True leaves BatchNorm as it is: Horovod's SyncBatchNorm needs a GPU.")
        elif sync_bn:
            return _with_sync_bn(model, self._hvd.SyncBatchNorm)
        return model

    def wrap_optimizer(self, optimizer: Optimizer, **kwargs: Any) -> Optimizer:
        from ignite_dist.comp_models.horovod import distributed_optimizer, rounds

        if self._exchange is None:
            self._exchange = rounds.Exchange(self._calls)
        name = f"optimizer{next(self._optimizer_numbers)}"
        wrapped = distributed_optimizer.distribute(optimizer, name, self._exchange, **kwargs)
        if self.context.get_world_size() > 1:
            sent, failure = b"", None
            if self.context.get_rank() == 0:
                try:
                    sent = distributed_optimizer.state_as_bytes(wrapped)
                except Exception as error:  # rank 0 then sends no bytes, and all ranks raise
                    failure = error
            received = self.context.objects.broadcast_bytes(sent, 0, self.context.groups.world)
            if failure is not None:
                raise failure
            if not received:
                raise RuntimeError("Rank 0 could not send its optimizer's state. See the error of rank 0.")
            if self.context.get_rank() != 0:
                distributed_optimizer.load_state(wrapped, received, self.context.device())
        return wrapped

    def accumulate(self, model: Module, optimizers: Sequence[Optimizer]) -> AbstractContextManager[None]:
        from ignite_dist.comp_models.horovod import distributed_optimizer

        if (
            not optimizers
            and self.context.get_world_size() > 1
            and any(one.requires_grad for one in model.parameters())
        ):
            raise ValueError(NO_OPTIMIZER)
        return distributed_optimizer.accumulating(optimizers)

    def average_in_block(
        self, model: Module, optimizers: Sequence[Optimizer]
    ) -> AbstractContextManager[None]:
        from ignite_dist.comp_models.horovod import distributed_optimizer

        return distributed_optimizer.averaging_in_block(optimizers)

    def gradient_group(self, model: Module, optimizers: Sequence[Optimizer]) -> Group:
        sets = [getattr(optimizer, "process_set", None) for optimizer in optimizers]
        groups = {tuple(one.ranks): one for one in sets if one is not None}
        if len(groups) > 1:
            raise ValueError(
                "The model's optimizers average over different ranks, "
                f"{[list(ranks) for ranks in groups]}: give all optimizers the same process_set=."
            )
        if groups:
            ranks, process_set = next(iter(groups.items()))
            if len(ranks) < self.context.get_world_size():
                return Group(process_set, ranks)
        return self.context.groups.world

    def check_forced(self, model: Module, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            op, process_set = getattr(optimizer, "op", None), getattr(optimizer, "process_set", None)
            if op not in (None, self._hvd.Average) or getattr(process_set, "process_set_id", 0) != 0:
                raise ValueError(
                    "FORCED_SYNC takes the mean over all ranks, but this optimizer has its own op= or "
                    "process_set=. Use another strategy."
                )

    @contextmanager
    def join(  # type: ignore[override]  # Horovod's join() has no options
        self,
        model: Module,
        optimizer: Optimizer | None,
        divide_by_initial_world_size: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[list[int]]:
        if not divide_by_initial_world_size or throw_on_early_termination:
            raise ValueError(
                "Horovod's join() divides by the world size and waits for all ranks: use the defaults of "
                "divide_by_initial_world_size and throw_on_early_termination."
            )
        if (
            len(self.gradient_group(model, [] if optimizer is None else [optimizer]).ranks)
            < self.context.get_world_size()
        ):
            raise ValueError("Horovod's join() needs all ranks, but this optimizer has a process_set=.")
        sources: list[int] = []  # after the block: the rank that joined last
        yield sources
        sources.append(self._hvd.join())

    def reduce_gradients(self, optimizer: Optimizer) -> None:
        from ignite_dist.comp_models.horovod import distributed_optimizer

        distributed_optimizer.synchronize(optimizer)


def _with_sync_bn(module: Module, sync_batch_norm: type[Module]) -> Module:
    """Replace each BatchNorm in ``module``. Parameters and statistics are kept."""
    if _torch.is_batch_norm(module):
        names = ("num_features", "eps", "momentum", "affine", "track_running_stats")
        made = sync_batch_norm(*(getattr(module, name) for name in names))
        # named_parameters() and named_buffers() skip None. A subclass may have more parameters and buffers.
        for name in ("weight", "bias"):
            made.register_parameter(name, getattr(module, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            made.register_buffer(name, getattr(module, name))
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            made.register_parameter(name, parameter)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            made.register_buffer(name, buffer)
        return made.train(module.training)
    for name, child in module.named_children():
        setattr(module, name, _with_sync_bn(child, sync_batch_norm))
    return module
