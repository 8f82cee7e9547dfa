"""Models, optimizers and loaders on XLA devices."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from ignite_dist.comp_models.base import ComputationModel
from ignite_dist.comp_models.training import Training
from ignite_dist.internals.call_sites import warn_user
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

    def device_loader(self) -> type[Any]:
        from ignite_dist.comp_models.xla.loader import DeviceLoader

        return DeviceLoader
