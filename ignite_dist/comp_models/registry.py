"""The registry of computation models, in the order of the search for a live context."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import NamedTuple, TypeVar, overload

from ignite_dist.comp_models.base import ComputationModel
from ignite_dist.internals.call_sites import add_library
from ignite_dist.internals.tracing import untrace_package

ENTRY_POINT_GROUP = "ignite_dist.computation_models"

_Model = TypeVar("_Model", bound=type[ComputationModel])


class Declared(NamedTuple):
    """A computation model whose module is imported when the model is needed.

    Attributes:
        name: the model's name.
        library: the model's library. Until it is imported, no context of the model can be live.
        path: ``"module:class"``.
    """

    name: str
    library: str
    path: str


class Registry(Sequence[type[ComputationModel]]):
    """The registered computation models, as a read-only sequence.

    Declared models are imported when they are read. Models that other installed packages declare as entry
    points are loaded when the sequence is first read.

    Args:
        declared: the first models.
    """

    def __init__(self, *declared: Declared) -> None:
        self._models: list[type[ComputationModel] | Declared] = [*declared]
        self._entry_points_loaded = False
        self._loading = threading.RLock()
        self._is_loading = False

    def register(self, model: _Model) -> _Model:
        """Append ``model``. See :func:`register_computation_model`."""
        if not (isinstance(model, type) and issubclass(model, ComputationModel)):
            raise TypeError(f"A computation model is a subclass of ComputationModel, got {model!r}.")
        if any(other.name == model.name for other in self._models):
            other = self.named(model.name)
            if other is model:
                return model
            raise ValueError(
                f"{_full_name(model)} has the name {model.name!r}, which the registered "
                f"{_full_name(other)} already has. Give one of them another name."
            )
        self._models.append(model)
        add_library(model.__module__)  # the watchdog then treats frames of this module as library code
        return model

    def named(self, name: str) -> type[ComputationModel]:
        """The registered model with this name."""
        return self._load([model.name for model in self._models].index(name))

    def with_imported_library(self) -> list[type[ComputationModel]]:
        """The models whose library has been imported. Only these may have a live context."""
        self._find_entry_points()
        known = list(enumerate(self._models))
        return [self._load(position) for position, model in known if model.library in sys.modules]

    def loaded(self) -> list[type[ComputationModel]]:
        """The models that have been imported. Imports nothing."""
        return [model for model in self._models if not isinstance(model, Declared)]

    def renew_lock(self) -> None:
        """In a forked child: a thread of the parent may hold the lock."""
        self._loading = threading.RLock()

    def _load(self, position: int) -> type[ComputationModel]:
        known = self._models[position]
        if isinstance(known, Declared):
            model: type[ComputationModel] = resolve_name(known.path)
            add_library(model.__module__)
            untrace_package("ignite_dist")
            self._models[position] = model
            return model
        return known

    def _find_entry_points(self) -> None:
        """Load the entry points once. A broken one raises at every call, as in ``environments.registry``."""
        if not self._entry_points_loaded:
            with self._loading:
                if not self._is_loading:  # an entry point may ask for the models while it is imported
                    self._load_entry_points()

    def _load_entry_points(self) -> None:
        self._is_loading = True
        try:
            for entry_point in entry_points(group=ENTRY_POINT_GROUP):
                try:
                    self.register(entry_point.load())
                except Exception as error:
                    # Not type(error): a package's exception class may need other arguments than a string.
                    raise ImportError(
                        f"Entry point {entry_point.name} = {entry_point.value}: {error}"
                    ) from error
            self._entry_points_loaded = True
        finally:
            self._is_loading = False

    @overload
    def __getitem__(self, position: int) -> type[ComputationModel]: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[type[ComputationModel]]: ...
    def __getitem__(self, position: int | slice) -> type[ComputationModel] | Sequence[type[ComputationModel]]:
        if isinstance(position, slice):
            return [self[index] for index in range(*position.indices(len(self)))]
        return self._load(range(len(self))[position])

    def __len__(self) -> int:
        self._find_entry_points()
        return len(self._models)

    def __iter__(self) -> Iterator[type[ComputationModel]]:
        return (self._load(position) for position in range(len(self)))

    def __repr__(self) -> str:
        self._find_entry_points()
        return f"<registered computation models: {', '.join(model.name for model in self._models)}>"


registered_computation_models = Registry(
    Declared("serial", "torch", "ignite_dist.comp_models.serial:SerialModel"),
    Declared("native-dist", "torch.distributed", "ignite_dist.comp_models.native:NativeModel"),
    Declared("horovod-dist", "horovod.torch", "ignite_dist.comp_models.horovod:HorovodModel"),
    Declared("xla-dist", "torch_xla", "ignite_dist.comp_models.xla:XlaModel"),
)
"""The built-in models come first. This is the order of the search for a live context."""


def register_computation_model(model: _Model) -> _Model:
    """Class decorator: register a computation model. Registering the same class twice has no effect.

    Raises:
        ValueError: another class has the same name; nothing is replaced.
        TypeError: ``model`` is not a subclass of ``ComputationModel``.
    """
    return registered_computation_models.register(model)


def _full_name(model: type) -> str:
    return f"{model.__module__}.{model.__qualname__}"
