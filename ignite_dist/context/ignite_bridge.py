"""Synchronizes ``ignite.distributed`` of pytorch-ignite with the context of this package.

Ignite's engine, metrics and handlers read the rank from ``ignite.distributed``. Over torch.distributed,
ignite's first search for a context is a collective, so ``if rank == 0: setup_logger()`` hangs. Ignite also
does not detect the end of a context. So this module sets ignite's model at the start and end of a context,
without a collective. If only a collective can show which ranks share a node, ignite's model stays unchanged.

Contexts that other code has made are ignored, and contexts of XLA too: replicas of XLA may be threads, and
ignite has one model per process. (Ignite 0.5.5 calls functions that torch_xla 2.9 no longer has.)
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ignite_dist.comp_models import ComputationModel
from ignite_dist.comp_models.topology import Topology

_UTILS = "ignite.distributed.utils"


def context_began(model: ComputationModel) -> None:
    """Set the context of ``model`` in ignite: now if ignite is imported, else after its import."""
    if model.name not in ("native-dist", "horovod-dist"):
        return
    _import_hook.forget()
    utils = sys.modules.get(_UTILS)
    if utils is not None:
        _set_ignite_model(utils, model)
    else:
        _import_hook.call_after_import(lambda utils: _set_ignite_model(utils, model))


def context_ended() -> None:
    """Set a serial model in ignite, if ignite is imported."""
    _import_hook.forget()
    utils = sys.modules.get(_UTILS)
    if utils is not None:
        utils._set_model(utils._SerialModel())  # after utils.sync(), ignite would not look for contexts


def _set_ignite_model(utils: Any, model: ComputationModel) -> None:
    if not model.is_current():
        return
    topology = model.known_topology()
    if model.name != "native-dist":
        utils.sync()  # not a collective over Horovod
    elif topology is not None:
        utils._set_model(_native_model(topology))


def _native_model(topology: Topology) -> Any:
    """Ignite's model of torch.distributed, with a known topology in place of ignite's collective."""
    native = sys.modules["ignite.distributed.comp_models.native"]

    class KnownTopologyModel(native._NativeDistModel):  # type: ignore[misc, name-defined]
        def _identify_local_rank(self) -> None:
            self._local_rank = topology.local_rank

        def _compute_nproc_per_node(self) -> int:
            return topology.nproc_per_node

    return KnownTopologyModel()


class _ImportHook(importlib.abc.MetaPathFinder):
    """Import hook: calls a function with ignite's module after its import."""

    def __init__(self) -> None:
        self._function: Callable[[ModuleType], None] | None = None

    def call_after_import(self, function: Callable[[ModuleType], None]) -> None:
        self._function = function
        sys.meta_path.insert(0, self)

    def forget(self) -> None:
        self._function = None
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        function = self._function
        if name != _UTILS or function is None:
            return None
        self.forget()
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderWithCallback(spec.loader, function)
        return spec


class _LoaderWithCallback(importlib.abc.Loader):
    """Wraps a loader, and calls a function with the loaded module."""

    def __init__(self, loader: Any, function: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._function = function

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._function(module)


_import_hook = _ImportHook()
