"""Run a script on every rank, in a context that the command has made."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
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
        The exit status: 1 after an exception of the script in this process, whose traceback is printed.

    Raises:
        ValueError: there is no such file, or the arguments are incompatible. Nothing was started.
        RankFailedError: a worker failed.
    """
    if not is_module and script != _STDIN and not os.path.exists(script):
        raise ValueError(f"There is no script {script!r} in {os.getcwd()}.")
    source = None if is_module else _source_of_stream(script)
    keywords: Any = dict(options)
    try:
        with idist.Parallel(backend, nproc_per_node, **keywords) as parallel:
            parallel.run(_run_script, script, list(arguments), is_module, source, timeline)
    except Exception as error:
        if not _is_raised_by_script(error):
            raise
        traceback.print_exception(type(error), error, user_traceback(error.__traceback__))
        return 1
    return 0


def _is_raised_by_script(error: BaseException) -> bool:
    """True if the script was running, in this process."""
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
    with nullcontext() if timeline is None else idist.timeline(timeline):
        if is_module:
            sys.path.insert(0, os.getcwd())
            spec = _find_module(script)
            sys.argv[0] = str(spec.origin)
            _run_module(spec)
        elif source is not None:
            sys.path.insert(0, "")
            _run_code(source, _new_main("<stdin>" if script == _STDIN else script))
        elif not os.path.isfile(script) or pkgutil.get_importer(script):  # a folder or a zip file
            sys.path.insert(0, script)
            _run_module(PathFinder.find_spec("__main__", [script]))
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
            _run_file(os.path.abspath(script))


def _source_of_stream(script: str) -> str | None:
    """The source from the standard input or a pipe (``<(...)``); None for a file or a folder."""
    if script == _STDIN:
        return sys.stdin.read()
    if os.path.isfile(script) or os.path.isdir(script):
        return None
    return Path(script).read_text(encoding="utf-8")


def _find_module(name: str) -> ModuleSpec:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None:
        raise ImportError(f"There is no module {name!r} that can be run.")
    return spec


def _run_module(spec: ModuleSpec | None) -> None:
    loader: Any = None if spec is None else spec.loader
    if spec is None or loader is None:
        raise ImportError("There is no __main__.py.")
    main = _new_main(spec.origin)
    main.__spec__, main.__loader__, main.__package__ = spec, loader, spec.parent
    _run_code(loader.get_code(spec.name), main)


def _run_file(path: str) -> None:
    kind = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
    loader, main = kind("__main__", path), _new_main(path)
    main.__loader__ = loader
    _run_code(loader.get_code("__main__") if path.endswith(".pyc") else loader.get_data(path), main)


def _new_main(path: str | None) -> ModuleType:
    """A new main module. It lives as long as the process, as the main module of ``python``."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    if path is not None:
        main.__file__ = path
    return main


def _run_code(code: Any, main: ModuleType) -> None:
    if not isinstance(code, CodeType):
        code = compile(code, str(main.__file__), "exec", dont_inherit=True)
    if main.__file__ == "<stdin>":
        del main.__file__
    exec(code, vars(main))  # noqa: S102
