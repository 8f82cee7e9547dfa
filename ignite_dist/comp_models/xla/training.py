"""Models, optimizers and loaders on XLA devices."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import Dataset

from ignite_dist.comp_models.base import ComputationModel
from ignite_dist.comp_models.training import Training
from ignite_dist.internals.call_sites import warn_user
from ignite_dist.passes import OrderedLoader, OrderedShardLoader
from ignite_dist.samplers import Shard
from ignite_dist.values.gradients import parameters_of


class XlaTraining(Training):
    """The optimizer's step averages gradients; loaders copy their batches to the device."""

    def __init__(self, context: ComputationModel) -> None:
        from torch_xla.core import xla_model

        super().__init__(context)
        self._xla_model = xla_model
        self.computes_lazily = context.ranks_in_process() == 1

    def seed(self, seed: int) -> None:
        super().seed(seed)
        self._xla_model.set_rng_state(seed, str(self.context.device()))

    def random_state(self) -> dict[str, Any]:
        return {"type": "xla", "state": int(self._xla_model.get_rng_state(str(self.context.device())))}

    def set_random_state(self, saved: dict[str, Any] | None) -> None:
        if saved is not None and saved["type"] == "xla":
            self._xla_model.set_rng_state(saved["state"], str(self.context.device()))

    def wrap_model(self, model: Module, sync_bn: bool = False, **kwargs: Any) -> Module:
        if sync_bn:
            warn_user("sync_bn=True leaves BatchNorm as it is with XLA.")
        return model

    def wrap_optimizer(self, optimizer: Optimizer, **kwargs: Any) -> Optimizer:
        if all(parameter.device.type != "xla" for parameter in parameters_of(optimizer)):
            raise ValueError(
                "None of the optimizer's parameters is on an XLA device. Moving a model to a device replaces "
                "its parameters: make the optimizer from the parameters of the model that auto_model has "
                "returned."
            )
        return optimizer

    def make_loader(self, dataset: Dataset[Any], **kwargs: Any) -> Any:
        from ignite_dist.comp_models.xla.loader import DeviceLoader

        # The replicas of one process would share torch's generator.
        if self.context.ranks_in_process() > 1:
            seed = torch.initial_seed() + self.context.get_rank()
            kwargs.setdefault("generator", torch.Generator().manual_seed(seed))
        kind = OrderedShardLoader if isinstance(dataset, Shard) else OrderedLoader
        return DeviceLoader(kind(dataset, **kwargs), self.context.device())
