"""Run a script on every rank, in a context that the command has made."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import ignite_dist as idist
from ignite_dist.environments import spawned
from ignite_dist.workers.failures import user_traceback

_STDIN = "-"


def run(
    script: str,
    arguments: Sequence[str],
    is_module: bool,
    backend: str,
    nproc_per_node: Any,
    options: Mapping[str, Any],
    timeline: str | None = None,
) -> int:
    """Run ``script`` on the ranks of the launcher, or on workers that this function starts.

    ``script`` is a file, a folder or a zip file with a ``__main__.py``, ``-`` for the standard input, or a
    module if ``is_module`` is True. ``options`` are further keywords of ``idist.Parallel``. ``timeline`` is a
    file that gets a trace of the script's collectives.

    Returns:
        The exit status. After an exception of the script in this process, whose traceback is printed, it is
        1, or 130 after a KeyboardInterrupt.

    Raises:
        ValueError: there is no such file or module, or the arguments are incompatible. Nothing was started.
        RankFailedError: a worker failed.
    """
    if is_module:
        _check_package(script)
    elif script != _STDIN and not os.path.exists(script):
        raise ValueError(f"There is no script {script!r} in {os.getcwd()}.")
    source = None if is_module else _source_of_stream(script)
    keywords: Any = dict(options)
    try:
        with idist.Parallel(backend, nproc_per_node, **keywords) as parallel:
            parallel.run(_run_script, script, list(arguments), is_module, source, timeline)
    except (Exception, KeyboardInterrupt) as error:
        if not _is_raised_by_script(error):
            raise
        traceback.print_exception(type(error), error, user_traceback(error.__traceback__))
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _is_raised_by_script(error: BaseException) -> bool:
    """True if the script ran in this process when ``error`` was raised."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is _run_script.__code__ for frame, _ in frames)


def _run_script(
    local_rank: int,
    script: str,
    arguments: list[str],
    is_module: bool,
    source: str | None,
    timeline: str | None,
) -> None:
    os.environ.update(spawned.mark_run(os.environ))
    sys.argv = [script, *arguments]
    with nullcontext() if timeline is None else idist.record_timeline(timeline):
        if is_module:
            sys.path.insert(0, os.getcwd())
            spec = _find_module(script)
            sys.argv[0] = str(spec.origin)
            _run_module(spec)
        elif source is not None:
            sys.path.insert(0, "")
            names = {} if script == _STDIN else {"__file__": script}
            _run_code(InspectLoader.source_to_code(source, names.get("__file__", "<stdin>")), names)
        elif not os.path.isfile(script) or pkgutil.get_importer(script):  # a folder or a zip file
            sys.path.insert(0, script)
            _run_module(_find_main(script))
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
            _run_file(os.path.abspath(script))


def _check_package(module: str) -> None:
    """Raise ``ValueError`` if the first part of the module's name cannot be found. Nothing is imported."""
    name = module.partition(".")[0]
    if name and (PathFinder.find_spec(name, [os.getcwd(), *sys.path]) or importlib.util.find_spec(name)):
        return
    raise ValueError(f"There is no module {name or module!r} in {os.getcwd()}, and none is installed.")


def _source_of_stream(script: str) -> str | None:
    """The source from the standard input or a pipe (``<(...)``); None for a file or a folder."""
    if script == _STDIN:
        return sys.stdin.read()
    if os.path.isfile(script) or os.path.isdir(script):
        return None
    return Path(script).read_text(encoding="utf-8")


def _find_module(name: str) -> ModuleSpec:
    """The spec of a module, or of the ``__main__`` of a package."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None:
        raise ImportError(f"There is no module {name!r} that can be run.")
    return spec


def _find_main(path: str) -> ModuleSpec:
    """The spec of the ``__main__`` in a folder or zip file."""
    spec = PathFinder.find_spec("__main__", [path])
    if spec is None:
        raise ImportError(f"There is no __main__.py in {path!r}.")
    return spec


def _run_module(spec: ModuleSpec) -> None:
    loader: Any = spec.loader
    names = {"__file__": spec.origin, "__spec__": spec, "__package__": spec.parent, "__loader__": loader}
    _run_code(loader.get_code(spec.name), names)


def _run_file(path: str) -> None:
    loader: Any
    if path.endswith(".pyc"):
        loader = SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
    else:
        loader = SourceFileLoader("__main__", path)
        code = loader.source_to_code(loader.get_data(path), path)
    _run_code(code, {"__file__": path, "__loader__": loader})


def _run_code(code: CodeType, names: Mapping[str, Any]) -> None:
    """Run ``code`` in a new main module with these variables. The module lives as long as the process."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(names)
    exec(code, vars(main))  # noqa: S102
