"""The registry of computation models, in the order of the search for a live context."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from typing import TypeVar, overload

from ignite_dist.comp_models.base import ComputationModel
from ignite_dist.internals.call_sites import add_library

ENTRY_POINT_GROUP = "ignite_dist.computation_models"

_Model = TypeVar("_Model", bound=type[ComputationModel])


class Registry(Sequence[type[ComputationModel]]):
    """The registered computation models, as a read-only sequence.

    Models that other installed packages declare as entry points are loaded when the sequence is first read.
    """

    def __init__(self) -> None:
        self._models: list[type[ComputationModel]] = []
        self._entry_points_loaded = False
        self._loading = threading.RLock()
        self._is_loading = False

    def register(self, model: _Model) -> _Model:
        """Append ``model``. See :func:`register_computation_model`."""
        if not (isinstance(model, type) and issubclass(model, ComputationModel)):
            raise TypeError(f"A computation model is a subclass of ComputationModel, got {model!r}.")
        for other in self._models:
            if other is model:
                return model
            if other.name == model.name:
                raise ValueError(
                    f"{_full_name(model)} has the name {model.name!r}, which the registered "
                    f"{_full_name(other)} already has. Give one of them another name."
                )
        self._models.append(model)
        add_library(model.__module__)  # the watchdog then treats frames of this module as library code
        return model

    def _loaded(self) -> list[type[ComputationModel]]:
        """The models. A broken entry point raises at every call, as in ``environments.registry``."""
        if not self._entry_points_loaded:
            with self._loading:
                if not self._is_loading:  # an entry point may ask for the models while it is imported
                    self._load_entry_points()
        return self._models

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
        return self._loaded()[position]

    def __len__(self) -> int:
        return len(self._loaded())

    def __iter__(self) -> Iterator[type[ComputationModel]]:
        return iter(self._loaded())

    def __repr__(self) -> str:
        return f"<registered computation models: {', '.join(model.name for model in self._loaded())}>"


registered_computation_models = Registry()


def register_computation_model(model: _Model) -> _Model:
    """Class decorator: register a computation model. Registering the same class twice has no effect.

    Raises:
        ValueError: another class has the same name; nothing is replaced.
        TypeError: ``model`` is not a subclass of ``ComputationModel``.
    """
    return registered_computation_models.register(model)


def _full_name(model: type) -> str:
    return f"{model.__module__}.{model.__qualname__}"
