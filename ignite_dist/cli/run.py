"""Run a script on every rank, in a context that the command has made."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import ignite_dist as idist
from ignite_dist.environments import spawned


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

    ``script`` is a file, or a module if ``is_module`` is True. ``options`` are further keywords of
    ``idist.Parallel``. ``timeline`` is a file that gets a trace of the script's collectives.

    Raises:
        ValueError: there is no such file, or the arguments are incompatible. Nothing was started.
        RankFailedError: a worker failed.
    """
    if not is_module and not os.path.isfile(script):
        raise ValueError(f"There is no script {script!r} in {os.getcwd()}.")
    keywords: Any = dict(options)
    with idist.Parallel(backend, nproc_per_node, **keywords) as parallel:
        parallel.run(_run_script, script, list(arguments), is_module, timeline)
    return 0


def _run_script(
    local_rank: int, script: str, arguments: list[str], is_module: bool, timeline: str | None
) -> None:
    os.environ.update(spawned.mark_run(os.environ))
    sys.argv = [script, *arguments]
    with nullcontext() if timeline is None else idist.timeline(timeline):
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")
