"""Python imports this when it starts: ``conftest.py`` puts this folder on the path of the tests' processes.

Python's garbage collector looks at all that ``import torch`` has made, several times meanwhile and twice at
the exit: a third of the time of a short script. Nothing of it is garbage. So the collector is off during such
an import, and passes over what the import has made. What was there before is collected as ever.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_LARGE = {
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch_xla"),
    *("IPython", "matplotlib", "pandas", "scipy", "sklearn", "wandb"),
}


class _Finder:
    is_importing = False  # one of the packages; it may import others

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = (
            PathFinder.find_spec(name, path, target) if name in _LARGE and not _Finder.is_importing else None
        )
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    """The loader of a module, which is the loader that the module has afterwards."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        import ctypes

        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        untrack, track = ctypes.pythonapi.PyObject_GC_UnTrack, ctypes.pythonapi.PyObject_GC_Track
        untrack.argtypes = track.argtypes = [ctypes.py_object]
        was_enabled = gc.isenabled()
        _Finder.is_importing = True
        gc.disable()
        earlier = gc.get_objects()
        try:
            self._loader.exec_module(module)
        finally:
            gc.freeze()
            for one in earlier:
                untrack(one)
                track(one)
            _Finder.is_importing = False
            if was_enabled:
                gc.enable()


if "IGNITE_DIST_TESTS_WHOLE_EXIT" not in os.environ:
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
