"""The computation models. Each backend's is imported when it is needed."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ignite_dist.comp_models.base import ComputationModel, Group
from ignite_dist.comp_models.registry import (
    Registry,
    register_computation_model,
    registered_computation_models,
)
from ignite_dist.comp_models.serial import SerialModel
from ignite_dist.comp_models.topology import Topology

if TYPE_CHECKING:
    from ignite_dist.comp_models.horovod import HorovodModel
    from ignite_dist.comp_models.native import NativeModel
    from ignite_dist.comp_models.xla import XlaModel

    has_native_dist_support: bool
    has_hvd_support: bool
    has_xla_support: bool

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

_MODELS = {"NativeModel": "native-dist", "HorovodModel": "horovod-dist", "XlaModel": "xla-dist"}
# True if initialize() accepts a backend of this computation model.
_SUPPORT = {
    "has_native_dist_support": "native-dist",
    "has_hvd_support": "horovod-dist",
    "has_xla_support": "xla-dist",
}


def _import_later(name: str) -> Any:
    if name in _MODELS:
        return registered_computation_models.named(_MODELS[name])
    if name in _SUPPORT:
        return bool(registered_computation_models.named(_SUPPORT[name]).available_backends)
    if name in ("native", "horovod", "xla"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__ = _import_later
