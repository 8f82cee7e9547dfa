"""The registry of launchers. The built-in launchers are listed in ``environments/__init__.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from operator import attrgetter
from types import ModuleType
from typing import Any, Protocol, TypeVar

from ignite_dist.environments.base import Environment

ENTRY_POINT_GROUP = "ignite_dist.environments"


class Launcher(Protocol):
    """The interface of a launcher: a module, or another object, with three names.

    Attributes:
        LAUNCHER: the launcher's name, as in ``Environment.launcher``.
        VARIABLES: the environment variables that the launcher sets. List the variables that ``detect`` reads
            with their full names, because ``ignite-dist env`` shows these. ``"FLUX_*"`` stands for all names
            that begin with ``FLUX_``.
    """

    @property
    def LAUNCHER(self) -> str: ...  # noqa: D102
    @property
    def VARIABLES(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def detect(self) -> Callable[[Mapping[str, str]], Environment | None]:
        """The process's environment; None if the launcher did not start the process.

        A pure function of the environment variables. Raises an ``EnvironmentVariablesError`` if the
        launcher's variables are incomplete or contradict each other.
        """
        ...


LauncherT = TypeVar("LauncherT", bound=Launcher)


class Registry:
    """Launchers in the order of detection. Entry points are loaded at the first iteration.

    Args:
        first: built-in launchers before the launchers of other packages.
        last: built-in launchers after the launchers of other packages.
    """

    def __init__(self, first: Sequence[Launcher], last: Sequence[Launcher]) -> None:
        self._first, self._last = tuple(first), tuple(last)
        self._added: list[Launcher] = []
        self._entry_points_loaded = False

    def register(self, launcher: LauncherT) -> LauncherT:
        """Add ``launcher`` after the launchers that have been added before."""
        _check(launcher)
        for other in (*self._first, *self._added, *self._last):
            if other is launcher:
                return launcher
            if other.LAUNCHER == launcher.LAUNCHER:
                raise ValueError(
                    f"Two environments are named {launcher.LAUNCHER!r}: {_full_name(other)} is registered, "
                    f"{_full_name(launcher)} is not. Give one of them another LAUNCHER."
                )
        self._added.append(launcher)
        return launcher

    def __iter__(self) -> Iterator[Launcher]:
        self._load_entry_points()
        return iter((*self._first, *self._added, *self._last))

    def _load_entry_points(self) -> None:
        """Register the entry points of other packages, once.

        A broken entry point raises at every call. If it raised only once, a process that caught this error
        would run in a world of one.
        """
        if self._entry_points_loaded:
            return
        for entry_point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=attrgetter("name")):
            try:
                self.register(entry_point.load())
            except Exception as error:
                # An ImportError, not type(error): that class may need other arguments.
                raise ImportError(f"Entry point {entry_point.name} = {entry_point.value}: {error}") from error
        self._entry_points_loaded = True


def _check(launcher: Any) -> None:
    """Raise a TypeError unless ``launcher`` has the three names of :class:`Launcher`."""
    names = getattr(launcher, "VARIABLES", None)
    has_names = isinstance(names, Sequence) and not isinstance(names, str)
    missing = [
        description
        for description, is_present in {
            "LAUNCHER, a str": isinstance(getattr(launcher, "LAUNCHER", None), str),
            "VARIABLES, a tuple of str": has_names and all(isinstance(name, str) for name in names or ()),
            "detect(environ), a function": callable(getattr(launcher, "detect", None)),
        }.items()
        if not is_present
    ]
    if missing:
        raise TypeError(
            "An environment is a module or an object with LAUNCHER, VARIABLES and detect(environ). "
            f"{launcher!r} lacks: {'; '.join(missing)}."
        )


def _full_name(launcher: Any) -> str:
    if isinstance(launcher, ModuleType):
        return launcher.__name__
    named = launcher if isinstance(launcher, type) else type(launcher)
    return f"{named.__module__}.{named.__qualname__}"
