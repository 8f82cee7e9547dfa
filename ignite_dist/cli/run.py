"""Run a script on every rank, in a context that the command has made."""

from __future__ import annotations

import os
import pkgutil
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
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
    source = sys.stdin.read() if script == _STDIN and not is_module else None
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
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        elif source is not None:
            sys.path.insert(0, "")
            _run_code(source, "<stdin>")
        elif _is_python_file(script):
            sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
            _run_code(Path(script).read_bytes(), os.path.abspath(script))
        else:
            runpy.run_path(script, run_name="__main__")


def _is_python_file(path: str) -> bool:
    """False for what holds a ``__main__.py``: a folder or a zip file."""
    return os.path.isfile(path) and pkgutil.get_importer(path) is None


def _run_code(source: str | bytes, path: str) -> None:
    """Run ``source`` in an empty main module, which lives as long as the process, as in ``python path``."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    if isinstance(source, bytes):  # of a file
        main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec"), vars(main))  # noqa: S102
