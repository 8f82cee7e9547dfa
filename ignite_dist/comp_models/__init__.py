"""The computation models. ``_BUILT_IN`` gives the order of the search for a live context."""

from __future__ import annotations

from ignite_dist.comp_models.base import ComputationModel, Group
from ignite_dist.comp_models.horovod import HorovodModel
from ignite_dist.comp_models.native import NativeModel
from ignite_dist.comp_models.registry import (
    Registry,
    register_computation_model,
    registered_computation_models,
)
from ignite_dist.comp_models.serial import SerialModel
from ignite_dist.comp_models.topology import Topology
from ignite_dist.comp_models.xla import XlaModel

__all__ = [
    "ComputationModel",
    "Group",
    "HorovodModel",
    "NativeModel",
    "Registry",
    "SerialModel",
    "Topology",
    "XlaModel",
    "has_hvd_support",
    "has_native_dist_support",
    "has_xla_support",
    "register_computation_model",
    "registered_computation_models",
]

_BUILT_IN = (SerialModel, NativeModel, HorovodModel, XlaModel)

for _model in _BUILT_IN:
    register_computation_model(_model)


def _has_backend_of(name: str) -> bool:
    return any(model.available_backends for model in _BUILT_IN if model.name == name)


# True if initialize() accepts a backend of this computation model.
has_native_dist_support = _has_backend_of("native-dist")
has_hvd_support = _has_backend_of("horovod-dist")
has_xla_support = _has_backend_of("xla-dist")
